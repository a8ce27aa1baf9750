"""Select past jobs by options: filters over known and unknown values, order, and number; lists of names and values."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from almanac.units import did_you_mean, format_count, parse_moment, printable
from cli.output import local_time

if TYPE_CHECKING:
    from reports.job.conclusions import History, Row


MAX_NAMED = 40
_KEY = ("job_id", "submit_s")


class UnknownTextError(ValueError):
    """Error for a filter's text that no job has. option: the filter's."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


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
    """A selection of jobs in an order. sort: a column, with "-" before it highest first; None: oldest end first.

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
    """Return these columns of the selected jobs. Raises UnknownTextError, and the errors of `history`."""
    filters = [*(word.column for word in query.words), *(limit.column for limit in query.limits)]
    sort = (query.sort or "").removeprefix("-")
    # With a limit, other columns are read later, and only for the rows that are shown.
    others = () if query.limit > 0 else columns
    needed = list(dict.fromkeys((*_KEY, *others, *filters, *([sort] if sort else []))))
    chosen = JobFilter(query.words, query.limits)
    among: dict[str, Sequence[Any]] | None = {"job_id": query.job_ids} if query.job_ids else None
    matching = filter(chosen.takes, history(needed, query.since_s, query.until_s, query.user, among))
    shown = _first(matching, query.sort, query.limit)
    chosen.check_words()
    if query.limit > 0 and shown:
        among = {name: [row[name] for row in shown] for name in _KEY}
        found = history(list(dict.fromkeys((*_KEY, *columns))), query.since_s, query.until_s, query.user, among)
        by_key = {(row["job_id"], row["submit_s"]): row for row in found}
        # A job that changed between the two reads is gone.
        shown = [by_key[key] for row in shown if (key := (row["job_id"], row["submit_s"])) in by_key]
    rows = [{name: row[name] for name in columns} for row in shown]
    return QueryResult(rows, chosen.taken, chosen.total, chosen.note())


def _first(rows: Iterable[Row], sort: str | None, limit: int) -> list[Row]:
    """The newest rows, or the first by a column, "-" before its name: highest first. Null is last in either case."""
    if sort is None:
        return list(deque(rows, limit) if limit else rows)
    column, is_falling = sort.removeprefix("-"), sort.startswith("-")

    def key(row: Row) -> tuple[bool, Any]:
        return (row[column] is None) != is_falling, 0 if row[column] is None else row[column]

    if limit:
        return (heapq.nlargest if is_falling else heapq.nsmallest)(limit, rows, key)
    return sorted(rows, key=key, reverse=is_falling)


@dataclass
class JobFilter:
    """Takes the rows that match every filter, and counts. total: all rows; taken: those that match.

    maybe: rows that no filter excludes, but that lack a metric. unknown: by metric, how many of those lack it.
    """

    words: Sequence[Words] = ()
    limits: Sequence[Limit] = ()
    total: int = 0
    taken: int = 0
    maybe: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    seen: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def takes(self, row: Row) -> bool:
        """Return True if the row matches. A row that lacks a metric does not match a filter on it."""
        self.total += 1
        for word in self.words:
            self.seen[word.column][row[word.column] or ""] += 1
        # A row is unknown only if the unknown value decides.
        if not all(
            (word.is_metric if (text := row[word.column]) is None else text in word.values) for word in self.words
        ) or not all(
            limit.low <= (limit.low if (number := row[limit.column]) is None else number) <= limit.high
            for limit in self.limits
        ):
            return False
        lacking = {column for column in self._metrics() if row[column] is None}
        self.unknown.update(lacking)
        self.maybe += bool(lacking)
        self.taken += not lacking
        return not lacking

    def _metrics(self) -> Iterator[str]:
        yield from (word.column for word in self.words if word.is_metric)
        yield from (limit.column for limit in self.limits)

    def note(self) -> str:
        """A sentence about jobs that were filtered out because a metric is unknown; empty if there are none."""
        if not self.maybe:
            return ""
        counts = ((column, self.unknown[column]) for column in dict.fromkeys(self._metrics()))
        parts = ", ".join(f"{column} ({format_count(number)})" for column, number in counts if number)
        jobs = "1 job that may match is" if self.maybe == 1 else f"{format_count(self.maybe)} jobs that may match are"
        return f"{jobs} filtered out, because of unknown values: {parts}"

    def check_words(self) -> None:
        """Raise UnknownTextError if no row has a word."""
        for word in self.words if self.total else ():
            seen = Counter({text: number for text, number in self.seen[word.column].items() if text})
            strange = [value for value in word.values if value not in seen and value not in word.known]
            if not strange:
                continue
            named = [printable(value) for value, _ in seen.most_common(MAX_NAMED)]
            named += sorted(word.known - seen.keys())
            more = f" and {format_count(len(seen) - MAX_NAMED)} more" if len(seen) > MAX_NAMED else ""
            raise UnknownTextError(
                f"no job has {', '.join(repr(printable(value)) for value in strange)}; "
                f"{did_you_mean(strange[0], (*seen, *word.known))}choose one of: {', '.join(named) or 'none'}{more}",
                word.option,
            )


_MOST_GPUS = 100_000
SHORT_STATES = {
    "BF": "BOOT_FAIL", "CA": "CANCELLED", "CD": "COMPLETED", "DL": "DEADLINE", "F": "FAILED", "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY", "PR": "PREEMPTED", "RV": "REVOKED", "TO": "TIMEOUT",
}  # fmt: skip
"""Slurm's short forms of the states of ended jobs, as sacct -s takes them."""


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Split texts at commas and return the words, without empty ones: ["a,b", "c"] gives ("a", "b", "c")."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


