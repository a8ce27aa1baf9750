"""Connections to DuckDB keep their limits and spill to private folders; damaged files are named and left out."""

from __future__ import annotations

import fcntl
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.errors import DamageWarning, FileFormatError
from telemetry.store import database
from telemetry.store.database import (
    LEAST_MIB,
    RESERVED_MIB,
    SPILL,
    check_files,
    connect,
    duckdb_share_mib,
    faults,
    require_readable,
    resident_mib,
)
from telemetry.store.partitions import write_sealed
from telemetry.store.store import ClusterStore, Store
from telemetry.store.writing import WriteResult

ROOT = Path(__file__).parents[3]
OTHER_UID = 54321
LIMIT_MIB, HELD_MIB = 384, 160
PROGRAM = f"""
import sys
from pathlib import Path
import numpy as np
from telemetry.store.store import Store
held = np.ones({HELD_MIB} * 2**17)
with Store.open(Path(sys.argv[1]), memory_limit_mib={LIMIT_MIB}, threads=2).connect() as db:
    sql = "CREATE TEMP TABLE t AS SELECT hash(range)::VARCHAR || repeat('x', 80) s FROM range(1_500_000)"
    db.execute(sql).fetchall()
    db.execute("SELECT max(s) FROM (FROM t ORDER BY s LIMIT 1_400_000)").fetchall()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
TOO_LARGE = "CREATE TEMP TABLE t AS SELECT range i, random()::VARCHAR || repeat('x', 100) s FROM range(800_000)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; $TMPDIR is another one."""
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def spill_of(db: duckdb.DuckDBPyConnection) -> Path | None:
    """The folder that a connection has spilt to; None if it could not."""
    [(folder,)] = db.execute("SELECT current_setting('temp_directory')").fetchall()
    try:
        db.execute(TOO_LARGE).fetchall()
    except duckdb.OutOfMemoryException:
        return None
    assert any(path.stat().st_size for path in Path(folder).glob("duckdb_temp*"))
    return Path(folder).absolute()


def small_store(root: Path) -> Store:
    return Store.create(root, memory_limit_mib=64, threads=1)


def test_a_store_of_ones_own_is_spilt_to_in_private(folder: Path) -> None:
    store = small_store(folder / "store")
    with store.connect() as db:
        spill = spill_of(db)
        assert spill is not None and spill.parent == store.root
        assert spill.stat().st_mode & 0o777 == 0o700
    assert not spill.exists()
    assert list((folder / "here").iterdir()) == []


