"""Files for users: whose they are, and what a reader trusts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from almanac.errors import FileFormatError
from telemetry.store.user_files import name_of, owners_of, read_own, uid_of, writable_by_others

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
