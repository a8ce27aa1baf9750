"""The site report as one HTML file, without scripts and without anything from the network; last, its appendix."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import pyarrow as pa

from almanac import __version__
from almanac.units import format_count, format_gib, format_moment, printable
from reports.job.render import templates
from reports.site.faults import FAILED_RUNS
from reports.site.health import health_table
from reports.site.plots import PANELS, Picture, render_power_plots, render_site_plots
from reports.site.power import power_table
from reports.site.report import SiteReport, Study
from reports.site.tables import (
    advice_table,
    compared_with,
    coverage_table,
    faults_table,
    site_tables,
    summary_boxes,
    waste_table,
)
from reports.site.tasks import packing_table, request_tasks, waste_tasks
from reports.site.totals import DIMENSIONS
from reports.site.use import use_chapters
from reports.site.words import (
    MOST_ROWS,
    NOT_KNOWN,
    PageTable,
    compared_cells,
    energy,
    hours,
    left_out,
    money,
    percent,
    ratio,
)
from telemetry.characterize.study import HEADLINE
from telemetry.characterize.table import Result


@dataclass(frozen=True)
class PageFigure:
    """A figure of the study. pictures: addresses and texts of its charts. why_empty: why there are none."""

    number: str
    title: str
    caption: str
    paper: str
    pictures: Sequence[tuple[str, str]]
    values: PageTable
    note: str
    why_empty: str


@dataclass(frozen=True)
class Appendix:
    """The appendix of the site report. headline: the main findings. note, sample: texts about them; may be empty."""

    headline: PageTable
    note: str
    sample: str
    figures: Sequence[PageFigure]


def appendix(report: SiteReport, study: Study) -> Appendix:
    drawn = render_site_plots({name: result.rows for name, result in study.results.items()}, PANELS)
    return Appendix(
        headline=_compared(study, lambda row: bool(row["is_main"])),
        note=study.note,
        sample=_sample(report, study),
        figures=[_figure(study, number, about, drawn.get(number, [])) for number, about in captions().items()],
    )


def _compared(study: Study, is_wanted: Callable[[dict[str, Any]], bool]) -> PageTable:
    rows = filter(is_wanted, study.results[HEADLINE].rows.to_pylist())
    return PageTable(("Finding", "Here", "Perlmutter", "Jobs"), list(map(compared_cells, rows)))


def _figure(study: Study, number: str, about: dict[str, str], pictures: Sequence[Picture]) -> PageFigure:
    figures = (number, "section VI") if number == "6" else (number,)
    tables = [result for result in study.results.values() if result.table.figure == number]
    why = next((result.why_empty for result in tables if result.why_empty), "") or "no job has the data for it"
    return PageFigure(
        number=number,
        pictures=[(each.address, each.alt) for each in pictures],
        values=_compared(study, lambda row: row["figure"] in figures),
        note=_jobs_of(tables[0]) + (_energy_note(study) if number == "5" else ""),
        why_empty="" if pictures else printable(why, 200),
        **about,
    )


def _jobs_of(result: Result) -> str:
    others = sum(result.left_out.values())
    return f"Based on {format_count(result.jobs)} jobs; {format_count(others)} lack the data or were not measured."


def _energy_note(study: Study) -> str:
    """In how many bands the median memory-bound job used more energy; the paper has no number."""
    medians: dict[float, dict[str, float]] = {}
    for row in study.results["fig05_energy"].rows.to_pylist():
        if row["class_by"] == "fp64":
            medians.setdefault(row["gpu_hours_from"], {})[row["class"]] = row["p50_energy_j"]
    both = [band for band in medians.values() if len(band) == 2]
    more = sum(band["memory"] > band["compute"] for band in both)
    if not both:
        return ""
    return f" In {more} of {len(both)} bands with both classes, the median memory-bound job used more energy."


def _sample(report: SiteReport, study: Study) -> str:
    if study.sampled >= report.totals.total.jobs:
        return ""
    return (
        f"The figures and their values come from an even sample of {format_count(study.sampled)} jobs. "
        "Everything above covers all jobs."
    )


@cache
def captions() -> dict[str, dict[str, str]]:
    """The texts of each figure, by its number: title, caption, and what the paper says (paper)."""
    return tomllib.loads((resources.files("reports.site") / "captions.toml").read_text(encoding="utf-8"))


MOST_TASKS, MOST_REQUESTS = 10, 5
"""Most entries of the to-do list on the page: of waste, and of each kind of request."""


def render_site_page(report: SiteReport) -> str:
    """The page as ASCII text."""
    tables = site_tables(report)
    page = templates().get_template("site_page.html.j2")
    text = page.render(
        cluster=printable(report.cluster, 60),
        span=f"{format_moment(report.since_s)} to {format_moment(report.until_s)}",
        made=format_moment(report.made_s),
        help_url=report.config.site.help_url,
        version=__version__,
        summary=summary_boxes(report),
        compared_with=compared_with(report),
        tasks=waste_tasks(report, MOST_TASKS),
        requests=request_tasks(report, MOST_REQUESTS),
        faults=faults_table(report),
        has_measured=report.totals.total.measured_jobs > 0,
        failed_runs=FAILED_RUNS,
        advice=advice_table(report),
        coverage=coverage_table(report),
        waste=waste_table(report),
        parts=[(words, _part(report, tables[f"by_{name}"])) for name, words in DIMENSIONS.items()],
        largest=_largest(report),
        packing=packing_table(report),
        health=health_table(report.health),
        power=power_table(report.power, report.config),
        power_pictures=render_power_plots(report.power, report.until_s),
        use=use_chapters(report.use) if report.use else None,
        appendix=appendix(report, report.study) if report.study else None,
        has_names=report.has_names,
    )
    # ASCII reads the same in every encoding.
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _part(report: SiteReport, rows: pa.Table) -> PageTable:
    """A breakdown. It has columns of costs only if their price is configured."""
    cost = report.config.cost
    is_priced, is_kwh_priced = cost.per_gpu_hour >= 0, cost.per_kwh >= 0
    cells = [
        [printable(row["name"], 60) or "not recorded", format_count(row["jobs"]), hours(row["gpu_hours"]),
         percent(row["gpu_hours_share"]), percent(ratio(row["measured_gpu_hours"], row["gpu_hours"])),
         percent(row["mean_gpu_util_frac"]), percent(row["mean_mfu_frac"]), hours(row["unused_gpu_hours"]),
         *([money(row["unused_cost"], cost)] if is_priced else ()), energy(row["energy_kwh"]),
         *([money(row["energy_cost"], cost)] if is_kwh_priced else ())]
        for row in rows.slice(0, MOST_ROWS).to_pylist()
    ]  # fmt: skip
    columns = ("Name", "Jobs", "GPU-hours", "Share", "Measured", "Utilization", "MFU", "Unused GPU-hours",
               *(("Cost of unused",) if is_priced else ()), "Energy",
               *(("Electricity",) if is_kwh_priced else ()))  # fmt: skip
    return PageTable(columns, cells, left_out(rows.num_rows))


def _largest(report: SiteReport) -> PageTable | str:
    """The users whose requests for the largest tier would fit in a smaller one; a text if there is no table."""
    tier = report.totals.largest
    if tier.why_none:
        return f"Not available: {tier.why_none}."
    if not tier.asked_jobs:
        return f"No job asked for {printable(', '.join(tier.names), 80)}."
    note = (
        f"{format_count(tier.asked_jobs)} jobs ({hours(tier.asked_hours)} GPU-hours) asked for "
        f"{printable(', '.join(tier.names), 80)}. The peak of {format_count(tier.known_jobs)} is known. "
        f"{format_count(tier.fit_jobs)} of these ({hours(tier.fit_hours)} GPU-hours) peaked at "
        f"{format_gib(tier.limit_mib)} or less, which fits in {printable(tier.smaller, 60)} with the margins of the "
        "advice. Excluded: jobs that preallocate memory, that failed, or that were not measured."
    )
    cells = [
        [printable(report.shown_user(row.user), 60), format_count(row.asked_jobs), format_count(row.known_jobs),
         format_count(row.fit_jobs), hours(row.fit_hours), _gib(row.median_peak_mib), _gib(row.highest_peak_mib)]
        for row in tier.users[:MOST_ROWS]
    ]  # fmt: skip
    columns = ("User", "Requests", "Peak known", "Would fit", "GPU-hours that fit", "Median peak", "Highest peak")
    return PageTable(columns, cells, f"{note} {left_out(len(tier.users))}".rstrip())


def _gib(mib: float | None) -> str:
    return NOT_KNOWN if mib is None else format_gib(mib)
