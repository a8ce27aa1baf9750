"""The site report's page and tables: whose names are shown, what is not known, hostile texts, and a real browser."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from browser import CHROMIUM, look
from click.testing import CliRunner

from almanac.config import Config, Cost
from almanac.config_file import parse_config
from almanac.errors import ConfigError, NotAllowedError, StoreError
from cli.app import App
from cli.site_report import command
from reports.site.page import captions, render_site_page
from reports.site.plots import PANELS
from reports.site.report import SiteReport, Study, build_site_report, pseudonym, site_key
from reports.site.tables import price, site_tables, write_csv
from telemetry.characterize.study import TABLES
from telemetry.site import Site
from telemetry.store.schema import TABLES as STORED
from telemetry.store.store import Store

NOW_S = 1_795_003_200
SPAN_S = (NOW_S - 40 * 86_400, NOW_S)
PRICED = Cost(per_gpu_hour=2.0, per_kwh=0.25, currency="EUR")


def report_of(reported: Any, **options: Any) -> SiteReport:
    config = dataclasses.replace(reported.config, cost=options.pop("cost", Cost()))
    return build_site_report(Site.of(reported.store.of("test"), config, NOW_S), SPAN_S, **options)


@pytest.fixture(scope="module")
def report(reported: Any) -> SiteReport:
    return report_of(reported)


@pytest.fixture(scope="module")
def study(report: SiteReport) -> Study:
    assert report.study
    return report.study


@pytest.fixture(scope="module")
def page(report: SiteReport) -> str:
    return render_site_page(report)


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table below a heading, as texts."""
    _, _, below = page.partition(f"<h2>{heading}</h2>")
    body = below.partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>") if "<td" in row]


def test_every_figure_of_the_paper_has_a_caption_and_says_what_the_paper_has(page: str) -> None:
    assert list(captions()) == [str(number) for number in range(1, 12)]
    assert {panel.figure for panel in PANELS} == set(captions())
    for number, about in captions().items():
        assert f"Figure {number}: {about['title']}" in page
        assert about["paper"].replace("'", "&#39;") in page


def test_the_papers_values_stand_beside_the_sites(page: str, study: Study) -> None:
    rows = {row[0]: row[1:] for row in cells(page, "Comparison with Perlmutter")}
    assert rows["jobs memory-bound by FP64 intensity"][1] == "81.0%"
    assert rows["largest tier: HBM peak at or below 50%"][1] == "55.0%"
    assert rows["4-GPU jobs that never used three GPUs"][1] == "12.0%"
    found = {row["finding"]: row["site_value"] for row in study.results["headline"].rows.to_pylist()}
    idle = found["4-GPU jobs that never used three GPUs"]
    assert rows["4-GPU jobs that never used three GPUs"][0] == f"{100 * idle:.1f}%"


def test_users_have_pseudonyms_that_stay_and_names_only_when_asked_for(
    reported: Any, page: str, tmp_path: Path
) -> None:
    key = site_key(reported.store.root)
    assert pseudonym("alice", key) in page
    assert not re.search(r"\balice\b|\bbob\b", page)
    assert render_site_page(report_of(reported)) == page
    named = render_site_page(report_of(reported, has_names=True))
    assert re.search(r"\balice\b", named)
    assert pseudonym("alice", key) not in named
    for path in write_csv(report_of(reported), tmp_path):
        assert not re.search(r"\balice\b|\bbob\b", path.read_text())


