"""`almanac doctor` names what is wrong with the advice files, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from almanac.config import Config, Hooks, Priority
from cli.app import App
from cli.doctor.advice_files import check_advice_files
from cli.doctor.findings import Check
from slurm_hooks.advice.file import AdviceFile, Row, render
from slurm_hooks.advice.folder import AdviceDir

NOW_S = 1_795_256_200
HOUR_S = 3600


def file(written_s: int = NOW_S - 60, mode: str = "observe") -> bytes:
    rows = (Row("U", 60, 0),)
    return render(AdviceFile("v", written_s, written_s + 48 * HOUR_S, mode, False, "ask", Priority(), (), rows))


class Here(App):
    """At a given time, with a given folder."""

    def now_s(self) -> int:
        return NOW_S


@pytest.fixture
def folder(tmp_path: Path) -> AdviceDir:
    tmp_path.chmod(0o755)
    folder = AdviceDir(tmp_path / "advice", os.geteuid())
    folder.prepare()
    folder.write([("60001", file(), 60_001 if os.geteuid() == 0 else os.geteuid()), ("_site", file(), os.geteuid())])
    return folder


def findings(folder: AdviceDir, mode: str = "observe") -> list[Check]:
    app = Here()
    app.__dict__["config"] = Config(hooks=Hooks(advice_dir=str(folder.root)), priority=Priority(mode=mode))
    return list(check_advice_files(app))


def said(checks: list[Check]) -> str:
    return "\n".join(f"{check.status} {check.said} | {check.todo}" for check in checks)


def test_nothing_published_is_no_fault(tmp_path: Path) -> None:
    (check,) = findings(AdviceDir(tmp_path / "none", 0))
    assert check.status == "ok"
    assert "does not exist" in check.said


def test_whole_files_of_today_are_ok(folder: AdviceDir) -> None:
    (check,) = findings(folder)
    assert (check.status, check.said) == ("ok", "2 files, the newest written 1 min ago")


def test_a_fifo_and_other_entries_that_are_no_files_are_named(folder: AdviceDir) -> None:
    os.mkfifo(folder.sched / "60009")
    (folder.sched / "60010").mkdir()
    (folder.sched / "60011").symlink_to("/dev/zero")
    checks = findings(folder)
    assert [check.status for check in checks] == ["fail", "fail", "fail", "ok"]
    assert "60009 is a FIFO: slurmctld hangs" in checks[0].said
    assert checks[0].todo == f"remove it: rm -r {folder.sched / '60009'}"
    assert "60010 is a folder" in checks[1].said
    assert "60011 is a symbolic link" in checks[2].said


def test_a_file_that_a_publisher_takes_away_meanwhile_is_no_fault(
    folder: AdviceDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdviceDir, "names", lambda self: ["60001", "60002", "_site"])
    assert said(findings(folder)) == "ok 2 files, the newest written 1 min ago | "


def test_a_users_folder_that_others_can_write_to_is_named(folder: AdviceDir) -> None:
    folder.shown("60001").parent.chmod(0o777)
    assert "warn 60001 have a folder in user/ that others can write to | run `almanac publish`" in said(
        findings(folder)
    )


def test_old_foreign_and_broken_files_are_counted_and_named(folder: AdviceDir) -> None:
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
    assert "warn 60002, 60005 have no copy, or a different one, in user/" in text


def test_modes_that_let_others_in_are_named(folder: AdviceDir) -> None:
    folder.root.chmod(0o755)
    (folder.sched / "60001").chmod(0o644)
    text = said(findings(folder))
    assert f"{folder.root} has mode 0755, expected 0711 | chmod 711 {folder.root}" in text
    assert "60001 can be read or written by others" in text
    folder.sched.chmod(0o777)
    checks = findings(folder)
    assert checks[0].status == "fail"
    assert "others can write to it" in checks[0].said


def test_a_timer_that_stopped_and_a_mode_that_differs_are_warnings(folder: AdviceDir) -> None:
    folder.write([("60001", file(NOW_S - 30 * HOUR_S), 60_001), ("_site", file(NOW_S - 25 * HOUR_S), os.geteuid())])
    checks = findings(folder, "apply")
    assert checks[0].said == "2 files, the newest written 1 d 1 h ago"
    assert "timer" in checks[0].todo
    assert checks[1].said == "the files have mode observe, the configuration has apply"
