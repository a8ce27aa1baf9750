"""The site report as one HTML file, without scripts and without anything from the network."""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import cast

import pyarrow as pa

from almanac import __version__
from almanac.units import format_count, format_gib, format_moment, printable
from reports.job.report import templates
from reports.site.headline import PART_FINDINGS, PartValue
from reports.site.plots import Picture, render_site_plots
from reports.site.power import power_table
from reports.site.power_plot import render_power_plots
from reports.site.report import SiteReport
from reports.site.rows import EnergyRow, ShareRow
from reports.site.tables import headline_parts, price, published_parts, site_tables
from reports.site.words import PageTable, compared_cells, energy, hours, money, percent, tenths
from telemetry.characterize import Result
from telemetry.characterize.headline import Compared

MOST_ROWS = 25
"""Most rows of a table on the page; the CSV files have all."""
DIMENSION_WORDS = {"partition": "partition", "account": "account", "gpu_type": "GPU type"}


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
        coverage=coverage_table(report),
        waste=waste_table(report),
        parts=[
            (words, _part(report, tables[f"by_{name}"]), _headline_part(report, name))
            for name, words in DIMENSION_WORDS.items()
        ],
        largest=_largest(report),
        power=power_table(report.power, report.config),
        power_pictures=[_source(each) for each in render_power_plots(report.power, report.until_s)],
        headline=_compared(report.headline),
        headline_note=report.headline_note,
        figures=_figures(report),
        sample=_sample(report),
        has_names=report.has_names,
    )
    # ASCII reads the same in every encoding.
    return text.encode("ascii", "xmlcharrefreplace").decode()


def summary_boxes(report: SiteReport) -> list[tuple[str, str, str]]:
    """The boxes at the top: a figure, its name, and a note on it (may be empty)."""
    total, cost = report.totals.total, report.config.cost
    unused = None if total.unused_hours is None else total.unused_hours / total.measured_hours
    return [
        (format_count(total.jobs), "GPU jobs", f"from {format_count(report.totals.users)} users"),
        (hours(total.hours), "GPU-hours", f"{percent(_ratio(total.measured_hours, total.hours))} measured"),
        (percent(total.util_frac), "average utilization", "over measured GPU-hours"),
        (hours(total.unused_hours), "unused GPU-hours", f"{percent(unused)} of measured GPU-hours"),
        (energy(total.energy_kwh), "GPU energy", _known_of(total.energy_hours, total.hours)),
        (money(price(total.unused_hours, cost.per_gpu_hour), cost, "gpu_hour"), "cost of unused GPU-hours", ""),
    ]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _known_of(part: float, whole: float, which: str = "") -> str:
    return f"known for {percent(_ratio(part, whole))} of {which}GPU-hours"


def coverage_table(report: SiteReport) -> PageTable:
    total = report.totals.total
    rows = [
        [printable(row.name, 120), format_count(row.jobs), hours(row.hours), percent(_ratio(row.hours, total.hours))]
        for row in report.totals.standings
    ]
    running = report.totals.still_running
    note = (
        "Only jobs with ok or idle are measured. The other jobs count in this table, and never as idle. "
        f"Excluded from all figures: {format_count(running)} jobs that had not ended."
    )
    return PageTable(("Data quality", "Jobs", "GPU-hours", "Share"), rows, note)


def waste_table(report: SiteReport) -> PageTable:
    """Unused GPU-hours by cause. The pauses of a GPU that also worked have no energy: its counter is one sum."""
    total, cost = report.totals.total, report.config.cost
    lines = (
        ("Jobs that did nothing", total.idle_job_hours),
        ("GPUs never used in other jobs", total.never_used_hours),
        ("Other GPUs, while no kernel ran", total.no_kernel_hours),
        ("Total", total.unused_hours),
    )
    rows = [
        [words, hours(amount), percent(None if amount is None else _ratio(amount, total.measured_hours)),
         money(price(amount, cost.per_gpu_hour), cost, "gpu_hour")]
        for words, amount in lines
    ]  # fmt: skip
    known = percent(_ratio(total.never_used_known_hours, total.measured_hours))
    note = (
        f"GPUs never used: known for {known} of measured GPU-hours. "
        "For the rest, all time without a kernel is in the line below. "
        f"Energy of the first two lines: {energy(total.wasted_kwh)}, "
        f"{_known_of(total.wasted_kwh_hours, total.idle_hours or 0.0, 'their ')}. "
        f"Electricity cost: {money(price(total.wasted_kwh, cost.per_kwh), cost, 'kwh')}. "
        "The energy of pauses is not known for GPUs that worked at other times."
    )
    return PageTable(("Unused", "GPU-hours", "Of measured", "Cost"), rows, note)


