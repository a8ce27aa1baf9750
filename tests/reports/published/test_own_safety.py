"""Users' own reports as files: whose they are, what users can do to them, and faults while they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from publisher import IS_ROOT, NAMES, UIDS, Publisher

from almanac.config import Reports
from almanac.errors import BusyError, StoreError
from almanac.published.outgoing import Outgoing
from reports.published.caller import PublishedJobs
from slurm_hooks.distribute import distribute

only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


def as_user(uid: int, act: Callable[[], object]) -> str:
    """Run an act as that user, and return "done" or the name of the error."""
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
    publisher = Publisher(reported, open_root.with_name("outgoing"))
    publisher()
    Outgoing(publisher.root).write([("_site", "advice", b"of the publish before\n")])
    distribute(publisher.root, open_root, None)
    names = {uid: [name for name in publisher.files() if name.startswith(str(uid))] for uid in NAMES}

    def own() -> None:
        assert len(PublishedJobs(open_root, 60_001).reports([101, 201])) == 2

    assert as_user(60_001, own) == "done"
    assert as_user(60_002, lambda: PublishedJobs(open_root, 60_001).index) == "StoreError"
    for name in names[60_002]:
        assert as_user(60_001, lambda name=name: (open_root / "user" / name).read_bytes()) == "PermissionError"
    for folder in ("60001", "60001/reports", "60002", ""):
        path = open_root / "user" / folder
        assert as_user(60_001, lambda path=path: (path / "new").write_text("x")) == "PermissionError"
        assert as_user(60_001, lambda path=path: list(path.iterdir())) == "PermissionError"
    assert as_user(60_001, lambda: (open_root / "user" / names[60_001][0]).unlink()) == "PermissionError"
    assert as_user(60_001, lambda: (publisher.root / ".reports.json").read_bytes()) == "PermissionError"


def test_two_publishers_do_not_meet(publisher: Publisher) -> None:
    with publisher.folder.outgoing.locked(), pytest.raises(BusyError):
        publisher()


def test_a_full_disk_is_said_and_leaves_what_was_there(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.published.publish.OWN_PER_RUN", 20)
    publisher()
    before = publisher.files()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="No space left") as caught:
        patch.setattr("almanac.published.outgoing.flush_file_system", full)
        publisher()
    assert "make room" in caught.value.hint
    assert publisher.files() == before
    assert publisher().reports == 20


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["rename", "unlink"])
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
            assert len(own.reports(ids)) == len(ids) >= 6
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
