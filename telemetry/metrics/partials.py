"""Partials of telemetry files: small tables that merge exactly, over hours, days and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from telemetry.metrics import base, energy, histogram, memory, roofline, spatial
from telemetry.metrics.allocation_arrays import Allocations
from telemetry.metrics.columns import NUMBER, WHOLE, Columns, Kind, Rows, packed, unpacked
from telemetry.metrics.hours import Files, Hour, each_hour
from telemetry.metrics.options import Options
from telemetry.metrics.samples import GpuSamples


@dataclass(frozen=True)
class Family:
    """One table of partials: its columns, and what makes one row of those with the same key."""

    kinds: dict[str, Kind]
    merge: Callable[[Rows], Columns]


def _merge_allocations(given: Rows) -> Columns:
    rows, runs = given.by("allocation")
    found = {"allocation": runs.first(rows["allocation"])} | rows.merged(runs) | memory.merge(rows, runs)
    return found | roofline.merge(rows, runs)


_ALLOCATION_KINDS = {
    "allocation": WHOLE, "missing_energy_mj": NUMBER, **base.KINDS, **memory.KINDS, **roofline.KINDS,
}  # fmt: skip
ALLOCATION = Family(_ALLOCATION_KINDS, _merge_allocations)
WINDOWS = Family(spatial.KINDS, spatial.merge)
HISTOGRAM = Family(histogram.KINDS, histogram.merge)
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
    db: duckdb.DuckDBPyConnection, files: Files, allocations: pa.Table, options: Options, counted_ms: tuple[int, int]
) -> Partials:
    """Partials of the samples in files within allocations (`frames.ALLOCATION_FRAME`), which may overlap.

    Hours without an allocation are not read. uncounted: samples outside the span counted_ms. Raises duckdb.Error,
    pa.ArrowException or OSError where a file cannot be read.
    """
    held = Allocations.of(allocations, files.from_ms, files.until_ms)

    def measure(hour: Hour) -> tuple[Columns, ...]:
        return _measure(GpuSamples.of(hour, held), options, counted_ms)

    return _merged([list(found) for found in zip(*each_hour(db, files, measure, held.touch), strict=True)])


def _measure(samples: GpuSamples, options: Options, counted_ms: tuple[int, int]) -> tuple[Columns, ...]:
    """Columns of each family, of one hour."""
    placed = roofline.place(samples)
    allocation = {
        "allocation": samples.allocations.number[samples.allocation],
        **base.measure(samples, counted_ms),
    }
    allocation |= memory.measure(samples, options.is_full) | energy.missing(samples)
    allocation |= roofline.measure(samples, placed, options.is_full)
    bins = histogram.measure(samples, placed) if options.is_full else {}
    return allocation, spatial.measure(samples), bins, energy.measure(samples)


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