@pytest.mark.parametrize("why", ["read only", "another user's", "writable by others"])
def test_beside_a_store_that_is_not_ones_own_spills_go_to_a_private_folder_of_tmpdir(
    folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Root, too, spills outside the store of a service, which could replace the folder by a link."""
    store = small_store(folder / "store")
    if why == "read only":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != store.root and access(path, mode))
    elif why == "another user's" and os.geteuid() == 0:
        os.chown(store.root, OTHER_UID, OTHER_UID)
    elif why == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)
        monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    else:
        store.root.chmod(0o770)
    with store.connect() as db:
        spill = spill_of(db)
        assert spill is not None and spill.parent == Path(tempfile.gettempdir())
        assert spill.stat().st_mode & 0o777 == 0o700
    assert not spill.exists()
    assert list((folder / "here").iterdir()) == []
    assert {path.name for path in store.root.iterdir()} == {"store.json"}


def test_nothing_is_spilt_where_others_could_replace_every_folder(folder: Path) -> None:
    (folder / "tmp").chmod(0o777)
    with connect([], memory_limit_mib=64, threads=1) as db:
        assert spill_of(db) is None
    assert list((folder / "here").iterdir()) == list((folder / "tmp").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_is_used_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, used, fresh = (folder / f"{SPILL}{name}" for name in ("left", "used", "fresh"))
    for path in (left, used):
        path.mkdir()
        (path / "owner").touch()
        (path / "storage.tmp").write_bytes(b"x" * 1000)
    fresh.mkdir()  # not locked yet
    (folder / f"{SPILL}link").symlink_to(folder / "here")
    (folder / "here" / "owner").touch()
    with (used / "owner").open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with connect([folder], threads=1):
            assert left.exists(), "it is not old enough to say that nobody is about to lock it"
        monkeypatch.setattr(database, "_FRESH_S", -60)
        with connect([folder], threads=1):
            assert not left.exists()
    assert used.exists() and fresh.exists() and (folder / "here" / "owner").exists()


def test_only_one_module_connects() -> None:
    """The rest names DuckDB's types and errors, which begin with a capital."""
    used = re.compile(r"\bduckdb\.[a-z]\w*|\bfrom duckdb\b|\bimport duckdb as\b|import_module\(.duckdb")
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    ours = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    found = {str(path) for path in ours if used.search((ROOT / path).read_text(encoding="utf-8"))}
    own = ("telemetry/store/test_database.py", "conftest.py", "one_duckdb.py", "cli/due_worker.py")
    tests = {f"tests/{name}" for name in own}
    assert found - tests == {"telemetry/store/database.py"}


def test_arrays_and_duckdb_together_stay_within_a_quarter_above_the_limit(tmp_path: Path) -> None:
    """The query alone takes more than the limit, so DuckDB has to spill."""
    Store.create(tmp_path / "store")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert HELD_MIB < int(done.stdout.split()[-1]) / 1024 < 1.25 * LIMIT_MIB


def test_duckdb_gets_what_the_process_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "resident_mib", lambda: 300)
    assert duckdb_share_mib(2048) == 2048 - 300 - RESERVED_MIB
    assert duckdb_share_mib(400) == 100, "at least a quarter: a process that holds much must still read its store"
    assert duckdb_share_mib(64) == LEAST_MIB


def test_a_connection_has_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "resident_mib", lambda: 1000)
    with Store.create(tmp_path / "store", memory_limit_mib=1512 + RESERVED_MIB).connect() as db:
        assert db.execute("SELECT current_setting('memory_limit')").fetchall() == [("512.0 MiB",)]


def test_the_memory_of_this_process_is_known_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10 < resident_mib() < 100_000
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert resident_mib() == 0


HOUR_MS = 3_600_000


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterStore:
    return Store.create(tmp_path / "store").of("c")


def test_a_damaged_file_is_named_and_left_out(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]}))
    path = cluster.files("jobs")[0]
    path.write_bytes(b"not parquet")
    with pytest.warns(DamageWarning, match=f"{path} is left out"):
        assert cluster.read("jobs")["job_id"].to_pylist() == [2]
    assert cluster.damaged_files(["jobs"]) == [path]
    assert cluster.damaged_files(["telemetry"]) == []


def test_no_row_is_written_to_a_damaged_file_and_those_of_others_are(cluster: ClusterStore) -> None:
    rows = pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]})
    cluster.write("jobs", rows)
    path = cluster.files("jobs")[0]
    path.write_bytes(b"not parquet")
    more = pa.table({"job_id": [3, 4], "submit_s": [11, 100_001]})
    with pytest.warns(DamageWarning):
        assert cluster.write("jobs", more) == WriteResult(added=1, left_out=1)
    assert cluster.replace("jobs", rows.slice(0, 0), rows) == 1
    assert path.read_bytes() == b"not parquet"
    assert cluster.read("jobs")["job_id"].to_pylist() == [4]


