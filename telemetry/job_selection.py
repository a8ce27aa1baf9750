"""Select past jobs: filters over known and unknown values, order, and number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from almanac.units import did_you_mean, format_count, printable

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 40
_KEY = ("job_id", "submit_s")


class UnknownTextError(ValueError):
    """No job has the text that a filter names. option: the filter's."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class History(Protocol):
    """Gives the jobs submitted in [since_s, until_s), of one user or all, as `load_history_table` does."""

    def __call__(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, pa.Array[Any]] | None = None,
    ) -> pa.Table: ...


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


@dataclass(frozen=True)
class JobQuery:
    """Which jobs, in which order. sort: a column, with "-" before it highest first; None: oldest end first.

    limit: how many; 0 for all. Without `sort` they are the newest ones.
    """

    since_s: int | None = None
    until_s: int | None = None
    user: str | None = None
    job_ids: tuple[int, ...] = ()
    words: tuple[Words, ...] = ()
    limits: tuple[Limit, ...] = ()
    sort: str | None = None
    limit: int = 0


@dataclass(frozen=True)
class QueryResult:
    """Rows as plain values, None where missing. matching: jobs that match; total: jobs before the filters.

    note: a sentence about jobs with unknown values, or empty.
    """

    rows: list[dict[str, Any]]
    matching: int
    total: int
    note: str


def select_jobs(history: History, query: JobQuery, columns: Sequence[str]) -> QueryResult:
    """These columns of the selected jobs. Raises UnknownTextError, and the errors of `history`."""
    import pyarrow as pa

    filters = [*(word.column for word in query.words), *(limit.column for limit in query.limits)]
    sorts = [query.sort.removeprefix("-")] if query.sort else []
    # With a limit, other columns are read later, and only for the rows that are shown.
    others = () if query.limit > 0 else columns
    needed = list(dict.fromkeys((*_KEY, *others, *filters, *sorts)))
    among = {"job_id": pa.array(query.job_ids, pa.int64())} if query.job_ids else None
    rows = history(needed, query.since_s, query.until_s, query.user, among)
    chosen = filtered(rows, query.words, query.limits)
    matching = ordered(chosen.rows, query.sort)
    if query.limit > 0:
        first = 0 if query.sort else max(0, matching.num_rows - query.limit)
        shown = _completed(history, query, matching.slice(first, query.limit), columns)
    else:
        shown = matching
    return QueryResult(plain_rows(shown.select(list(columns))), matching.num_rows, rows.num_rows, chosen.note())


def _completed(history: History, query: JobQuery, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """These columns of the rows, in the order of the rows. rows: a part of the result, with the columns of the key."""
    import pyarrow as pa

    among = {name: rows[name].combine_chunks().unique() for name in _KEY}
    found = history(list(dict.fromkeys((*_KEY, *columns))), query.since_s, query.until_s, query.user, among)
    places = {key: place for place, key in enumerate(_keys(found))}
    # A job that changed between the two reads is gone.
    return found.take(pa.array([places[key] for key in _keys(rows) if key in places], pa.int64()))


def _keys(rows: pa.Table) -> Iterator[tuple[int, int]]:
    return zip(*(rows[name].to_pylist() for name in _KEY), strict=True)


def plain_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Rows as dictionaries; NaN is None, so that JSON can hold it."""
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows.to_pylist()
    ]


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

    Raises UnknownTextError if no row has a word.
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
    counted: Any = rows[word.column].value_counts()
    seen = Counter({row["values"]: row["counts"] for row in counted.to_pylist() if row["values"]})
    strange = [value for value in word.values if value not in seen and value not in word.known]
    if not strange or not rows.num_rows:
        return
    named = [printable(value) for value, _ in seen.most_common(MAX_NAMED)]
    named += sorted(word.known - seen.keys())
    more = f" and {format_count(len(seen) - MAX_NAMED)} more" if len(seen) > MAX_NAMED else ""
    raise UnknownTextError(
        f"no job has {', '.join(repr(printable(value)) for value in strange)}; "
        f"{did_you_mean(strange[0], (*seen, *word.known))}choose one of: {', '.join(named) or 'none'}{more}",
        word.option,
    )


def ordered(rows: pa.Table, sort: str | None) -> pa.Table:
    """Rows by a column, "-" before its name: highest first; null last in either case. Equal ones stay as they are."""
    if sort is None:
        return rows
    import pyarrow.compute as pc

    order: Literal["ascending", "descending"] = "descending" if sort.startswith("-") else "ascending"
    keys = [(sort.removeprefix("-"), order)]
    return rows.take(pc.sort_indices(rows, sort_keys=keys))  # nulls at the end, and stable
