"""What a cross-job table is: its columns, the jobs that it can be made of, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from almanac.config import Config

_TYPES: dict[str, pa.DataType] = {"text": pa.string(), "count": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}


@dataclass(frozen=True)
class StudyTable:
    """One table: `of` makes its rows of the jobs that have a verdict and every metric of `needs`.

    needs_any: a job must have at least one of these metrics. reads: what else `of` reads; its jobs have no other
    columns. is_profiled: profiling counters enter, so jobs in which these read 0 while GPU_UTIL was high are left out.
    is_of_histograms: `of` gets `Population.histograms` in place of the jobs. `of` is never called without jobs; its
    frame has the columns of the schema, in any order.
    """

    name: str
    figure: str
    title: str
    schema: pa.Schema
    of: Callable[[pd.DataFrame, Config], pd.DataFrame]
    needs: tuple[str, ...] = ()
    needs_any: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    is_profiled: bool = False
    is_of_histograms: bool = False


@dataclass(frozen=True)
class Result:
    """A table's rows, how many jobs they are of, and how many were left out, by reason.

    why_empty: in words why there are no rows; empty where there are some.
    """

    table: StudyTable
    rows: pa.Table
    jobs: int
    left_out: Mapping[str, int]
    why_empty: str = ""


def columns(*given: tuple[str, str] | tuple[str, str, str]) -> pa.Schema:
    """A schema of (name, text|count|real|flag[, meaning]); the meaning goes into the field's metadata."""
    fields = []
    for name, kind, *about in given:
        fields.append(pa.field(name, _TYPES[kind], metadata={"unit": about[0]} if about else None))
    return pa.schema(fields)


CONTENTS = columns(
    ("table", "text"),
    ("figure", "text", "of perlmutter-telemetry"),
    ("title", "text"),
    ("jobs", "count", "jobs of this line"),
    ("left_out_because", "text", "null: these jobs are in the table"),
)


def contents(results: Mapping[str, Result]) -> pa.Table:
    """For every table the jobs it is made of, and a line for each reason for which jobs were left out."""
    rows = []
    for name, result in results.items():
        head = {"table": name, "figure": result.table.figure, "title": result.table.title}
        rows.append({**head, "jobs": result.jobs, "left_out_because": None})
        rows += [{**head, "jobs": jobs, "left_out_because": why} for why, jobs in result.left_out.items()]
    return pa.Table.from_pylist(rows, schema=CONTENTS)


def named(frames: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Frames below one another, with these columns; a column that a frame lacks is null there."""
    return pd.concat(frames, ignore_index=True).reindex(columns=list(names))