@pytest.mark.parametrize("is_footer", [True, False])
def test_a_file_that_another_program_wrote_is_named_and_left_out(cluster: ClusterStore, is_footer: bool) -> None:
    cluster.write("jobs", pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]}))
    path = cluster.files("jobs")[0]
    rows = pq.read_table(path, partitioning=None)
    pq.write_table(rows if is_footer else rows.replace_schema_metadata(), path)
    with pytest.warns(DamageWarning, match="checksum"):
        assert cluster.read("jobs")["job_id"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("program", "said"),
    [("os.abort()", "damaged: SIGABRT ended the process that tried to read it"),
     ("os.kill(os.getpid(), 9)", "not tried: the process that tried to read it was killed"),
     ("signal.raise_signal(14)", "not tried within"), ("sys.exit('no memory')", "not tried: no memory")],
)  # fmt: skip
def test_an_imported_file_is_first_tried_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(database, "_TRIAL", f"import os, signal, sys; {program}")
    with pytest.raises(FileFormatError, match=said):
        require_readable(tmp_path / "a.parquet")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Six hours of telemetry, a file each, of two clusters."""
    store = Store.create(tmp_path / "store")
    rows = {"host": ["n1"] * 3, "gpu": [0] * 3, "mig": [""] * 3, "time_ms": [HOUR_MS * n for n in range(3)]}
    for cluster in ("a", "b"):
        store.of(cluster).write("telemetry", pa.table(rows))
    return store


def test_damaged_files_are_named_with_the_reason(store: Store, tmp_path: Path) -> None:
    whole, empty = check_files(store.root), check_files(Store.create(tmp_path / "empty").root)
    assert (whole.files, whole.damaged, empty.files) == (6, (), 0)
    empty, cut, other, junk = store.of("a").files("telemetry") + store.of("b").files("telemetry")[:1]
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-9])
    pq.write_table(pa.table({"host": ["n1"], "mig": [""]}), other)
    junk.write_bytes(b"PAR1" + b"\xff" * 200 + (100).to_bytes(4, "little") + b"PAR1")
    found = check_files(store.root)
    assert found.files == 6
    reasons = {one.path: one.reason for one in found.damaged}
    assert list(reasons) == sorted([empty, cut, other, junk])
    assert reasons[empty] == reasons[cut] == "no whole Parquet file"
    assert reasons[other] == "it has no checksum of almanac's, so another program wrote it"
    assert reasons[junk]


def test_half_written_files_disturb_nothing_and_strays_are_named(store: Store) -> None:
    folder = store.of("a").files("telemetry")[0].parent
    (folder / ".tmp-123").write_bytes(b"half")
    (folder / ".tmp-1.parquet").write_bytes(b"half")
    (folder / "copy of 0000.parquet").write_bytes(b"")
    (folder / "2500.parquet").write_bytes(b"")
    found = check_files(store.root)
    assert (found.files, found.damaged) == (6, ())
    assert [one.path.name for one in found.strays] == ["2500.parquet", "copy of 0000.parquet"]


def flipped(content: bytes, seed: int, number: int) -> Iterator[bytes]:
    """The content with one bit flipped, at so many random places."""
    at = random.Random(seed)
    for _ in range(number):
        other = bytearray(content)
        other[at.randrange(len(other))] ^= 1 << at.randrange(8)
        yield bytes(other)


def test_every_flipped_bit_is_seen_or_changes_nothing(store: Store) -> None:
    rng = np.random.default_rng(1)
    rows = {"job_id": np.arange(600), "submit_s": rng.integers(0, 86_400, 600), "gpu_count": rng.integers(0, 9, 600)}
    store.of("a").write("jobs", pa.table({**rows, "name": [f"train-{number}" for number in range(600)]}))
    [path] = store.of("a").files("jobs")
    whole = path.read_bytes()
    for content in flipped(whole, 3, 200):
        path.write_bytes(content)
        assert faults([path], {path})


def test_a_column_that_a_later_almanac_added_is_no_damage(store: Store) -> None:
    before = store.of("a").read("telemetry")
    path = store.of("a").files("telemetry")[0]
    rows = pq.read_table(path, partitioning=None).replace_schema_metadata()
    with path.open("w+b") as out:
        write_sealed(rows.append_column("new_counter", pa.nulls(rows.num_rows, pa.float32())), out)
    assert check_files(store.root).damaged == ()
    assert store.of("a").read("telemetry").equals(before)


def test_all_pages_are_read_of_the_newest_files_or_of_all(store: Store) -> None:
    files = store.of("a").files("telemetry") + store.of("b").files("telemetry")
    for path in files[:1] + files[-1:]:  # the oldest of a, the newest of b
        content = bytearray(path.read_bytes())
        chunk = pq.read_metadata(path).row_group(0).column(3)
        content[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(content)
    everything = check_files(store.root, None)
    assert [one.path for one in everything.damaged] == files[:1] + files[-1:]
    assert everything.read == 6
