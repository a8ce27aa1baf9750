"""A family of metrics: one query over the samples of a few files, and an associative merge of its results.

Queries read two relations: `samples` (telemetry, as t) and `hourly` (claims by the hour, as c), joined by JOIN.
A merge reads `parts` (partials of any number of runs) and gives rows of the same columns, so that partials of hours
become partials of a day, and those of days become those of a job, by the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from telemetry.metrics.options import Options
from telemetry.schema import schema_of

HOUR_MS = 3_600_000

JOIN = f"""samples t JOIN hourly c
  ON t.host = c.host AND t.gpu = c.gpu AND t.mig = c.mig AND t.time_ms // {HOUR_MS} = c.hour
 AND t.time_ms >= c.start_ms AND t.time_ms < c.end_ms"""
"""Hosts and hours narrow the join to one candidate or two; a join on hosts alone would grow with jobs * samples."""


@dataclass(frozen=True)
class Column:
    """A column of a partial: the aggregate that makes it from samples, and the one that merges it."""

    name: str
    kind: pa.DataType
    sql: str
    merge: str


def total(name: str, sql: str, kind: pa.DataType | None = None) -> Column:
    """A sum or a count; floating point unless another kind is given."""
    return Column(name, kind or pa.float64(), sql, "sum")


def number(name: str, sql: str) -> Column:
    """A sum of whole numbers."""
    return total(name, sql, pa.int64())


@dataclass(frozen=True)
class Family:
    """query: SQL over `samples` and `hourly`. merge: SQL over `parts`, with the columns of schema before and after.

    is_chained: the query gives one row per claim and hour, in which neighbours were read in file order (lag, lead);
    its column `misplaced` is 0 where the files are sorted by GPU and time. only_full: not part of the core summary.
    only_aligned: for windows that start with the job.
    """

    name: str
    schema: pa.Schema
    query: Callable[[Options], str]
    merge: str
    is_chained: bool = False
    only_full: bool = False
    only_aligned: bool = False


def summing_family(name: str, key: Sequence[str], columns: Callable[[Options], list[Column]]) -> Family:
    """A family whose columns are aggregates of single samples, per `key` (columns of `hourly`)."""
    fixed = columns(Options())
    keys = ", ".join(key)

    def query(options: Options) -> str:
        made = ", ".join(f"{column.sql} AS {column.name}" for column in columns(options))
        return f"SELECT {', '.join(f'c.{k}' for k in key)}, {made} FROM {JOIN} GROUP BY ALL"

    merged = ", ".join(f"{column.merge}({column.name}) AS {column.name}" for column in fixed)
    schema = schema_of({**{k: pa.int32() for k in key}, **{column.name: column.kind for column in fixed}})
    return Family(name, schema, query, f"SELECT {keys}, {merged} FROM parts GROUP BY {keys}")
