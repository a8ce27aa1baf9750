"""Choose, filter, and sort the rows of a table by the user's options."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from almanac.units import format_count, printable

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 40


@dataclass(frozen=True)
class Words:
    """Rows whose text in `column` is one of `values`. known: values that are valid even if no row has them.

    is_metric: a row without a value does not match, and is counted.
    """

    option: str
    column: str
    values: tuple[str, ...]
    known: frozenset[str] = frozenset()
    is_metric: bool = False


@dataclass(frozen=True)
class Limit:
    """Rows whose number in `column` is at least `low` and at most `high`, both included."""

    column: str
    low: float = -math.inf
    high: float = math.inf


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


@dataclass(frozen=True)
class Filtered:
    """The rows that match every filter. maybe: rows that no filter excludes, but that lack a metric.

    unknown: by metric, how many of those rows lack it.
    """

    rows: pa.Table
    maybe: int
    unknown: dict[str, int]

    def note(self) -> str:
        """A sentence about jobs that were filtered out because a metric is unknown; empty if there are none."""
        if not self.maybe:
            return ""
        parts = ", ".join(f"{column} ({format_count(number)})" for column, number in self.unknown.items())
        jobs = "1 job that may match is" if self.maybe == 1 else f"{format_count(self.maybe)} jobs that may match are"
        return f"{jobs} filtered out, because of unknown values: {parts}"


def filtered(rows: pa.Table, words: Sequence[Words], limits: Sequence[Limit]) -> Filtered:
    """Apply every filter; a row that lacks a metric does not match a filter on it.

    Raises click.BadParameter if no row has a word.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_met: Any = pa.chunked_array([pa.array([True] * rows.num_rows, pa.bool_())])
    metrics = dict.fromkeys([*(word.column for word in words if word.is_metric), *(limit.column for limit in limits)])
    for word in words:
        _check_words(word, rows)
        is_one = pc.is_in(rows[word.column], value_set=pa.array(word.values, rows[word.column].type))
        # Null and true is null, null and false is false (Kleene): a row is unknown only if the unknown value decides.
        is_met = pc.and_kleene(
            is_met, pc.if_else(rows[word.column].is_valid(), is_one, None if word.is_metric else False)
        )
    for limit in limits:
        # Not safe: ids of imported traces do not fit a double exactly.
        value = rows[limit.column].cast(pa.float64(), safe=False)
        low, high = pa.scalar(limit.low), pa.scalar(limit.high)
        within = pc.and_(pc.greater_equal(value, low), pc.less_equal(value, high))
        is_met = pc.and_kleene(is_met, within)
    maybe = rows.filter(is_met.is_null())
    unknown = {column: maybe[column].null_count for column in metrics if maybe[column].null_count}
    return Filtered(rows.filter(is_met), maybe.num_rows, unknown)


def _check_words(word: Words, rows: pa.Table) -> None:
    seen = Counter(value for value in rows[word.column].to_pylist() if value)
    strange = [value for value in word.values if value not in seen and value not in word.known]
    if not strange or not rows.num_rows:
        return
    named = [printable(value) for value, _ in seen.most_common(MAX_NAMED)]
    named += sorted(word.known - seen.keys())
    more = f" and {format_count(len(seen) - MAX_NAMED)} more" if len(seen) > MAX_NAMED else ""
    raise click.BadParameter(
        f"no job has {', '.join(repr(printable(value)) for value in strange)}; "
        f"choose one of: {', '.join(named) or 'none'}{more}",
        param_hint=word.option,
    )


def ordered(rows: pa.Table, sort: str | None) -> pa.Table:
    """Rows by a column, "-" before its name: highest first; null last in either case. Equal ones stay as they are."""
    if sort is None:
        return rows
    import pyarrow.compute as pc

    order: Literal["ascending", "descending"] = "descending" if sort.startswith("-") else "ascending"
    keys = [(sort.removeprefix("-"), order)]
    return rows.take(pc.sort_indices(rows, sort_keys=keys))  # nulls at the end, and stable
