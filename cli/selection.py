"""Read the options that select jobs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

import click

from almanac.units import printable
from telemetry.job_selection import Limit


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The words of "a,b" and "c", without empty ones."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


def check_columns(option: str, names: Iterable[str], valid: Sequence[str], what: str = "column") -> None:
    """Raises click.BadParameter, which lists the columns, if a column does not exist."""
    for name in names:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise click.BadParameter(
                f"there is no {what} {printable(name)!r}; {guess}choose one of: {', '.join(valid)}", param_hint=option
            )


def parse_limits(lows: Sequence[str], highs: Sequence[str], valid: Sequence[str]) -> tuple[Limit, ...]:
    """The limits of --min COLUMN=NUMBER and --max COLUMN=NUMBER. Raises click.BadParameter."""
    limits = [Limit(column, low=number) for column, number in _pairs("--min", lows, valid)]
    return (*limits, *(Limit(column, high=number) for column, number in _pairs("--max", highs, valid)))


def _pairs(option: str, texts: Sequence[str], valid: Sequence[str]) -> Iterable[tuple[str, float]]:
    for text in texts:
        column, _, number = text.partition("=")
        check_columns(option, [column], valid, "column of numbers")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise click.BadParameter(
                f"{printable(text)!r}: expected COLUMN=NUMBER, such as {column}=0.5", param_hint=option
            )
        yield column, value
