"""Telemetry files in portions: days, and within a day as many files as one thread should read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.units import format_count
from telemetry.metrics.hours import DAY_MS, HOUR_MS, Files, stored_hour_ms
from telemetry.metrics.options import Options
from telemetry.metrics.partials import Partials, compute_partials, merge_partials

Progress = Callable[[int, int, str], None]
"""Called with portions done, portions in all, and a word on what came of them."""

ROWS_PER_CHUNK = 1_000_000
"""Few enough that many threads share the work, enough that merging costs little."""
BYTES_A_ROW = 128
"""What the arrays of a row take while its hour is looked at."""

Made = TypeVar("Made")

_ALL_TIME = (-(2**53), 2**53)


@dataclass(frozen=True)
class Work:
    """Chunks of telemetry, and what the partials of each are made by. counted_ms: the span in which samples count."""

    chunks: Sequence[Files]
    allocations: pa.Table
    options: Options
    counted_ms: tuple[int, int]


Mapper = Callable[[duckdb.DuckDBPyConnection, Work, Progress], Partials]
"""Called as `map_partials` is, and equal in what it returns: chunks may be computed anywhere."""


def silent(done: int, total: int, word: str) -> None:
    """No progress is shown."""


def split_files(paths: Sequence[Path]) -> list[Files]:
    """Chunks of files in time order, none across midnight. Files that are not the store's are one chunk, unsorted."""
    stored = sorted((start, path) for path in paths if (start := stored_hour_ms(path)) is not None)
    others = [path for path in paths if stored_hour_ms(path) is None]
    if others:
        return [Files(tuple(paths), *_ALL_TIME, is_sorted=False)]
    return list(_chunks(stored))


def _chunks(stored: Sequence[tuple[int, Path]]) -> Iterator[Files]:
    for _, of_day in groupby(stored, key=lambda item: item[0] // DAY_MS):
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
    return Files(tuple(path for _, path in chunk), chunk[0][0], chunk[-1][0] + HOUR_MS, is_sorted=True)


def each_chunk(
    db: duckdb.DuckDBPyConnection,
    chunks: Sequence[Files],
    make: Callable[[duckdb.DuckDBPyConnection, Files], Made],
) -> Iterator[Made]:
    """What `make` gives for each chunk, in their order.

    As many at once as DuckDB has threads, but fewer if their hours would take more than half of DuckDB's memory.
    """

    def one(files: Files) -> Made:
        with db.cursor() as cursor:
            return make(cursor, files)

    with ThreadPoolExecutor(_workers(db, chunks)) as pool:
        yield from pool.map(one, chunks)


def map_partials(db: duckdb.DuckDBPyConnection, work: Work, progress: Progress) -> Partials:
    """Partials of all chunks, merged."""

    def one(db: duckdb.DuckDBPyConnection, files: Files) -> Partials:
        return compute_partials(db, files, work.allocations, work.options, work.counted_ms)

    done: list[Partials] = []
    for part in each_chunk(db, work.chunks, one):
        done.append(part)
        progress(len(done), len(work.chunks), f"{format_count(sum(part.runs for part in done))} GPU runs")
    return merge_partials(db, done)


def _workers(db: duckdb.DuckDBPyConnection, chunks: Sequence[Files]) -> int:
    sql = "SELECT current_setting('threads'), current_setting('memory_limit')"
    [(threads, memory)] = db.execute(sql).fetchall()
    rows = max((pq.read_metadata(chunk.paths[0]).num_rows for chunk in chunks), default=0)
    return max(1, min(int(threads), _bytes(memory) // (2 * BYTES_A_ROW * max(rows, 1))))


def _bytes(size: str) -> int:
    """A size as DuckDB shows it, such as "1.8 GiB"."""
    number, unit = size.split()
    return int(float(number) * 2 ** {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}.get(unit, 50))
