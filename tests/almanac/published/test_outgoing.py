"""Files for users: whose they are, what a reader trusts, and those that wait for root: whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from almanac.errors import FileFormatError
from almanac.published.files import read_own
from almanac.published.outgoing import Outgoing, name_of, owners_of, uid_of, writable_by_others

ME = os.geteuid()


def test_users_without_a_uid_and_several_of_one_are_told_apart() -> None:
    owners = owners_of(["ann", "bob", "eve", "zoe"], {"ann": 1, "bob": 2, "eve": 2}.get)
    assert (owners.uids, owners.unknown, owners.shared) == ({"ann": 1}, ["zoe"], ["bob", "eve"])


def test_the_systems_user_database() -> None:
    assert (uid_of("root"), name_of(0)) == (0, "root")
    assert [uid_of(name) for name in ("nobody-has-this-name", "", "a\0b", "../root")] == [None] * 4
    assert [name_of(uid) for uid in (4_000_000_001, 2**70, -5)] == [None] * 3


def test_own_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    path.write_bytes(b"12345")
    assert read_own(path, ME, 5) == b"12345"
    with pytest.raises(FileFormatError, match="larger than 4 bytes"):
        read_own(path, ME, 4)
    path.chmod(0o620)
    with pytest.raises(FileFormatError, match="other users can write"):
        read_own(path, ME, 5)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        read_own(tmp_path / "link", ME, 5)
    with pytest.raises(FileFormatError, match="not a regular file"):
        read_own(tmp_path / "pipe", ME, 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_does_not_choose_where_is_published(tmp_path: Path) -> None:
    """Root would change the mode of what it names, such as /etc."""
    (tmp_path / "etc" / "advice").mkdir(parents=True)
    (tmp_path / "own").symlink_to(tmp_path / "link")
    (tmp_path / "link").symlink_to(tmp_path / "etc")
    assert not [fault for fault in writable_by_others(tmp_path / "own" / "advice", 0) if "link" in fault]
    os.lchown(tmp_path / "link", 60001, 60001)
    assert f"{tmp_path}/link is a link of uid 60001" in writable_by_others(tmp_path / "own" / "advice", 0)


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
    """Root would take an empty one for a site that publishes nothing any more, right after an upgrade."""
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