def check_columns(option: str, names: Iterable[str], valid: Sequence[str], what: str = "column") -> None:
    """Check that columns exist. Raises click.BadParameter with similar names and the command that lists all."""
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


def parse_wheres(texts: Sequence[str], valid: Sequence[str]) -> list[tuple[str, str]]:
    """Columns and texts of --where COLUMN=TEXT. Raises click.BadParameter."""
    pairs = [(column.strip(), value) for column, _, value in (text.partition("=") for text in texts)]
    check_columns("--where", [column for column, _ in pairs], valid, "column of texts")
    for column, value in pairs:
        if not words_of([value]):
            raise click.BadParameter(f"expected COLUMN=TEXT, such as {column}=ok", param_hint="--where")
    return pairs


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


def read_capacity(text: str) -> dict[str, int]:
    """GPUs by type, of TYPE=N,... Raises click.BadParameter."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = (each.strip() for each in part.rpartition("="))
        if not name or not (count.isascii() and count.isdecimal()) or not 0 < int(count) <= _MOST_GPUS:
            raise click.BadParameter(
                f"{printable(part, 40)} is not TYPE=N, with 1 to {_MOST_GPUS} GPUs", param_hint="--gpu-types"
            )
        if name in found:
            raise click.BadParameter(f"names {printable(name, 40)} twice", param_hint="--gpu-types")
        found[name] = int(count)
    if not found:
        raise click.BadParameter("names no type; give TYPE=N,...", param_hint="--gpu-types")
    return found


def read_settings(given: Sequence[str], known: Mapping[str, tuple[float, float, float] | str]) -> dict[str, Any]:
    """Values of --set NAME=VALUE, and defaults of the others. Raises click.BadParameter."""
    found: dict[str, Any] = {name: each if isinstance(each, str) else each[0] for name, each in known.items()}
    for text in given:
        name, _, value = (each.strip() for each in text.partition("="))
        if name not in known:
            raise click.BadParameter(
                f"{printable(name, 40)} is no setting; {did_you_mean(name, known)}known: {', '.join(known)}",
                param_hint="--set",
            )
        each = known[name]
        if isinstance(each, str):
            found[name] = value
            continue
        default, least, most = each
        try:
            found[name] = type(default)(value)
        except ValueError:
            found[name] = None
        if found[name] is None or not least <= found[name] <= most:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise click.BadParameter(
                f"{name}={printable(value, 40)} is not {kind} from {least:g} to {most:g}", param_hint="--set"
            )
    return found


def time_option(text: str | None, now_s: int) -> int | None:
    """The value of -S, -E, or --since in seconds since 1970. Raises click.BadParameter."""
    try:
        return None if text is None else parse_moment(text, now_s)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def check_span(since_s: int | None, until_s: int | None) -> None:
    """Check that -E is after -S, as otherwise no job can lie between them. Raises click.UsageError."""
    if since_s is not None and until_s is not None and until_s <= since_s:
        raise click.UsageError(
            f"-E {local_time(until_s)} is not after -S {local_time(since_s)}: exchange them, or leave one out"
        )
