"""Files that wait for root's program: whole or not at all, and never an empty folder that would remove all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from telemetry.store.outgoing import Outgoing


def test_files_are_replaced_whole_and_removed_with_their_folders(tmp_path: Path) -> None:
    outgoing = Outgoing(tmp_path / "published" / "c")
    outgoing.prepare()
    outgoing.write([("60001", "advice", b"old"), ("60001", "reports/7-1-a", b"report"), ("_site", "advice", b"all")])
    outgoing.write([("60001", "advice", b"new")])
    assert outgoing.users() == ["60001", "_site"]
    assert outgoing.read("60001", "advice") == b"new"
    assert stat.S_IMODE(outgoing.path("60001", "advice").stat().st_mode) == 0o600
    outgoing.remove("60001", ["advice", "packing"])
    assert outgoing.read("60001", "advice") is None
    outgoing.remove("60001", ["reports/7-1-a"])
    assert outgoing.users() == ["_site"]


def test_a_run_that_writes_nothing_leaves_no_folder_for_root(tmp_path: Path) -> None:
    """Root would take an empty one for a site where nothing is published any more, right after an upgrade."""
    outgoing = Outgoing(tmp_path / "published" / "c")
    with outgoing.locked():
        outgoing.prepare()
        (outgoing.root / ".tmp-1").write_bytes(b"of a killed run")
        outgoing.prepare()
    assert sorted(path.name for path in outgoing.root.iterdir()) == [".lock"]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    outgoing = Outgoing(tmp_path)
    folder = outgoing.path("60001", "advice").parent
    folder.mkdir(parents=True)
    os.mkfifo(folder / "advice")
    (folder / "jobs").symlink_to("/dev/zero")
    assert [outgoing.read("60001", name) for name in ("advice", "jobs")] == [None, None]
