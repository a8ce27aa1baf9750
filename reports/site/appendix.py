"""The appendix of the site report's page: the comparison with the Perlmutter study."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from almanac.units import format_count, printable
from reports.site.plots import Picture, render_site_plots
from reports.site.report import SiteReport
from reports.site.study import Study
from reports.site.words import PageTable, compared_cells
from telemetry.characterize import Result
from telemetry.characterize.headline import HEADLINE


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
    """headline: the main findings; note, sample: texts on them, may be empty."""

    headline: PageTable
    note: str
    sample: str
    figures: Sequence[PageFigure]


def appendix(report: SiteReport, study: Study) -> Appendix:
    drawn = render_site_plots(study.results)
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
