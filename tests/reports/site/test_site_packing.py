"""Families that could share a GPU, in the site report: GPU-hours by hand, order, pseudonyms, and hostile names."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from advisor.packing.decide import PackingFamily, PackingRules, decide_packing, packing_alone
from almanac.config import Config
from almanac.config_file import parse_config
from cli.main import cli
from cli.site_report import _show
from reports.site import packing as module
from reports.site.packing import NO_JOBS, OFF, UNTRAINED
from reports.site.page import render_site_page
from reports.site.report import SiteReport, build_site_report
from reports.site.tables import write_csv
from reports.site.tasks import MOST_SHARING, packing_table
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

HOUR_S, NOW_S = 3600, 1_780_012_800
HOSTILE = '=<img src=x onerror="1">\x1b[31m\u202e' + "A" * 300


def family(user: str, name_key: str, use: float = 0.3, bound_mib: float = 12_000.0, runs: int = 9) -> PackingFamily:
    return PackingFamily(
        user, name_key, 1, sm=(use,) * runs, dram=(use / 2,) * runs, coverage=1.0,
        bounds_mib={2: bound_mib, 3: bound_mib, 4: bound_mib}, is_preallocated=False, gpu_model="A100",
        capacity_mib=81_920.0, newest_s=NOW_S,
    )  # fmt: skip


def report_of(
    monkeypatch: pytest.MonkeyPatch, root: Path, families: list[PackingFamily], hours: dict[tuple[str, str], float],
    config: Config | None = None, gpus: int = 1, is_trained: bool = True, **more: Any,
) -> SiteReport:  # fmt: skip
    """A site where each family of `hours` ran one job of so many hours."""
    store = Store.create(root / "store").of("c")
    rows = [
        {"job_id": number, "submit_s": NOW_S - 900_000, "start_s": NOW_S - 900_000, "state": "COMPLETED",
         "end_s": NOW_S - 900_000 + round(each * HOUR_S), "elapsed_s": round(each * HOUR_S), "gpu_count": gpus,
         "user": user, "account": "a", "partition": "gpu", "name_key": key}
        for number, ((user, key), each) in enumerate(hours.items(), 1)
    ]  # fmt: skip
    store.write("jobs", pa.Table.from_pylist(rows, schema=TABLES["jobs"].schema))

    def known(history: Any, *_: Any) -> list[PackingFamily]:
        return [each for each in families if each.user in set(history["user"])]

    monkeypatch.setattr(module, "packing_families", known)
    monkeypatch.setattr(module, "load_usable", lambda *_: SimpleNamespace(calibration=None) if is_trained else None)
    options: dict[str, Any] = {"has_names": True, "has_study": False, **more}
    return build_site_report(Site.of(store, config or Config(), NOW_S), (NOW_S - 1_000_000, NOW_S), **options)


def test_saved_gpu_hours_are_those_at_the_low_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, gain = family("ann", "tune-#"), packing_alone(family("ann", "tune-#"), PackingRules()).gain
    report = report_of(monkeypatch, tmp_path, [own], {("ann", "tune-#"): 100.0, ("ann", "other"): 50.0})
    [row] = report.packing.rows
    assert row.hours == pytest.approx(100)
    assert row.saved_hours == pytest.approx(100 * (1 - 1 / gain.low))
    assert report.packing.hours == pytest.approx(150)
    table = packing_table(report)
    assert table.cells[0][:2] == ['2 runs of "tune-#"', "ann"]
    assert table.columns[3] == "Work/GPU-h"
    assert table.note.startswith("Saved are at least ")
    assert "of 150 GPU-hours on one GPU, if all of them run together." in table.note


def test_two_families_share_as_long_as_both_run_and_each_counts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """big can share with small but not with itself; so can huge, which would need small, too."""
    families = [
        family("ann", "big", 0.3, 60_000.0), family("ann", "huge", 0.3, 62_000.0), family("ann", "small", 0.1, 9000.0),
    ]  # fmt: skip
    hours = {("ann", "big"): 100.0, ("ann", "huge"): 40.0, ("ann", "small"): 30.0}
    report = report_of(monkeypatch, tmp_path, families, hours)
    keys = [
        member.key for row in report.packing.rows for member in {each.key: each for each in row.advice.members}.values()
    ]
    assert len(keys) == len(set(keys))
    pairs = [row for row in report.packing.rows if not row.advice.is_with_itself]
    for row in pairs:
        shorter = min(hours[key[0], key[1]] for key in (each.key for each in row.advice.members))
        assert row.hours == pytest.approx(2 * shorter)
    assert report.packing.saved_hours <= 170


def test_many_users_are_cut_at_ten_rows_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {f"user{number:03d}" + "x" * 40: 1.0 + number for number in range(120)}
    families = [family(user, "a-very-long-name-of-a-job-family-of-this-user-" * 2) for user in names]
    hours = {(user, "a-very-long-name-of-a-job-family-of-this-user-" * 2): each * 100 for user, each in names.items()}
    for has_names in (True, False):
        report = report_of(monkeypatch, tmp_path / str(has_names), families, hours, has_names=has_names)
        assert len(report.packing.rows) == 120
        table = packing_table(report)
        assert len(table.cells) == MOST_SHARING
        assert "110 more in packing.csv." in table.note
        saved = [row.saved_hours for row in report.packing.rows]
        assert saved == sorted(saved, reverse=True)
        _show(report)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert any("Could share a GPU" in line for line in lines)


def test_two_long_names_of_families_fit_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user, big, small = "u" * 60, "big-" + "x" * 60, "small-" + "x" * 60
    families = [family(user, big, 0.3, 60_000.0), family(user, small, 0.3, 9000.0)]
    _show(report_of(monkeypatch, tmp_path, families, {(user, big): 200_000.0, (user, small): 200_000.0}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any('"big-xxxx…" and "small-xx…"' in line for line in lines)


def test_names_of_users_and_of_their_jobs_are_shown_only_when_asked_for_and_are_inert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families, hours = [family(HOSTILE, HOSTILE)], {(HOSTILE, HOSTILE): 100.0}
    named = report_of(monkeypatch, tmp_path / "a", families, hours)
    secret = report_of(monkeypatch, tmp_path / "b", families, hours, has_names=False)
    for report in (named, secret):
        page = render_site_page(report)
        assert "<img src=x" not in page
        assert "\x1b" not in page
        _show(report)
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert "&lt;img src=x" in render_site_page(named)
    assert "img src=x" not in render_site_page(secret)
    for report, families_shown in ((named, True), (secret, False)):
        path = next(path for path in write_csv(report, tmp_path / f"csv{families_shown}") if path.stem == "packing")
        with path.open(newline="") as lines:
            [row] = csv.DictReader(lines)
        assert "\x1b" not in row["families"] + row["user"]
        assert ("img" in row["families"]) is families_shown
        assert float(row["saved_gpu_hours"]) == pytest.approx(report.packing.rows[0].saved_hours)


def test_missing_data_says_why_and_is_never_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hours = {("ann", "x"): 10.0}
    off = parse_config({"packing": {"advise": False}})
    for place, (why, more) in enumerate(
        ((OFF, {"config": off}), (UNTRAINED, {"is_trained": False}), (NO_JOBS, {"gpus": 4}))
    ):
        report = report_of(monkeypatch, tmp_path / str(place), [], hours, **more)  # type: ignore[arg-type]
        assert report.packing.why_none == why
        assert packing_table(report) == f"Not available: {why}."
        assert f"Not available: {why}." in render_site_page(report)
    none = report_of(monkeypatch, tmp_path / "none", [family("ann", "x", 0.95, 70_000.0)], hours)
    assert packing_table(none) == (
        "Of 1 user with jobs on one GPU, none has job families that surely gain by sharing one."
    )


def test_users_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MOST_USERS", 2)
    hours = {(f"u{number}", "x"): 10.0 + number for number in range(5)}
    report = report_of(monkeypatch, tmp_path, [family(f"u{number}", "x") for number in range(5)], hours)
    assert [row.user for row in report.packing.rows] == ["u4", "u3"]
    table = packing_table(report)
    assert "3 users with fewer GPU-hours were not looked at." in table.note


def test_a_gain_below_one_saves_nothing() -> None:
    advice = decide_packing([family("ann", "x")] * 2, PackingRules())
    weak = dataclasses.replace(advice, gain=None)
    assert module._rows([weak], {("ann", "x", 1): 10.0}) == []


def test_the_command_prints_every_table_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = report_of(monkeypatch, tmp_path, [family("ann", "tune-#")], {("ann", "tune-#"): 100.0})
    monkeypatch.setattr("cli.site_report.build_site_report", lambda *_, **__: report)
    (tmp_path / "almanac.toml").write_text("")
    argv = ["--config", str(tmp_path / "almanac.toml"), "--store", str(tmp_path / "store"), "site-report", "--json"]
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == 0, done.output
    tables = json.loads(done.output)
    [row] = tables["packing"]
    assert (row["user"], row["families"], row["tasks"], row["is_with_itself"]) == ("ann", "tune-#", 2, 1)
    assert row["saved_gpu_hours"] == pytest.approx(report.packing.saved_hours)
    assert tables["total"][0]["gpu_hours"] == pytest.approx(100)
    both = CliRunner().invoke(cli, [*argv, "--csv", str(tmp_path / "csv")])
    assert both.exit_code == 2
    assert "--json cannot be used with --html or --csv" in both.output