def _part(report: SiteReport, rows: pa.Table) -> PageTable:
    cost = report.config.cost
    cells = [
        [printable(row["name"], 60) or "not recorded", format_count(row["jobs"]), hours(row["gpu_hours"]),
         percent(row["gpu_hours_share"]), percent(_ratio(row["measured_gpu_hours"], row["gpu_hours"])),
         percent(row["mean_gpu_util_frac"]), hours(row["unused_gpu_hours"]),
         money(row["unused_cost"], cost, "gpu_hour"), energy(row["energy_kwh"]), money(row["energy_cost"], cost, "kwh")]
        for row in cast(list[ShareRow], rows.slice(0, MOST_ROWS).to_pylist())
    ]  # fmt: skip
    columns = ("Name", "Jobs", "GPU-hours", "Share", "Measured", "Utilization", "Unused GPU-hours", "Cost of unused",
               "Energy", "Electricity")  # fmt: skip
    return PageTable(columns, cells, _left_out(rows.num_rows))


def _headline_part(report: SiteReport, dimension: str) -> PageTable:
    """A share and its number of jobs in each cell; the first row has the paper's shares."""
    found = headline_parts(report, dimension)
    published = ["Perlmutter", *map(tenths, published_parts())]
    cells = [
        [printable(name, 60) or "not recorded", *(_of_jobs(value) for value in values)]
        for name, values in found[:MOST_ROWS]
    ]
    return PageTable(("Name", *(each.short for each in PART_FINDINGS)), [published, *cells], _left_out(len(found)))


def _of_jobs(value: PartValue) -> str:
    return "-" if value.share is None else f"{tenths(value.share)} of {format_count(value.jobs)}"


def _left_out(rows: int) -> str:
    return f"The CSV files have {format_count(rows - MOST_ROWS)} more rows." if rows > MOST_ROWS else ""


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
    return PageTable(columns, cells, f"{note} {_left_out(len(tier.users))}".rstrip())


def _gib(mib: float | None) -> str:
    return "not known" if mib is None else format_gib(mib)


def _compared(rows: Iterable[Compared]) -> PageTable:
    return PageTable(("Finding", "Here", "Perlmutter", "Jobs"), [compared_cells(row) for row in rows])


def _figures(report: SiteReport) -> list[PageFigure]:
    drawn = render_site_plots(report.results)
    return [_figure(report, number, about, drawn.get(number, [])) for number, about in captions().items()]


def _figure(report: SiteReport, number: str, about: dict[str, str], pictures: Sequence[Picture]) -> PageFigure:
    compared = report.compared.get(number, ())
    if number == "6":
        compared = (*compared, *report.compared.get("section VI", ()))
    tables = [result for result in report.results.values() if result.table.figure == number]
    why = next((result.why_empty for result in tables if result.why_empty), "") or "no job has the data for it"
    return PageFigure(
        number=number,
        pictures=[_source(each) for each in pictures],
        values=_compared(compared),
        note=_jobs_of(tables[0]) + (_energy_note(report) if number == "5" else ""),
        why_empty="" if pictures else printable(why, 200),
        **about,
    )


def _source(picture: Picture) -> tuple[str, str]:
    """The picture as a data URL, and the text for readers who do not see it."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode()}", picture.alt


def _jobs_of(result: Result) -> str:
    left_out = sum(result.left_out.values())
    return f"Based on {format_count(result.jobs)} jobs; {format_count(left_out)} lack the data or were not measured."


def _energy_note(report: SiteReport) -> str:
    """In how many bands the median memory-bound job used more energy; the paper has no number."""
    medians: dict[float, dict[str, float]] = {}
    for row in cast(list[EnergyRow], report.results["fig05_energy"].rows.to_pylist()):
        if row["class_by"] == "fp64":
            medians.setdefault(row["gpu_hours_from"], {})[row["class"]] = row["p50_energy_j"]
    both = [band for band in medians.values() if len(band) == 2]
    more = sum(band["memory"] > band["compute"] for band in both)
    if not both:
        return ""
    return f" In {more} of {len(both)} bands with both classes, the median memory-bound job used more energy."


def _sample(report: SiteReport) -> str:
    if not report.is_sample:
        return ""
    return (
        f"The figures and their values come from an even sample of {format_count(report.sampled)} jobs. "
        "Totals, unused GPU-hours, and tiers cover all jobs."
    )


@cache
def captions() -> dict[str, dict[str, str]]:
    """The texts of each figure, by its number: title, caption, and what the paper says (paper)."""
    return tomllib.loads((resources.files("reports.site") / "captions.toml").read_text(encoding="utf-8"))
