"""Cross-job tables: columns, the jobs that a table can be made of, its result, shared statistics, and its files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.atomic import make_folders, write_output
from almanac.config import Config
from almanac.errors import StoreError
from almanac.units import cell_text

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


CONTENTS = columns(("table", "text"), ("figure", "text", "of Cankur et al."), ("title", "text"),
                   ("jobs", "count", "jobs of this line"),
                   ("left_out_because", "text", "null: these jobs are in the table"))  # fmt: skip


def contents(results: Mapping[str, Result]) -> pa.Table:
    """Return the jobs of every table, and a line for each reason for which jobs were left out."""
    rows = []
    for name, result in results.items():
        head = {"table": name, "figure": result.table.figure, "title": result.table.title}
        rows.append({**head, "jobs": result.jobs, "left_out_because": None})
        rows += [{**head, "jobs": jobs, "left_out_because": why} for why, jobs in result.left_out.items()]
    return pa.Table.from_pylist(rows, schema=CONTENTS)


def named(frames: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Frames below one another, with these columns; a column that a frame lacks is null there."""
    return pd.concat(frames, ignore_index=True).reindex(columns=list(names))


CONTENTS_NAME = "contents"


def write_tables(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write NAME.parquet and NAME.csv of every table, and of `contents`, as `write_files` does."""
    tables = {name: _described(result) for name, result in results.items()} | {CONTENTS_NAME: contents(results)}
    kinds = ((".parquet", _parquet), (".csv", csv_content))
    return write_files(folder, ((name + end, of(rows)) for name, rows in tables.items() for end, of in kinds))


def write_files(folder: Path, files: Iterable[tuple[str, bytes]]) -> list[Path]:
    """Write files by their names; existing ones are replaced. Returns their paths.

    A reader sees each file as it was or as it is, never a part. Raises StoreError if one cannot be written.
    """
    written = []
    try:
        make_folders(folder)
        for name, content in files:
            write_output(folder / name, content)
            written.append(folder / name)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error}", "choose a folder that you can write to") from error
    return written


def _described(result: Result) -> pa.Table:
    about = {
        "almanac.title": result.table.title,
        "almanac.figure": result.table.figure,
        "almanac.jobs": str(result.jobs),
        "almanac.left_out": json.dumps(dict(result.left_out)),
        "almanac.why_empty": result.why_empty,
    }
    return result.rows.replace_schema_metadata(about)


def _parquet(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def csv_content(rows: pa.Table) -> bytes:
    """A table as CSV that is safe to open in a spreadsheet; a missing value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows.column_names)
    writer.writerows([cell_text(value, is_for_spreadsheets=True) for value in row.values()] for row in rows.to_pylist())
    return out.getvalue().encode()


QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


@dataclass(frozen=True)
class Bands:
    """Half-open bands [edge, next edge) of a value; what lies below the first edge counts to the first band.

    `first` and `last` name the columns of a band's edges. top: upper edge of the last band, which is then closed;
    None: it is open, and its upper edge null.
    """

    first: str
    last: str
    edges: tuple[float, ...]
    top: float | None = None

    def place(self, values: pd.Series) -> pd.Series:
        """Number of each value's band, 0 the lowest. Values must be known."""
        codes = np.searchsorted(self.edges, values.to_numpy("float64"), side="right") - 1
        return pd.Series(np.maximum(codes, 0), index=values.index)

    def frame(self, codes: Sequence[int] | pd.Series | None = None) -> pd.DataFrame:
        """The edges of these bands; of all without codes."""
        numbers = range(len(self.edges)) if codes is None else codes
        upper = [*self.edges[1:], math.nan if self.top is None else self.top]
        return pd.DataFrame({self.first: [self.edges[n] for n in numbers], self.last: [upper[n] for n in numbers]})


def steps(count: int) -> tuple[float, ...]:
    """Lower edges of `count` equal bands of 0..1."""
    return tuple(number / count for number in range(count))


def quantile_names(value: str) -> list[str]:
    """The columns that `spread` makes of a value."""
    return [f"mean_{value}", *(f"{name}_{value}" for name in QUANTILES)]


def spread(jobs: pd.DataFrame, keys: list[str], value: str) -> pd.DataFrame:
    """Return jobs, mean, and quantiles (linear between order statistics) per group of keys that has jobs."""
    groups = jobs.groupby(keys, dropna=False)[value]
    found = pd.DataFrame({"jobs": groups.size(), f"mean_{value}": groups.mean()})
    for name, share in QUANTILES.items():
        found[f"{name}_{value}"] = groups.quantile(share)
    return found.reset_index()


def histogram(jobs: pd.DataFrame, keys: list[str], value: str, bands: Bands) -> pd.DataFrame:
    """Return jobs, share of the group, and cumulative share per group of keys and band, bands without jobs included."""
    frames = []
    for _, group in jobs.groupby(keys, dropna=False):
        counts = np.bincount(bands.place(group[value]), minlength=len(bands.edges))
        shares = pd.DataFrame({"jobs": counts, "share": counts / len(group)})
        shares["cumulative_share"] = np.cumsum(counts) / len(group)
        same = group[keys].iloc[[0] * len(bands.edges)].reset_index(drop=True)
        frames.append(pd.concat([same, bands.frame(), shares], axis=1))
    return pd.concat(frames, ignore_index=True)


def share_of(jobs: pd.DataFrame, keys: list[str], **conditions: pd.Series) -> pd.DataFrame:
    """Return jobs per group of keys, and the share of them that meets each condition (a flag per job)."""
    flags = jobs[keys].assign(**conditions)
    groups = flags.groupby(keys, dropna=False)
    return groups.agg(
        jobs=(next(iter(conditions)), "size"), **{name: (name, "mean") for name in conditions}
    ).reset_index()
