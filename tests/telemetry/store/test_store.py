"""The store keeps what it is given: once, whole, sorted, whatever happens to the writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_site import rows_of
from profiles import examples

from almanac.errors import StoreError
from almanac.records import Counts
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.source import RowBatch
from telemetry.store.partitions import write_sealed
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore, Store
from telemetry.store.writing import WriteResult

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS


def samples(rows: list[tuple[str, int, int, float | None]]) -> pa.Table:
    """Telemetry rows of (host, gpu, seconds after START_MS, hbm_used_mib)."""
    full = ((host, gpu, "", START_MS + at_s * 1000, mib) for host, gpu, at_s, mib in rows)
    return rows_of("telemetry", "host gpu mig time_ms hbm_used_mib", full)


def test_writing_the_same_rows_twice_changes_nothing(cluster: ClusterStore) -> None:
    rows = samples([("n1", 0, 0, 5.0), ("n1", 0, 10, 6.0), ("n1", 1, 0, 7.0)])
    assert cluster.write("telemetry", rows) == WriteResult(added=3)
    before = {path: path.stat().st_ino for path in cluster.files("telemetry")}
    assert cluster.write("telemetry", rows) == WriteResult(unchanged=3)
    assert {path: path.stat().st_ino for path in cluster.files("telemetry")} == before


def test_files_from_before_a_column_was_added_read_as_null_and_can_be_completed(cluster: ClusterStore) -> None:
    spec = TABLES["bindings"]
    old = {"job_id": 7, "host": "n1", "gpu": 0, "origin": "prolog", "seen_s": 86_400}
    cluster.write("bindings", pa.Table.from_pylist([old], spec.schema))
    [path] = cluster.files("bindings")
    rows = pq.read_table(path).select(list(old)).replace_schema_metadata()
    with path.open("w+b") as out:
        write_sealed(rows, out)
    assert cluster.read("bindings").to_pylist() == [{**old, "uuid": None, "mig": None}]
    cluster.write("bindings", pa.Table.from_pylist([{**old, "uuid": "GPU-a"}], spec.schema))
    assert cluster.read("bindings").to_pylist() == [{**old, "uuid": "GPU-a", "mig": None}]


def test_a_later_row_replaces_values_but_a_null_erases_none(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [1], "submit_s": [100], "state": ["RUNNING"], "user": ["ann"]}))
    later = pa.table({"job_id": [1], "submit_s": [100], "state": ["COMPLETED"], "end_s": [900]})
    assert cluster.write("jobs", later) == WriteResult(replaced=1)
    row = cluster.read("jobs", ["state", "user", "end_s"]).to_pylist()[0]
    assert row == {"state": "COMPLETED", "user": "ann", "end_s": 900}


def test_requeued_runs_of_one_job_id_and_clusters_are_kept_apart(cluster: ClusterStore, store: Store) -> None:
    cluster.write("jobs", pa.table({"job_id": [7, 7], "submit_s": [100, 200], "state": ["REQUEUED", "COMPLETED"]}))
    assert cluster.read("jobs")["state"].to_pylist() == ["REQUEUED", "COMPLETED"]
    store.of("a").write("jobs", pa.table({"job_id": [1], "submit_s": [1], "user": ["ann"]}))
    store.of("b").write("jobs", pa.table({"job_id": [1], "submit_s": [1], "user": ["bob"]}))
    assert store.of("a").read("jobs")["user"].to_pylist() == ["ann"]
    assert store.clusters() == ["a", "b", "c"]


def test_a_table_may_lie_on_another_disk(store: Store, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (store.root / "telemetry").symlink_to(tmp_path / "disk")
    (store.root / "watermarks").symlink_to(tmp_path / "disk")
    store.of("a").write("telemetry", samples([("h", 0, 1, 1.0)]))
    store.of("a").set_watermark("sacct", 7)
    assert (store.of("a").read("telemetry").num_rows, store.of("a").watermark("sacct")) == (1, 7)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write into another's store")
def test_what_root_writes_is_the_store_owners(store: Store) -> None:
    """Else one command by root stops the service that works there."""
    owner = (54321, 54322)
    for path in (store.root, store.root / "store.json"):
        os.chown(path, *owner)
    store.of("a").write("jobs", pa.table({"job_id": [1], "submit_s": [1], "user": ["ann"]}))
    store.of("a").set_watermark("sacct", 1)
    with store.of("a").summarizing():
        made = [path for path in store.root.rglob("*") if path.name != "store.json"]
    assert len(made) >= 8
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {owner}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_the_store_owners_link_does_not_choose_where_root_writes(store: Store, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (store.root / "jobs").symlink_to(tmp_path / "etc")
    os.lchown(store.root / "jobs", 54321, 54322)
    rows = pa.table({"job_id": [1], "submit_s": [1], "user": ["ann"]})
    with pytest.raises(StoreError, match=r"jobs.*link of another user"):
        store.of("a").write("jobs", rows)
    assert not list((tmp_path / "etc").iterdir())
    os.chown(tmp_path / "etc", 54321, 54322)
    store.of("a").write("jobs", rows)
    assert store.of("a").read("jobs").num_rows == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_somebody_elses_store_is_refused_in_words(tmp_path: Path) -> None:
    Store.create(tmp_path / "store")
    (tmp_path / "store").chmod(0o700)
    os.seteuid(60001)
    try:
        with pytest.raises(StoreError, match="cannot be created or read"):
            Store.create(tmp_path / "store")
    finally:
        os.seteuid(0)


SAMPLE = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(3590, 3610), st.floats(0, 9, width=32))


@examples(0.15)
@given(st.lists(st.lists(SAMPLE, max_size=8), max_size=4))
def test_any_writes_leave_the_greatest_value_of_the_last_write(
    tmp_path_factory: pytest.TempPathFactory, writes: list
) -> None:
    store = Store.create(tmp_path_factory.mktemp("s") / "store")
    expected: dict[tuple[str, int, int], float] = {}
    for rows in writes:
        store.of("c").write("telemetry", samples(rows))
        expected.update({(host, gpu, START_MS + second * 1000): value for host, gpu, second, value in sorted(rows)})
    table = store.of("c").read("telemetry", ["host", "gpu", "time_ms", "hbm_used_mib"])
    got = {(r["host"], r["gpu"], r["time_ms"]): r["hbm_used_mib"] for r in table.to_pylist()}
    assert got == expected
    assert table.num_rows == len(expected)


@pytest.mark.parametrize(
    ("since_s", "until_s", "seen"),
    [(0, 10, [0]), (0, 11, [0, 10]), (10, 3600, [10]), (10, None, [10, 3600]), (None, None, [0, 10, 3600]),
     (4000, 9000, [])],
)  # fmt: skip
def test_a_view_has_the_rows_that_reading_the_span_has(
    cluster: ClusterStore, since_s: int | None, until_s: int | None, seen: list[int]
) -> None:
    cluster.write("telemetry", samples([("n1", 0, second, 1.0) for second in (0, 10, 3600)]))
    span = [None if second is None else START_MS // 1000 + second for second in (since_s, until_s)]
    with cluster.connect() as db:
        cluster.view(db, "telemetry", ["time_ms"], *span)
        rows = db.execute("SELECT time_ms FROM telemetry ORDER BY time_ms").fetchall()
    assert [(time_ms - START_MS) // 1000 for (time_ms,) in rows] == seen
    assert cluster.read("telemetry", ["time_ms"], *span)["time_ms"].to_pylist() == [time_ms for (time_ms,) in rows]


def test_reading_only_rows_that_have_one_of_some_values(cluster: ClusterStore) -> None:
    given = [("n1", 0, 0, 5.0), ("n2", 0, 0, 6.0), ("n2", 1, 0, 7.0), ("n3", 1, 0, 8.0)]
    cluster.write("telemetry", samples(given))

    def read(**among: pa.Array) -> list[float]:
        return sorted(cluster.read("telemetry", ["hbm_used_mib"], among=among)["hbm_used_mib"].to_pylist())

    hosts = pa.array(["n2", "n3", "x' OR 1=1 --"])
    assert read(host=hosts) == [6, 7, 8]
    assert read(host=hosts, gpu=pa.array([1, 5], pa.int16())) == [7, 8]
    assert read(host=pa.array([], pa.string())) == []


def test_columns_carry_their_unit(cluster: ClusterStore) -> None:
    cluster.write("telemetry", samples([("n1", 0, 0, 5.0)]))
    schema = pq.read_schema(cluster.files("telemetry")[0])
    assert schema.field("hbm_used_mib").metadata == {b"unit": b"MiB"}


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden"])
def test_a_cluster_name_cannot_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a folder"):
        store.of(name).write("jobs", pa.table({"job_id": [1], "submit_s": [1]}))


def test_rows_without_a_key_and_unknown_columns_are_refused(cluster: ClusterStore) -> None:
    with pytest.raises(StoreError, match="without submit_s"):
        cluster.write("jobs", pa.table({"job_id": [1]}))
    with pytest.raises(StoreError, match="unknown columns"):
        cluster.write("jobs", pa.table({"job_id": [1], "submit_s": [1], "color": ["red"]}))


def test_a_watermark_never_moves_back(cluster: ClusterStore) -> None:
    assert cluster.watermark("sacct") is None
    cluster.set_watermark("sacct", 100)
    cluster.set_watermark("sacct", 50)
    assert cluster.watermark("sacct") == 100


def test_only_a_watermark_in_the_future_is_pulled_back(cluster: ClusterStore) -> None:
    for mark_s, ahead_s, left_s in ((1000, 0, 1000), (1060, 0, 1060), (1061, 61, 400), (10**9, 10**9 - 1000, 400)):
        cluster.set_watermark("sacct", mark_s)
        assert cluster.pull_back_watermark("sacct", 1000, 400) == ahead_s
        assert cluster.watermark("sacct") == left_s
    assert cluster.pull_back_watermark("prometheus", 1000, 400) == 0
    assert cluster.watermark("prometheus") is None


def test_every_watermark_of_a_cluster_is_listed(store: Store) -> None:
    for source, cluster in (("sacct", "c"), ("report-week", "c"), ("sacct", "b.c"), ("prolog", "d")):
        store.of(cluster).set_watermark(source, 7)
    store.of("c").reopen([1])
    assert store.of("c").watermarks() == {"report-week": 7, "sacct": 7}


@pytest.mark.parametrize("mark", ["1e999", "9" * 400, "NaN", "null", '"x"', "[" * 50_000])
def test_a_watermark_that_is_no_date_says_what_to_do(cluster: ClusterStore, mark: str) -> None:
    (cluster.root / "watermarks").mkdir()
    (cluster.root / "watermarks" / "sacct.c.json").write_text(f'{{"until_s": {mark}}}')
    with pytest.raises(StoreError, match="not a watermark") as caught:
        cluster.watermark("sacct")
    assert "remove it" in caught.value.hint


def test_files_are_not_readable_by_others(store: Store) -> None:
    store.of("c").write("jobs", pa.table({"job_id": [1], "submit_s": [10]}))
    assert store.of("c").files("jobs")[0].stat().st_mode & 0o007 == 0
    assert store.root.stat().st_mode & 0o007 == 0


KILLED = textwrap.dedent(
    """
    import os, shutil, sys
    from pathlib import Path
    import numpy as np, pyarrow as pa
    from telemetry.store.store import Store
    from almanac.records import Counts
    from telemetry.ingest import IngestResult, ingest
    from telemetry.sources.source import RowBatch

    class Steady:
        # A GPU for two hours, a batch for each.
        name = "test"
        def read(self, since_s, until_s):
            for hour in range(2):
                time_ms = int(sys.argv[2]) + hour * 3_600_000 + np.arange(360) * 10_000
                rows = pa.table({"host": ["a"] * 360, "gpu": pa.array([0] * 360, pa.int16()), "mig": [""] * 360,
                                 "time_ms": time_ms, "hbm_used_mib": pa.array(time_ms % 977, pa.float32())})
                yield RowBatch("telemetry", rows, Counts(360, 360), int(time_ms[-1]) // 1000 + 10)

    def run(root, steps):
        # In a process of its own, killed right before that file takes its place.
        def count(event, args):
            nonlocal steps
            if event == "os.rename":
                steps -= 1
                if not steps:
                    os._exit(9)
        if not (pid := os.fork()):
            sys.addaudithook(count)
            store = Store.open(root, threads=1).of("c")
            ingest(Steady(), store, 0, 2**40, IngestResult("test", 0, 2**40), lambda rows, reached_s: None)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    os.fsync = lambda handle: None  # of the power, not of the process
    base = Path(sys.argv[1])
    Store.create(base / "new")
    for steps in range(1, 1000):
        root, again = base / f"{steps}-killed", base / f"{steps}-again"
        shutil.copytree(base / "new", root)
        ended = run(root, steps)
        shutil.copytree(root, again)
        assert run(again, 0) == 0
        if not ended:
            break
    """
)


def test_a_writer_that_is_killed_at_any_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(START_MS)], check=True)
    found: set[tuple[int, int]] = set()
    for root in tmp_path.glob("*-*"):
        store = Store.open(root).of("c")
        table = store.read("telemetry", ["host", "time_ms", "hbm_used_mib"])
        times, hosts = table["time_ms"].to_numpy(), table["host"].to_pylist()
        assert len(set(zip(hosts, times.tolist(), strict=True))) == table.num_rows
        assert np.array_equal(table["hbm_used_mib"].to_numpy(), (times % 977).astype("float32"))
        assert set((times // 86_400_000).tolist()) <= set(store.peek_open_days())
        done_ms = (store.watermark("test") or START_MS // 1000) * 1000
        assert (times < done_ms).sum() == (done_ms - START_MS) // 10_000
        hours = (table.num_rows // 360, (done_ms - START_MS) // HOUR_MS)
        found.add(hours)
        if root.name.endswith("again"):
            assert hours == (2, 2)
            assert not list(root.rglob(".tmp-*"))
    assert found == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}, "hours with rows, and before the watermark"


class Spans:
    """A source whose batches reach their span's end."""

    name = "spans"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        yield RowBatch("jobs", pa.table({"job_id": [since_s], "submit_s": [since_s]}), Counts(1, 1), until_s)


def test_a_span_behind_a_gap_leaves_the_watermark_where_it_is(cluster: ClusterStore) -> None:
    def read(since_s: int, until_s: int) -> int | None:
        ingest(Spans(), cluster, since_s, until_s, IngestResult("spans", since_s, until_s), lambda rows, at_s: None)
        return cluster.watermark("spans")

    assert read(0, 1000) == 1000
    assert read(500_000, 600_000) == 1000, "1000 to 500000 was never read"
    assert read(900, 2000) == 2000


def test_the_days_of_a_file_are_open_before_it_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("telemetry.store.writing.write_partition", killed)
    with pytest.raises(KeyboardInterrupt):
        store.of("c").write("telemetry", samples([("n1", 0, 0, 1.0)]), lambda start_s: [start_s // 86_400])
    assert list(store.of("c").peek_open_days()) == [START_MS // 86_400_000]
    assert store.of("c").files("telemetry") == []


def test_a_write_opens_the_days_of_the_files_that_it_changes_only(cluster: ClusterStore) -> None:
    seen: list[int] = []

    def opens(start_s: int) -> list[int]:
        seen.append(start_s - START_MS // 1000)
        return []

    cluster.write("telemetry", samples([("n1", 0, 0, 1.0), ("n1", 0, 3600, 1.0)]), opens)
    cluster.write("telemetry", samples([("n1", 0, 0, 1.0), ("n1", 0, 3600, 2.0)]), opens)
    cluster.write("telemetry", samples([("n1", 0, 0, None), ("n1", 0, 3600, 2.0)]), opens)
    assert seen == [0, 3600, 3600]


def gpus(rows: list[tuple[int, str, float | None]]) -> pa.Table:
    """Rows of gpu_metrics of (job_id, host, hbm_peak_mib), GPU 0; jobs are submitted a day apart."""
    full = ((job_id, job_id * 86_400, host, 0, "", mib) for job_id, host, mib in rows)
    return rows_of("gpu_metrics", "job_id submit_s host gpu mig hbm_peak_mib", full)


def owners(*job_ids: int) -> pa.Table:
    return pa.table({"job_id": job_ids, "submit_s": [job_id * 86_400 for job_id in job_ids]})


def stored_gpus(cluster: ClusterStore) -> list[tuple[int, str, float | None]]:
    table = cluster.read("gpu_metrics", ["job_id", "host", "hbm_peak_mib"])
    return [(row["job_id"], row["host"], row["hbm_peak_mib"]) for row in table.to_pylist()]


def test_replacing_leaves_no_row_of_an_owner_that_was_not_given_again(cluster: ClusterStore) -> None:
    cluster.replace("gpu_metrics", gpus([(1, "a", 5.0), (1, "b", 6.0), (2, "a", 7.0)]), owners(1, 2))
    assert cluster.replace("gpu_metrics", gpus([(1, "b", None)]), owners(1)) == 1
    assert stored_gpus(cluster) == [(1, "b", None), (2, "a", 7.0)]
    assert cluster.replace("gpu_metrics", gpus([]), owners(1, 3)) == 1
    assert stored_gpus(cluster) == [(2, "a", 7.0)]


def test_replacing_by_the_same_rows_changes_no_file(cluster: ClusterStore) -> None:
    rows = gpus([(1, "a", 5.0), (1, "b", None)])
    assert cluster.replace("gpu_metrics", rows, owners(1)) == 1
    [before] = [path.stat().st_ino for path in cluster.files("gpu_metrics")]
    assert cluster.replace("gpu_metrics", rows.take([1, 0]), owners(1)) == 0
    assert [path.stat().st_ino for path in cluster.files("gpu_metrics")] == [before]


def test_a_store_that_may_not_be_written_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("almanac.atomic.os.open", refused)
    with pytest.raises(StoreError, match="cannot be written: Permission denied"):
        store.of("c").set_watermark("sacct", 1)


def test_a_link_in_the_place_of_the_lock_is_refused_and_what_it_names_stays(
    cluster: ClusterStore, tmp_path: Path
) -> None:
    target, lock = tmp_path / "shadow", cluster.root / ".lock"
    target.write_text("root's")
    lock.unlink(missing_ok=True)
    lock.symlink_to(target)
    with pytest.raises(StoreError, match="symbolic link"):
        cluster.set_watermark("sacct", 1)
    lock.unlink()
    lock.hardlink_to(target)
    cluster.set_watermark("sacct", 1)
    assert target.read_text() == "root's"


def test_without_memory_the_limit_to_raise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.store.database._is_guarded", lambda folder: False)
    store = Store.create(tmp_path / "store", memory_limit_mib=64, threads=1)
    with pytest.raises(StoreError, match="out of memory") as caught, store.connect() as db:
        db.execute("CREATE TEMP TABLE t AS SELECT range i, repeat('x', 100) || range FROM range(1_500_000)").fetchall()
    assert "store.memory_limit_mib in the configuration (now 64)" in caught.value.hint
    assert "move" not in caught.value.hint


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_the_file_as_it_was(
    cluster: ClusterStore, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    cluster.write("jobs", pa.table({"job_id": [1], "submit_s": [10], "user": ["ann"]}))
    [path] = cluster.files("jobs")
    before = path.read_bytes()

    def is_full(handle: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(StoreError, match=f"{path}: cannot be written: {os.strerror(reason)}") as caught:
        cluster.write("jobs", pa.table({"job_id": [2], "submit_s": [20]}))
    assert "free disk space" in caught.value.hint
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]
