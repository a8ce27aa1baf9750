"""Telemetry files in portions: days, and within a day as many files as one query should read."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.units import format_count
from telemetry.metrics.base import BASE
from telemetry.metrics.options import Options
from telemetry.metrics.partials import Files, Partials, compute_partials, merge_partials
from telemetry.metrics.samples import run

Progress = Callable[[int, int, str], None]
"""Called with portions done, portions in all, and a word on what came of them."""

Mapper = Callable[[duckdb.DuckDBPyConnection, Sequence[Files], pa.Table, Options, tuple[int, int], Progress], Partials]
"""Called as `map_partials` is, and equal in what it returns: chunks may be computed anywhere."""

ROWS_PER_CHUNK = 2_000_000
"""Few enough that the windows of a chunk fit the processor's caches, enough to be worth a query's overhead."""

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_ALL_TIME = (-(2**53), 2**53)
_STORED = re.compile(r"date=(\d{4}-\d\d-\d\d)/(\d\d)(\d\d)\.parquet")


def split_files(paths: Sequence[Path]) -> list[Files]:
    """Chunks of files in time order, none across midnight. Files that are not the store's are one chunk, unsorted."""
    stored = sorted((start, path) for path in paths if (start := _stored_hour_ms(path)) is not None)
    others = [path for path in paths if _stored_hour_ms(path) is None]
    if others:
        return [Files(tuple(paths), *_ALL_TIME, is_sorted=False)]
    return list(_chunks(stored))


def _chunks(stored: Sequence[tuple[int, Path]]) -> Iterator[Files]:
    for _, of_day in groupby(stored, key=lambda item: item[0] // _DAY_MS):
        chunk: list[tuple[int, Path]] = []
        rows = 0
        for start_ms, path in of_day:
            more = pq.read_metadata(path).num_rows
            if chunk and rows + more > ROWS_PER_CHUNK:
                yield _files(chunk)
                chunk, rows = [], 0
            chunk.append((start_ms, path))
            rows += more
        yield _files(chunk)


def _files(chunk: Sequence[tuple[int, Path]]) -> Files:
    return Files(tuple(path for _, path in chunk), chunk[0][0], chunk[-1][0] + _HOUR_MS, is_sorted=True)


def _stored_hour_ms(path: Path) -> int | None:
    match = _STORED.fullmatch(f"{path.parent.name}/{path.name}")
    if not match:
        return None
    start = dt.datetime.fromisoformat(f"{match[1]}T{match[2]}:{match[3]}:00+00:00")
    return round(start.timestamp()) * 1000


def map_partials(
    db: duckdb.DuckDBPyConnection,
    chunks: Sequence[Files],
    claims: pa.Table,
    options: Options,
    counted_ms: tuple[int, int],
    progress: Progress,
) -> Partials:
    """Partials of all chunks, merged. As many chunks at once as DuckDB has threads: queries in file order use one."""

    def one(files: Files) -> Partials:
        with db.cursor() as cursor:
            return compute_partials(cursor, files, claims, options, counted_ms)

    done: list[Partials] = []
    with plain_joins(db), ThreadPoolExecutor(_threads(db)) as pool:
        for part in pool.map(one, chunks):
            done.append(part)
            progress(len(done), len(chunks), f"{format_count(sum(p[BASE].num_rows for p in done))} GPU runs")
    return merge_partials(db, done)


@contextlib.contextmanager
def plain_joins(db: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Joins read their left side in its order: the optimiser would else swap sides where claims are many."""
    run(db, "SET disabled_optimizers = 'join_order,build_side_probe_side'")
    try:
        yield
    finally:
        run(db, "RESET disabled_optimizers")


def _threads(db: duckdb.DuckDBPyConnection) -> int:
    return int(db.execute("SELECT current_setting('threads')").fetchall()[0][0])
