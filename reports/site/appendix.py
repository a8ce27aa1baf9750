"""The appendix of the site report's page: the comparison with the Perlmutter study."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import cast

from almanac.units import format_count, printable
from reports.site.headline import PART_FINDINGS, PartValue
from reports.site.plots import Picture, render_site_plots
from reports.site.report import SiteReport
from reports.site.rows import EnergyRow
from reports.site.study import Study
from reports.site.tables import headline_parts, published_parts
from reports.site.totals import DIMENSIONS
from reports.site.words import MOST_ROWS, PageTable, compared_cells, left_out, tenths
from telemetry.characterize import Result
from telemetry.characterize.headline import Compared


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
    """headline: the main findings; note, sample: texts on them, may be empty. parts: findings by dimension."""

    headline: PageTable
    note: str
    sample: str
    parts: Sequence[tuple[str, PageTable]]
    figures: Sequence[PageFigure]


def appendix(report: SiteReport, study: Study) -> Appendix:
    drawn = render_site_plots(study.results)
    return Appendix(
        headline=_compared(study.headline),
        note=study.note,
        sample=_sample(report, study),
        parts=[(words, _headline_part(report, name)) for name, words in DIMENSIONS.items()],
        figures=[_figure(study, number, about, drawn.get(number, [])) for number, about in captions().items()],
    )


def _headline_part(report: SiteReport, dimension: str) -> PageTable:
    """A share and its number of jobs in each cell; the first row has the paper's shares."""
    found = headline_parts(report, dimension)
    published = ["Perlmutter", *map(tenths, published_parts())]
    cells = [
        [printable(name, 60) or "not recorded", *(_of_jobs(value) for value in values)]
        for name, values in found[:MOST_ROWS]
    ]
    return PageTable(("Name", *(each.short for each in PART_FINDINGS)), [published, *cells], left_out(len(found)))


def _of_jobs(value: PartValue) -> str:
    return "-" if value.share is None else f"{tenths(value.share)} of {format_count(value.jobs)}"


def _compared(rows: Iterable[Compared]) -> PageTable:
    return PageTable(("Finding", "Here", "Perlmutter", "Jobs"), [compared_cells(row) for row in rows])


def _figure(study: Study, number: str, about: dict[str, str], pictures: Sequence[Picture]) -> PageFigure:
    compared = study.compared.get(number, ())
    if number == "6":
        compared = (*compared, *study.compared.get("section VI", ()))
    tables = [result for result in study.results.values() if result.table.figure == number]
    why = next((result.why_empty for result in tables if result.why_empty), "") or "no job has the data for it"
    return PageFigure(
        number=number,
        pictures=[(each.address, each.alt) for each in pictures],
        values=_compared(compared),
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
    for row in cast(list[EnergyRow], study.results["fig05_energy"].rows.to_pylist()):
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
