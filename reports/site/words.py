"""Figures of the site report as words, with NOT_KNOWN for unknown ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from almanac.config import Cost
from almanac.units import format_count, format_number, printable
from telemetry.characterize.study import HOURS, PERCENT, SHARE

NOT_KNOWN = "not known"
MOST_ROWS = 25
"""Most rows of a table on the page; the CSV files have all."""


@dataclass(frozen=True)
class PageTable:
    """A table of texts. The first column is a name; the others are numbers, aligned right. note: the text below."""

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""

    def narrowed(self, first_left_out: str) -> PageTable:
        """The columns before this one, without the note: for a terminal."""
        width = list(self.columns).index(first_left_out)
        return PageTable(self.columns[:width], [row[:width] for row in self.cells])


def hours(value: float | None) -> str:
    """GPU-hours with three significant digits; whole numbers from 100 on."""
    return NOT_KNOWN if value is None else _real(value)


def energy(kwh: float | None) -> str:
    return NOT_KNOWN if kwh is None else f"{_real(kwh)} kWh"


def percent(share: float | None) -> str:
    """A share as percent, with one decimal below 10%."""
    if share is None:
        return NOT_KNOWN
    return f"{100 * share:.1f}%" if 0 < abs(share) < 0.0995 else f"{100 * share:.0f}%"


def ratio(part: float | None, whole: float) -> float | None:
    """A share; None if it is unknown, or of nothing."""
    return part / whole if part is not None and whole else None


def change(now: float | None, before: float | None) -> str:
    """Return the change of an amount, such as "+7% from before"; "" if not known."""
    return "" if now is None or not before else f"{100 * (now / before - 1):+,.0f}% from before"


def points(now: float | None, before: float | None) -> str:
    """Return the change of a share in percentage points, such as "+7.0 points from before"; "" if not known."""
    if now is None or before is None:
        return ""
    return f"{100 * (now - before):+.1f} points from before"


def tenths(share: float | None) -> str:
    """A share as percent with one decimal, like the paper's; "-" if there is none."""
    return "-" if share is None else f"{100 * share:.1f}%"


def money(amount: float | None, cost: Cost) -> str:
    """An amount with its currency. Without a price, the page has no such figure."""
    return NOT_KNOWN if amount is None else f"{_real(amount)} {printable(cost.currency, 12)}".rstrip()


def left_out(rows: int) -> str:
    """The note below a table with this many rows: the page shows the first MOST_ROWS."""
    return f"The CSV files have {format_count(rows - MOST_ROWS)} more rows." if rows > MOST_ROWS else ""


def compared_cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row of `headline`: name (and why it has no value here), value here, published value, jobs."""
    words, unit, published = row["finding"], row["unit"], row["published_value"]
    if row["why_null"]:
        words = f"{words} ({printable(row['why_null'], 80)})"
    shown = "-" if published is None else _valued(published, unit)
    return [words, _valued(row["site_value"], unit), shown, format_count(row["jobs"])]


def _valued(value: float | None, unit: str) -> str:
    if value is None:
        return NOT_KNOWN
    if unit == SHARE:
        return tenths(value)
    if unit == PERCENT:
        return f"{value:.0f}%"
    return f"{value:.2f} h" if unit == HOURS else f"{value:.2f}"


def _real(value: float) -> str:
    """A number with three significant digits; a whole number from 100 on."""
    return format_number(value, 3) if math.isfinite(value) else NOT_KNOWN
