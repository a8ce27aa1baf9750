"""The table of job families that could share a GPU, for the page and the terminal."""

from __future__ import annotations

from advisor.packing.text import named
from almanac.units import counted, format_count, printable
from reports.site.packing import SharingFamilies, SitePacking
from reports.site.report import SiteReport
from reports.site.words import PageTable, hours

MOST_SHARING = 10
"""Rows shown; the CSV file has all."""


def packing_table(report: SiteReport) -> PageTable | str:
    """The families that could share; a text if there are none."""
    packing = report.packing
    if packing.why_none:
        return f"Not available: {packing.why_none}."
    if not packing.rows:
        return (
            f"Of {counted(packing.users, 'user')} with jobs on one GPU, none has job families that surely gain by "
            "sharing one."
        )
    cells = [
        [
            _families(report, row), printable(report.shown_user(row.user), 13), hours(row.hours), _gain(row),
            hours(row.saved_hours), format_count(row.advice.runs),
        ]
        for row in packing.rows[:MOST_SHARING]
    ]  # fmt: skip
    head = ("Could share a GPU", "User", "GPU-hours", "Work/GPU-h", "Saved", "Runs")
    return PageTable(head, cells, _note(packing))


def _families(report: SiteReport, row: SharingFamilies) -> str:
    """Names of jobs can tell who their user is, so only a report with names has them."""
    advice = row.advice
    if not report.has_names:
        return f"{advice.tasks} runs of one family" if advice.is_with_itself else "runs of two families"
    if advice.is_with_itself:
        return f"{advice.tasks} runs of {named(advice.members[0], 15)}"
    return " and ".join(named(member, 9) for member in advice.members)


def _gain(row: SharingFamilies) -> str:
    return f"x {row.advice.gain.low:.2f}" if row.advice.gain else ""


def _note(packing: SitePacking) -> str:
    shown = packing.rows[:MOST_SHARING]
    more = len(packing.rows) - len(shown)
    notes = [
        f"Saved are at least {hours(packing.saved_hours)} of {hours(packing.hours)} GPU-hours on one GPU, "
        "if all of them run together.",
        f"{format_count(more)} more in packing.csv." if more else "",
        f"{format_count(packing.left_out)} users with fewer GPU-hours were not looked at." if packing.left_out else "",
        "Work/GPU-h: work per GPU-hour, at least, times one job alone. Runs: fewest measured runs of a family. "
        "Users share a GPU only with themselves (almanac-pack).",
    ]
    return " ".join(filter(None, notes))
