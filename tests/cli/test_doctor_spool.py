"""Doctor's findings on the hook for ended jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from almanac.config import Config
from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.mail import check_spool

NOW_S = 1_795_003_200
CALLED = "EpilogSlurmctld         = /usr/libexec/almanac/almanac-ended.sh\n"


@dataclass
class SiteApp(App):
    server: str = "localhost"
    spool_dir: str = ""

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config({"mail": {"server": self.server, "spool_dir": self.spool_dir}})

    def now_s(self) -> int:
        return NOW_S


def app_on(folder: Path, told: str = CALLED, server: str = "localhost") -> SiteApp:
    def commands(argv: Sequence[str]) -> bytes:
        return told.encode()

    (folder / "store").mkdir(exist_ok=True)
    app = SiteApp(store_path=str(folder / "store"), server=server, spool_dir=str(folder / "ended"))
    app.commands = commands  # type: ignore[assignment]
    return app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended").chmod(0o770)
    return tmp_path


def said(app: App) -> list[tuple[str, str]]:
    return [(check.status, check.said) for check in check_spool(app)]


def test_a_spool_in_use_is_counted(folder: Path) -> None:
    file = folder / "ended/7.1"
    file.write_text("x")
    os.utime(file, (NOW_S - 60, NOW_S - 60))
    assert said(app_on(folder)) == [("ok", f"{folder}/ended: 1 files waiting, 0 excluded, in bad/")]
    os.utime(file, (NOW_S - 3600, NOW_S - 3600))
    [(status, words)] = said(app_on(folder))
    assert status == "warn" and words.endswith("the oldest is 1 h old")


def test_what_was_moved_is_said(folder: Path) -> None:
    (folder / "ended/bad").mkdir()
    (folder / "ended/bad/x").write_text("x")
    [(status, words)] = said(app_on(folder))
    assert status == "warn" and "1 excluded" in words


def test_a_folder_that_others_may_write_to_fails(folder: Path) -> None:
    (folder / "ended").chmod(0o777)
    [(status, words)] = said(app_on(folder))
    assert status == "fail" and "others can write" in words


def test_a_slurm_that_calls_nothing_is_named(folder: Path) -> None:
    told = "EpilogSlurmctld         = (null)\nJobCompLoc              =\n"
    assert [status for status, _ in said(app_on(folder, told))] == ["ok", "warn"]
    assert [status for status, _ in said(app_on(folder, "EpilogSlurmctld[0] = /opt/ours\n"))] == ["ok"]


def test_without_hook_or_mail_nothing_is_amiss(folder: Path) -> None:
    (folder / "ended").rmdir()
    assert [status for status, _ in said(app_on(folder))] == ["ok"]
    assert said(app_on(folder, server="")) == []
