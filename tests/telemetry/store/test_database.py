"""Connections to DuckDB spill where no other user can look or plant anything, or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from pathlib import Path

import duckdb
import pytest

from telemetry.store import database
from telemetry.store.database import SPILL, connect
from telemetry.store.store import Store

ROOT = Path(__file__).parents[3]
OTHER_UID = 54321
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
    """Where a connection spills, once it has spilt; None: it could not."""
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
    """Root, too, spills beside the store of a service, which could replace the folder by a link."""
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


def test_a_link_planted_at_the_old_place_is_not_followed(folder: Path) -> None:
    store = small_store(folder / "store")
    (folder / "mine").mkdir(mode=0o700)
    (store.root / "spill").symlink_to(folder / "mine")
    with store.connect() as db:
        spill = spill_of(db)
        assert spill is not None and spill.resolve().parent == store.root.resolve()
        assert list((folder / "mine").iterdir()) == []


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
    assert found - {"tests/telemetry/store/test_database.py"} == {"telemetry/store/database.py"}
