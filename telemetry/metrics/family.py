"""A family of metrics: one query over the samples of a few files, and an associative merge of its results.

Queries read two relations: `samples` (telemetry, as t) and `hourly` (claims by the hour, as c), see `joined`.
A merge reads `parts` (partials of any number of runs) and gives rows of the same columns, so that partials of hours
become partials of a day, and those of days become those of a job, by the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known
from telemetry.schema import schema_of

HOUR_MS = 3_600_000


def claimed(known: Known) -> str:
    """SQL: the condition under which a sample t belongs to an hour c of a claim.

    Hosts and hours narrow the join to one candidate or two; a join on hosts alone would grow with jobs * samples.
    """
    mig = "c.mig = ''" if known.is_whole else "t.mig = c.mig"
    return f"""t.host = c.host AND t.gpu = c.gpu AND t.time_ms // {HOUR_MS} = c.hour AND {mig}
 AND t.time_ms >= c.start_ms AND t.time_ms < c.end_ms"""


def joined(known: Known) -> str:
    """SQL: samples t with their claims c."""
    return f"samples t JOIN hourly c ON {claimed(known)}"


def neighbour(which: str, name: str, known: Known) -> str:
    """SQL: who and when the sample before (lag) or after (lead) in file order is."""
    columns = (("host", "host"), ("gpu", "gpu"), *(() if known.is_whole else (("mig", "mig"),)), ("time_ms", "ms"))
    return ", ".join(f"{which}({column}) OVER () AS {name}_{short}" for column, short in columns)


def starts_anew(name: str, known: Known) -> str:
    """SQL: whether the neighbour is of another GPU, hour or claim."""
    mig = "" if known.is_whole else f"OR {name}_mig <> t.mig "
    return (
        f"{name}_host IS DISTINCT FROM t.host OR {name}_gpu <> t.gpu {mig}"
        f"OR {name}_ms // {HOUR_MS} <> c.hour OR {name}_ms < c.start_ms OR {name}_ms >= c.end_ms"
    )


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

    is_chained: the query gives one row per claim and hour, and reads neighbours in file order (lag, lead); its column
    `misplaced` is 0 where the files are sorted by GPU and time. Neighbours are read before the join: where a GPU has
    two claims in an hour, a join gives the rows of one after those of the other.
    only_full: not part of the core summary. only_aligned: for windows that start with the job.
    """

    name: str
    schema: pa.Schema
    query: Callable[[Options, Known], str]
    merge: str
    is_chained: bool = False
    only_full: bool = False
    only_aligned: bool = False


def summing_family(
    name: str, key: str, columns: Callable[[Known], list[Column]], inner: Callable[[Options, Known], str]
) -> Family:
    """A family whose columns are aggregates of single samples: of the rows of `inner`, by their column `key`."""
    fixed = columns(Known())

    def query(options: Options, known: Known) -> str:
        made = ", ".join(f"{column.sql} AS {column.name}" for column in columns(known))
        return f"SELECT {key}, {made} FROM ({inner(options, known)}) GROUP BY {key}"

    merged = ", ".join(f"{column.merge}({column.name}) AS {column.name}" for column in fixed)
    schema = schema_of({key: pa.int32(), **{column.name: column.kind for column in fixed}})
    return Family(name, schema, query, f"SELECT {key}, {merged} FROM parts GROUP BY {key}")
