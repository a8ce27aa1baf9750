"""`almanac doctor` names what is wrong with the advice files, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from almanac.config import Config, Hooks, Priority
from almanac.published.files import user_folder
from almanac.published.outgoing import Outgoing
from cli.app import App
from cli.doctor import Check
from cli.doctor.hooks import _check_waiting, check_advice_files
from slurm_hooks.advice.file import AdviceFile, AdviceRow
from slurm_hooks.advice.sched import LINES, render
from slurm_hooks.distribute import distribute

NOW_S = 1_795_256_200
HOUR_S = 3600


def file(written_s: int = NOW_S - 60, mode: str = "observe") -> bytes:
    rows = (AdviceRow("U", 60, 0),)
    return render(AdviceFile("v", written_s, written_s + 48 * HOUR_S, mode, False, "ask", Priority(), (), rows))


class Here(App):
    """At a given time, with a given folder."""

    def now_s(self) -> int:
        return NOW_S


class Folder:
    """Published files below `root`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.sched, self._outgoing = folder / "advice", folder / "advice" / "sched", Outgoing(folder / "out")

    def write(self, files: dict[str, bytes]) -> None:
        self._outgoing.prepare()
        self._outgoing.write((user, LINES, content) for user, content in files.items())
        distribute(self._outgoing.root, self.root, os.getegid())

    def shown(self, user: str) -> Path:
        return user_folder(self.root, user) / LINES


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tmp_path.chmod(0o755)
    folder = Folder(tmp_path)
    folder.write({"60001": file(), "_site": file()})
    return folder


def findings(folder: Folder, mode: str = "observe") -> list[Check]:
    app = Here()
    app.__dict__["config"] = Config(hooks=Hooks(advice_dir=str(folder.root)), priority=Priority(mode=mode))
    return list(check_advice_files(app))


def said(checks: list[Check]) -> str:
    return "\n".join(f"{check.status} {check.said} | {check.todo}" for check in checks)


def test_nothing_published_is_no_fault(tmp_path: Path) -> None:
    (check,) = findings(Folder(tmp_path))
    assert check.status == "ok"
    assert "does not exist" in check.said


def test_whole_files_of_today_are_ok(folder: Folder) -> None:
    (check,) = findings(folder)
    assert (check.status, check.said) == ("ok", "2 files, the newest written 1 min ago")


def test_a_fifo_and_other_entries_that_are_no_files_are_named(folder: Folder) -> None:
    os.mkfifo(folder.sched / "60009")
    (folder.sched / "60010").mkdir()
    (folder.sched / "60011").symlink_to("/dev/zero")
    checks = findings(folder)
    assert [check.status for check in checks] == ["fail", "fail", "fail", "ok"]
    assert "60009 is a FIFO: slurmctld hangs" in checks[0].said
    assert checks[0].todo == f"remove it: rm -r {folder.sched / '60009'}"
    assert "60010 is a folder" in checks[1].said
    assert "60011 is a symbolic link" in checks[2].said


def test_a_users_folder_that_others_can_write_to_is_named(folder: Folder) -> None:
    folder.shown("60001").parent.chmod(0o777)
    assert f"warn {folder.root}/user/60001: others can write to it | run `almanac-distribute`" in said(findings(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_users_who_fill_the_file_system_are_named_the_largest_first(folder: Folder) -> None:
    """A file that is a user's, as without ACLs, and more than a choice in the folder where everybody can make files."""
    os.chown(folder.shown("60001"), 60_001, -1)
    mail = folder.root / "mail"
    mail.mkdir()
    mail.chmod(0o3733)
    for uid, name, size in ((60_002, "60002", 4), (60_003, "60003", 3 << 20), (60_004, ".tmp-x", 1 << 20)):
        (mail / name).write_bytes(b"x" * size)
        os.chown(mail / name, uid, -1)
    text = said(findings(folder))
    assert "warn 3 users own files that they can fill: uid 60003 (" in text
    assert text.index("uid 60003") < text.index("uid 60004") < text.index("uid 60001")
    assert "60002" not in text


def test_a_mount_on_a_users_file_is_named_and_does_not_end_the_check(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.shown("60001").parent / "mounted").write_bytes(b"")
    real = os.stat

    def stat_of(name: object, *args: object, **named: object) -> os.stat_result:
        if name == "mounted":
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return real(name, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat_of)
    text = said(findings(folder))
    assert f"warn user/60001/mounted in {folder.root} cannot be looked at | unmount" in text
    assert "ok 2 files" in text


def test_old_foreign_and_broken_files_are_counted_and_named(folder: Folder) -> None:
    for name, content in (
        ("60002", file(NOW_S - 49 * HOUR_S)),
        ("60005", file(NOW_S + 24 * HOUR_S)),
        ("60003", file().replace(b"advice\t1", b"advice\t9")),
        ("60004", file()[:-5]),
        ("readme", b"?"),
    ):
        (folder.sched / name).write_bytes(content)
        (folder.sched / name).chmod(0o640)
    text = said(findings(folder))
    assert "warn 60002 have expired | run `almanac publish`" in text
    assert "warn 60005 are not used: their timestamps are in the future" in text
    assert "warn 60003 have another format" in text
    assert "warn 60004 are not used: cut off" in text
    assert "warn readme are not advice files" in text
    assert "warn 60002, 60005 have no copy, or a different one, in user/ | run `almanac-distribute`" in text


def test_modes_that_let_others_in_are_named(folder: Folder) -> None:
    folder.root.chmod(0o755)
    (folder.sched / "60001").chmod(0o644)
    text = said(findings(folder))
    assert f"{folder.root} has mode 0755, expected 0711 | chmod 711 {folder.root}" in text
    assert "60001 can be read or written by others" in text
    folder.sched.chmod(0o777)
    checks = findings(folder)
    assert checks[0].status == "fail"
    assert "others can write to it" in checks[0].said


def test_a_timer_that_stopped_and_a_mode_that_differs_are_warnings(folder: Folder) -> None:
    folder.write({"60001": file(NOW_S - 30 * HOUR_S), "_site": file(NOW_S - 25 * HOUR_S)})
    checks = findings(folder, "apply")
    assert checks[0].said == "2 files, the newest written 1 d 1 h ago"
    assert "`almanac run --list`" in checks[0].todo
    assert checks[1].said == "the files have mode observe, the configuration has apply"


def test_a_copy_waits_by_the_second_as_some_disks_keep_no_more(folder: Folder) -> None:
    written = folder.root.parent / "store" / "published" / "c" / "user" / "_site" / "advice"
    written.parent.mkdir(parents=True)
    written.write_bytes(b"")
    os.utime(written, (NOW_S - 1000.5,) * 2)
    app = Here(store_path=str(folder.root.parent / "store"))
    os.utime(folder.shown("_site"), (NOW_S - 1001,) * 2)
    assert list(_check_waiting(app, folder.root)) == []
    os.utime(folder.shown("_site"), (NOW_S - 1002,) * 2)
    (check,) = _check_waiting(app, folder.root)
    assert "waits to be distributed" in check.said
