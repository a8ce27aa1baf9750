"""Users' own reports as files: whose they are, what users can do to them, and faults while they are written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from publisher import IS_ROOT, NAMES, UIDS, Publisher

from almanac.config import Reports
from almanac.errors import BusyError, ConfigError, StoreError
from reports.published.files import open_own

only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


@only_root
def test_owners_and_modes(publisher: Publisher) -> None:
    publisher()
    user = publisher.root / "user"
    for path in (user, user / "60001", user / "60001" / "reports"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o711)
    for name in publisher.files():
        found = (user / name).stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (int(name.split("/")[0]), 0o400)


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What becomes of an act of that user: "done", or the name of what it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            said = "done"
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as out:  # noqa: PTH123 - of a descriptor
        return out.read()


@pytest.fixture
def open_root(reported: Any) -> Iterator[Path]:
    """A folder that every user can reach: pytest's own are closed to others."""
    import shutil
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="almanac-own-", dir="/var/tmp"))
    root.chmod(0o755)
    yield root / "advice"
    shutil.rmtree(root)


@only_root
def test_users_read_their_own_reports_and_can_neither_read_others_nor_make_files(
    reported: Any, open_root: Path
) -> None:
    publisher = Publisher(reported, open_root)
    publisher()
    names = {uid: [name for name in publisher.files() if name.startswith(str(uid))] for uid in NAMES}

    def own() -> None:
        assert len(open_own(open_root, 60_001).contexts([101, 201])) == 2

    assert as_user(60_001, own) == "done"
    assert as_user(60_002, lambda: open_own(open_root, 60_001)) == "StoreError"
    for name in names[60_002]:
        assert as_user(60_001, lambda name=name: (open_root / "user" / name).read_bytes()) == "PermissionError"
    for folder in ("60001", "60001/reports", "60002", ""):
        path = open_root / "user" / folder
        assert as_user(60_001, lambda path=path: (path / "new").write_text("x")) == "PermissionError"
        assert as_user(60_001, lambda path=path: list(path.iterdir())) == "PermissionError"
    assert as_user(60_001, lambda: (open_root / "user" / names[60_001][0]).unlink()) == "PermissionError"
    assert as_user(60_001, lambda: (open_root / ".reports.json").read_bytes()) == "PermissionError"


@only_root
@pytest.mark.parametrize("plant", ["link", "folder", "fifo", "file", "hard link"])
@pytest.mark.parametrize("place", ["jobs", "reports", "user"])
def test_what_a_user_made_while_the_folder_was_theirs_harms_nobody(
    publisher: Publisher, tmp_path: Path, plant: str, place: str
) -> None:
    """Releases before gave users their folders: whatever stands in a file's or a folder's place is not followed."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "kept").write_text("secret")
    secret.chmod(0o700)
    before = (secret / "kept").stat()
    folder = publisher.root / "user" / "60001"
    target = {"jobs": folder / "jobs", "reports": folder / "reports", "user": folder}[place]
    target.parent.mkdir(parents=True)
    for path in (publisher.root, publisher.root / "user"):
        path.chmod(0o711)
    {
        "link": lambda: target.symlink_to(secret),
        "folder": lambda: (target / "full").mkdir(parents=True),
        "fifo": lambda: os.mkfifo(target),
        "file": lambda: target.write_text("mine"),
        "hard link": lambda: os.link(secret / "kept", target),
    }[plant]()
    for path in (folder, target):
        if not path.is_symlink() and plant != "hard link":
            os.chown(path, 60_001, 60_001)
    done = publisher()
    after = (secret / "kept").stat()
    assert (after.st_uid, after.st_mode, (secret / "kept").read_text()) == (before.st_uid, before.st_mode, "secret")
    assert [path.name for path in secret.iterdir()] == ["kept"]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o700
    assert publisher.of("bob").index.user == "bob"
    if place == "user" and plant != "folder":
        assert done.not_shown == ["alice"]  # what is no folder there is for root to look at
        return
    assert done.not_shown == []
    assert len(publisher.of("alice").contexts([101])) == 1
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o711)


@only_root
def test_a_user_who_swaps_files_while_they_are_published_steers_nothing(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link in the folder's place, put there between looking and opening, is not gone through."""
    publisher()
    reports = publisher.root / "user" / "60001" / "reports"
    aside, elsewhere = tmp_path / "aside", tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = os.stat

    def swapped(path: Any, *args: Any, **named: Any) -> os.stat_result:
        found = real(path, *args, **named)
        if path == "reports" and not reports.is_symlink():
            reports.rename(aside)
            reports.symlink_to(elsewhere)
        return found

    publisher.own = Reports(own_jobs=40, own_days=29)
    for path in list(reports.iterdir())[:5]:
        path.unlink()
    monkeypatch.setattr("reports.published.folder.os.stat", swapped)
    done = publisher()
    assert done.not_shown == ["alice"]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("where", ["", "user", ".."])
def test_nothing_is_published_where_others_can_write(publisher: Publisher, where: str) -> None:
    publisher()
    (publisher.root / where).resolve().chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to it"):
        publisher()


def test_two_publishers_do_not_meet(publisher: Publisher) -> None:
    with publisher.folder.publishing(), pytest.raises(BusyError):
        publisher()


@only_root
def test_a_user_whose_quota_is_used_up_keeps_no_other_user_from_their_reports(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fchown

    def fchown(handle: int, uid: int, gid: int) -> None:
        if uid == 60_001:
            raise OSError("quota")
        real(handle, uid, gid)

    monkeypatch.setattr("os.fchown", fchown)
    assert publisher().not_shown == ["alice"]
    assert len(publisher.of("bob").contexts([1])) == 1
    monkeypatch.undo()
    done = publisher()
    assert (done.lists, done.reports, done.not_shown) == (1, 29, [])


def test_a_full_disk_is_said_and_leaves_what_was_there(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher.own = Reports(own_per_run=20)
    publisher()
    before = publisher.files()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("reports.published.folder.flush_file_system", full)
    with pytest.raises(StoreError, match="No space left") as caught:
        publisher()
    assert "make room" in caught.value.hint
    assert publisher.files() == before
    monkeypatch.undo()
    assert publisher().reports == 20


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["rename", "fchmod", "unlink"])
def test_killed_at_any_moment_every_list_names_reports_that_are_there(
    publisher: Publisher, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.own = Reports(own_jobs=6)
    publisher()
    publisher.own = Reports(own_jobs=9, own_days=29)
    killed = 0
    for after in range(0, 40, 2):
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            _die_at(patch, call, after)
            publisher()
            killed -= 1
        killed += 1
        for user in UIDS:
            own = publisher.of(user)
            ids = [run.job_id for run in own.index.runs if run.report]
            assert len(own.contexts(ids)) == len(ids) >= 6
    assert killed
    publisher()
    assert len(publisher.files()) == 2 * (9 + 1)


def _die_at(patch: pytest.MonkeyPatch, call: str, after: int) -> None:
    """From that call on nothing of this process reaches the disk."""
    calls = [0]

    def dies(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def counted(*args: Any, **named: Any) -> Any:
            calls[0] += name == call
            if calls[0] > after:
                calls[0] = 10**6
                raise Killed
            return real(*args, **named)

        return counted

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fchmod", "fchown"):
        patch.setattr(os, name, dies(name))
