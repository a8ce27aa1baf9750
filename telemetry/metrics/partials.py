"""Partials of telemetry files: small tables that merge exactly, over hours, days and machines.

Files are read in chunks: days, and within a day as many files as one thread should read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from almanac.units import format_count
from telemetry.metrics import energy, roofline, use
from telemetry.metrics.arrays import (
    DAY_MS,
    HOUR_MS,
    NUMBER,
    WHOLE,
    ColumnKind,
    Columns,
    Files,
    Hour,
    Rows,
    each_hour,
    packed,
    stored_hour_ms,
    unpacked,
)
from telemetry.metrics.samples import Allocations, GpuSamples


@dataclass(frozen=True)
class Family:
    """One table of partials: its columns, and what makes one row of those with the same key."""

    kinds: dict[str, ColumnKind]
    merge: Callable[[Rows], Columns]


def _merge_allocations(given: Rows) -> Columns:
    rows, runs = given.by("allocation")
    found = {"allocation": runs.first(rows["allocation"])} | rows.merged(runs) | use.merge_memory(rows, runs)
    return found | roofline.merge(rows, runs)


_ALLOCATION_KINDS = {
    "allocation": WHOLE, "missing_energy_mj": NUMBER, **use.KINDS, **use.CLOCKED_KINDS, **use.MEMORY_KINDS,
    **roofline.KINDS,
}  # fmt: skip
ALLOCATION = Family(_ALLOCATION_KINDS, _merge_allocations)
WINDOWS = Family(use.WINDOW_KINDS, lambda given: given.totals("job", "gpus"))
HISTOGRAM = Family(roofline.HISTOGRAM_KINDS, lambda given: given.totals("job", "pipe", "bin"))
ENERGY = Family(energy.KINDS, energy.merge)
FAMILIES = (ALLOCATION, WINDOWS, HISTOGRAM, ENERGY)


@dataclass(frozen=True)
class Partials:
    """One table per family, in the order of FAMILIES: of the narrowest types, and without columns that say nothing."""

    tables: tuple[pa.Table, ...]

    def __getitem__(self, family: Family) -> Rows:
        """Columns of a family in full width."""
        return Rows(family.kinds, [unpacked(self.tables[FAMILIES.index(family)])])

    @property
    def counted(self) -> int:
        """Samples in the span that was to be counted."""
        rows = self[ALLOCATION]
        return int(rows["samples"].sum() - rows["uncounted"].sum())

    @property
    def runs(self) -> int:
        """GPUs of jobs, each as often as the parts that were merged name it."""
        return self.tables[0].num_rows

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)


def compute_partials(
    db: duckdb.DuckDBPyConnection,
    files: Files,
    allocations: pa.Table,
    options: MetricOptions,
    counted_ms: tuple[int, int],
) -> Partials:
    """Partials of the samples in files within allocations (`frames.ALLOCATION_FRAME`), which may overlap.

    Hours without an allocation are not read. uncounted: samples outside the span counted_ms. Raises duckdb.Error,
    pa.ArrowException or OSError where a file cannot be read.
    """
    held = Allocations.of(allocations, files.from_ms, files.until_ms)

    def measure(hour: Hour) -> tuple[Columns, ...]:
        return _measure(GpuSamples.of(hour, held), options, counted_ms)

    return _merged([list(found) for found in zip(*each_hour(db, files, measure, held.touch), strict=True)])


def _measure(samples: GpuSamples, options: MetricOptions, counted_ms: tuple[int, int]) -> tuple[Columns, ...]:
    """Columns of each family, of one hour."""
    placed, weights = roofline.place(samples), use.SampleWeights.of_samples(samples)
    allocation = {"allocation": samples.allocations.number[samples.allocation]}
    allocation |= use.measure(samples, weights, counted_ms)
    allocation |= use.measure_memory(samples, options.is_full) | energy.missing(samples)
    allocation |= roofline.measure(samples, placed, options.is_full)
    allocation |= use.measure_clocked(samples, weights) if options.is_full else {}
    bins = roofline.measure_histogram(samples, placed) if options.is_full else {}
    return allocation, use.measure_windows(samples), bins, energy.measure(samples)


def merge_partials(db: duckdb.DuckDBPyConnection, parts: Iterable[Partials]) -> Partials:
    """One Partials of many; the order in which they are given does not matter.

    A partial that was merged already must not span the time of another one: weights and energy carry over from hour to
    hour.
    """
    tables = list(zip(*(part.tables for part in parts), strict=True))
    return _merged([[unpacked(table) for table in of_family] for of_family in tables])


def _merged(given: Sequence[Sequence[Columns]]) -> Partials:
    found = []
    for family, parts in zip(FAMILIES, given or [[]] * len(FAMILIES), strict=True):
        rows = family.merge(Rows(family.kinds, [part for part in parts if part]))
        found.append(packed(family.kinds, rows))
    return Partials(tuple(found))


@dataclass(frozen=True)
class MetricOptions:
    """Options of the metrics. is_full: compute those outside `core`, too.

    These are the time-weighted classes, intensities, MFU, growth, and preallocation.
    """

    is_full: bool = True


Progress = Callable[[int, int, str], None]
"""Called with portions done, portions in all, and a word on what came of them."""

ROWS_PER_CHUNK = 1_000_000
"""Few enough that many threads share the work, enough that merging costs little."""
BYTES_A_ROW = 128
"""Memory that the arrays of a row take while its hour is looked at."""

Made = TypeVar("Made")

_ALL_TIME = (-(2**53), 2**53)


@dataclass(frozen=True)
class Work:
    """Chunks of telemetry, and what the partials of each are made by. counted_ms: the span in which samples count."""

    chunks: Sequence[Files]
    allocations: pa.Table
    options: MetricOptions
    counted_ms: tuple[int, int]


Mapper = Callable[[duckdb.DuckDBPyConnection, Work, Progress], Partials]
"""Called as `map_partials` is, and equal in what it returns: chunks may be computed anywhere."""


def silent(done: int, total: int, word: str) -> None:
    """Show no progress."""


def split_files(paths: Sequence[Path]) -> list[Files]:
    """Group files into chunks in time order, none across midnight, of at most ROWS_PER_CHUNK rows or one file.

    If any file is not the store's, all files are one chunk, marked as unsorted.
    """
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
    db: duckdb.DuckDBPyConnection, chunks: Sequence[Files], make: Callable[[duckdb.DuckDBPyConnection, Files], Made]
) -> Iterator[Made]:
    """Yield the results of `make` for each chunk, in their order.

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