def test_another_site_gives_other_pseudonyms_and_its_key_is_not_for_everybody(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, again, other = (site_key(tmp_path / name) for name in "aab")
    assert first == again != other
    assert pseudonym("alice", first) != pseudonym("alice", other)
    assert (tmp_path / "a/reports/pseudonyms.key").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_makes_in_the_store_is_the_store_owners(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    site_key(tmp_path)
    assert {path.stat().st_uid for path in (tmp_path / "reports", tmp_path / "reports/pseudonyms.key")} == {65534}
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["pseudonyms.key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_the_store_owner_puts_in_the_place_of_a_new_key_stays_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard link to a file of root's, as soon as the key is on disk."""
    store, secret, real = tmp_path / "store", tmp_path / "shadow", os.fsync
    store.mkdir()
    os.chown(store, 65534, 65534)
    secret.write_text("root's\n")

    def swapped(handle: int) -> None:
        real(handle)
        for path in (store / "reports").glob(".tmp-*"):
            path.unlink()
            path.hardlink_to(secret)

    monkeypatch.setattr(os, "fsync", swapped)
    with suppress(StoreError):
        site_key(store)
    assert (secret.stat().st_uid, secret.stat().st_nlink) == (0, 2)


@pytest.mark.parametrize("content", [b"", b"00ff\n", b"no hex", b"\xff" * 64])
def test_a_key_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/pseudonyms.key").write_bytes(content)
    with pytest.raises(StoreError, match=r"pseudonyms\.key"):
        site_key(tmp_path)


def accounts_of(tmp_path: Path, *used: tuple[str, str], **options: Any) -> tuple[SiteReport, list[str]]:
    """The report of jobs of these users and accounts, and its accounts as the page shows them. Others are older:
    of "smith", without a GPU, and, on another cluster, of "Jones".
    """
    store = Store.create(tmp_path / "store")
    job = {"start_s": 1000, "end_s": 4600, "elapsed_s": 3600, "gpu_count": 1, "submit_s": 90_000}
    jobs = [{"job_id": n, **job, "user": user, "account": account} for n, (user, account) in enumerate(used, 1)]
    older = {"job_id": 99, "submit_s": 1000, "gpu_count": 0, "account": "m1"}
    for cluster, rows in (("c", [*jobs, {**older, "user": "smith"}]), ("d", [{**older, "user": "Jones"}])):
        store.of(cluster).write("jobs", pa.Table.from_pylist(rows, schema=STORED["jobs"].schema))
    found = build_site_report(Site.of(store.of("c"), Config(), NOW_S), (80_000, 100_000), **options)
    return found, [row[0] for row in cells(render_site_page(found), "By account")]


def test_a_personal_account_has_its_users_pseudonym(tmp_path: Path) -> None:
    """Whenever the user ran a job, and in whatever case: Slurm keeps accounts in lower case."""
    used = [("alice", "alice"), ("bob", "m1"), ("Carol", "carol"), ("bob", "smith"), ("bob", "jones"), ("bob", "")]
    found, shown = accounts_of(tmp_path, *used)
    key = site_key(tmp_path / "store")
    people = [pseudonym(name, key) for name in ("alice", "Carol", "smith", "Jones")]
    assert sorted(shown) == sorted(["m1", "not recorded", *people])
    written = "".join(path.read_text() for path in write_csv(found, tmp_path / "csv")) + render_site_page(found)
    assert not re.search(r"\b(alice|carol|smith|jones)\b", written, re.IGNORECASE)


def test_with_names_accounts_are_shown_as_they_are_and_else_by_their_own_name(tmp_path: Path) -> None:
    _, shown = accounts_of(tmp_path, ("Carol", "carol"), has_names=True)
    assert shown == ["carol"]
    _, shown = accounts_of(tmp_path / "other", ("Carol", "m1"), ("carol", "m1"), ("eve", "carol"))
    assert pseudonym("carol", site_key(tmp_path / "other/store")) in shown, "users may differ in case"


def test_accounts_that_share_a_pseudonym_are_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.site.report.pseudonym", lambda name, key: "user-00000000")
    found, shown = accounts_of(tmp_path, ("alice", "alice"), ("bob", "bob"))
    assert shown == ["user-00000000"] * 2
    assert sum(float(row["gpu_hours"]) for row in site_tables(found)["by_account"].to_pylist()) == 2.0


def test_a_note_on_the_comparison_stands_beside_it(report: SiteReport, study: Study) -> None:
    noted = render_site_page(dataclasses.replace(report, study=dataclasses.replace(study, note="set by quota")))
    assert "<p>set by quota</p>" in noted.partition("<h2>Comparison with Perlmutter</h2>")[2]
    assert "set by quota" not in render_site_page(dataclasses.replace(report, study=None))


def test_hostile_names_are_inert(page: str, report: SiteReport, reported: Any) -> None:
    assert "&lt;b onclick=&#34;x()&#34;&gt;" in page
    assert "<b onclick" not in page
    hostile = dataclasses.replace(report, cluster="<script>\u202e\x1b[31m")
    shown = render_site_page(hostile)
    assert "&lt;script&gt;??[31m" in shown
    assert "<script" not in shown


def test_without_a_price_there_are_no_costs_and_none_of_0(reported: Any, page: str) -> None:
    assert price(3.0, -1.0) is None
    assert price(None, 2.0) is None
    assert price(3.0, 0.0) == 0.0
    assert not re.search("not configured|[Cc]ost of|Electricity", page)
    assert [len(cells(page, name)[0]) for name in ("Unused GPU-hours", "By partition")] == [3, 9]
    found = report_of(reported, cost=PRICED)
    priced = render_site_page(found)
    assert "cost of unused GPU-hours" in priced
    assert len(cells(priced, "By partition")[0]) == 11
    rows = cells(priced, "Unused GPU-hours")
    assert rows[3][3] == f"{2 * (found.totals.total.unused_hours or 0):.3g} EUR"


@pytest.mark.parametrize("value", ["nan", "inf", "-5.0", '"free"'])
def test_a_price_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="per_kwh"):
        parse_config(tomllib.loads(f"[cost]\nper_kwh = {value}"))


def test_jobs_without_telemetry_are_counted_and_not_idle(page: str, report: SiteReport) -> None:
    rows = {row[0]: row[1:] for row in cells(page, "Data quality")}
    assert rows["no telemetry"][:2] == ["1", "4"]
    assert sum(int(row[0]) for row in rows.values()) == report.totals.total.jobs


def test_a_large_span_gives_figures_of_a_sample_and_says_so(reported: Any, report: SiteReport, page: str) -> None:
    assert "even sample" not in page
    sampled = report_of(reported, most=20)
    assert sampled.study
    assert 5 <= sampled.study.sampled <= 40 < sampled.totals.total.jobs
    assert sampled.totals.total.jobs == report.totals.total.jobs
    assert sampled.totals.total.hours == pytest.approx(report.totals.total.hours)
    assert f"even sample of {sampled.study.sampled} jobs" in render_site_page(sampled)


def test_without_any_job_everything_says_so(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    page = render_site_page(build_site_report(Site.of(store.of("c"), Config(cost=PRICED), NOW_S), SPAN_S))
    assert page.count("No chart: there are no jobs.") == 11
    assert "<img" not in page
    assert "no memory tiers are configured" in page
    assert {row[1] for row in cells(page, "Unused GPU-hours")} == {"not known"}


def test_csv_files_hold_every_table_and_no_formula(reported: Any, tmp_path: Path) -> None:
    report = report_of(reported, cost=PRICED)
    parts = {"=cmd|' /C calc'!A1": report.totals.total, "+1": report.totals.total, "\t@x\r\n": report.totals.total}
    totals = dataclasses.replace(report.totals, parts={**report.totals.parts, "account": parts})
    files = write_csv(dataclasses.replace(report, totals=totals), tmp_path / "csv")
    names = {path.stem for path in files}
    assert {table.name for table in TABLES} < names
    assert {"total", "coverage", "by_partition", "by_account", "by_gpu_type", "largest_tier", "headline"} < names
    with (tmp_path / "csv/by_account.csv").open(newline="") as lines:
        accounts = [row["name"] for row in csv.DictReader(lines)]
    assert accounts == ["'=cmd|' /C calc'!A1", "'+1", "?@x??"]
    with (tmp_path / "csv/total.csv").open(newline="") as lines:
        [total] = csv.DictReader(lines)
    assert float(total["unused_cost"]) == pytest.approx(2 * float(total["unused_gpu_hours"]))
    assert float(total["energy_cost"]) == pytest.approx(0.25 * float(total["energy_kwh"]))


class Operator(App):
    is_operator = True
    caller = "root"

    def now_s(self) -> int:
        return NOW_S


class Ordinary(Operator):
    is_operator = False
    caller = "alice"


def test_only_operators_may_have_it(reported: Any, tmp_path: Path) -> None:
    caller = Ordinary(store_path=str(reported.store.root))
    done = CliRunner().invoke(command, ["--html", str(tmp_path / "x.html")], obj=caller)
    assert isinstance(done.exception, NotAllowedError)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_page_and_tables_or_shows_the_totals(reported: Any, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(command, list(words), obj=Operator(store_path=str(reported.store.root)))
        assert done.exit_code == 0, done.output
        return done.output

    said = run("--html", str(tmp_path / "site.html"), "--csv", str(tmp_path / "csv"))
    assert "page written to" in said
    assert (tmp_path / "site.html").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "csv/by_partition.csv").is_file()
    shown = run()
    assert shown.startswith("GPU jobs: 59 (from 2 users)")
    assert "\nTo do\n 1. " in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert run("-S", "2001-01-01", "-E", "2001-02-01").startswith("no GPU jobs")


@pytest.fixture(scope="module")
def background() -> frozenset[str]:
    """Hosts that the browser itself asks for, whatever the page."""
    if not CHROMIUM:
        pytest.skip("the page is not looked at: chromium is not installed (make test installs it as root)")
    return look("<p>empty", 360).asked


@pytest.mark.cluster
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_fits_and_asks_for_nothing(
    page: str, background: frozenset[str], tmp_path: Path, width: int, is_dark: bool
) -> None:
    """ALMANAC_PICTURES names a folder for what the browser showed."""
    folder = Path(os.environ.get("ALMANAC_PICTURES") or tmp_path)
    picture = folder / f"site-{width}-{'dark' if is_dark else 'light'}.png"
    seen = look(page, width, is_dark=is_dark, picture=picture)
    assert seen.width == width
    assert not seen.asked - background
    assert seen.is_dark == is_dark
    assert seen.ground == ("rgb(18, 22, 28)" if is_dark else "rgb(238, 241, 245)")
    assert picture.stat().st_size > 20_000
