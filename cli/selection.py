"""Read the options that select jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import click

from almanac.units import did_you_mean, printable
from telemetry.job_selection import Limit

COUNT = click.IntRange(min=0)
"""The type of an option that limits a number of rows; 0 stands for all."""
SHORT_STATES = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY", "PR": "PREEMPTED", "RV": "REVOKED", "TO": "TIMEOUT",
}  # fmt: skip
"""Slurm's short forms of the states of ended jobs, as sacct -s takes them."""


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The words of "a,b" and "c", without empty ones."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


def check_columns(option: str, names: Iterable[str], valid: Sequence[str], what: str = "column") -> None:
    """Raises click.BadParameter, which names similar columns and where all are listed, if a column does not exist."""
    for name in names:
        if name not in valid:
            guess = did_you_mean(name, valid)
            raise click.BadParameter(
                f"there is no {what} {printable(name, 80)!r}; {guess}`almanac jobs --helpformat` lists the columns",
                param_hint=option,
            )


def full_states(texts: Iterable[str]) -> tuple[str, ...]:
    """Slurm's names of states, for the names and their short forms (CD, OOM), in any case."""
    words = (text.upper() for text in words_of(texts))
    return tuple(SHORT_STATES.get(word, word) for word in words)


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
