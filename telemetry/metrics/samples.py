"""The samples of an hour that lie within allocations, GPU by GPU and in time order, and the allocations as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.counters import PIPES
from telemetry.metrics.arrays import HOUR_MS, Array, Hour, MisplacedError, RowRuns, ragged

NO_LABEL = -1
_PLAIN = (
    "job", "start_ms", "end_ms", "steady_from_ms", "steady_until_ms", "interval_ms", "window_ms", "label",
    "max_power_w", "engines",
)  # fmt: skip


@dataclass(frozen=True)
class Allocations:
    """Columns of `frames.ALLOCATION_FRAME`. ridges: by pipe, flop per byte, NaN where not known. unit: see `_codes`."""

    number: Array
    job: Array
    start_ms: Array
    end_ms: Array
    steady_from_ms: Array
    steady_until_ms: Array
    interval_ms: Array
    window_ms: Array
    label: Array
    max_power_w: Array
    engines: Array
    is_mig: Array
    ridges: dict[str, Array]
    unit: Array
    _hosts: pa.Array[Any]
    _migs: pa.Array[Any]

    @classmethod
    def of(cls, table: pa.Table, from_ms: int, until_ms: int) -> Allocations:
        """Return those of a table that touch the span [from_ms, until_ms)."""
        touching = (table["start_ms"].to_numpy() < until_ms) & (table["end_ms"].to_numpy() > from_ms)
        table = table.take(np.flatnonzero(touching))
        host, mig = (table[name].combine_chunks() for name in ("host", "mig"))
        hosts, migs = host.unique(), mig.unique()
        wanted = ("allocation", "gpu", *_PLAIN, *(f"ridge_{pipe}" for pipe in PIPES))
        column = {name: table[name].to_numpy() for name in wanted}
        return cls(
            number=column["allocation"],
            is_mig=table["mig"].to_numpy() != "",
            ridges={pipe: column[f"ridge_{pipe}"] for pipe in PIPES},
            unit=_codes(host, column["gpu"], mig, hosts, migs),
            _hosts=hosts,
            _migs=migs,
            **{name: column[name] for name in _PLAIN},
        )

    def touch(self, hour_ms: int) -> bool:
        """Return True if any allocation has some time of the hour that begins then."""
        return bool(((self.start_ms < hour_ms + HOUR_MS) & (self.end_ms > hour_ms)).any())

    def find(self, hour_ms: int, host: pa.Array[Any], gpu: Array, mig: pa.Array[Any]) -> tuple[Array, Array]:
        """Places of the allocations of an hour that are of these units, and for each the place of its unit."""
        units = _codes(host, gpu, mig, self._hosts, self._migs)
        order = np.argsort(units)
        if not len(order):
            return order, order
        allocation = np.flatnonzero((self.start_ms < hour_ms + HOUR_MS) & (self.end_ms > hour_ms))
        at = order[np.minimum(np.searchsorted(units[order], self.unit[allocation]), len(order) - 1)]
        held = units[at] == self.unit[allocation]
        return allocation[held], at[held]


def _codes(host: pa.Array[Any], gpu: Array, mig: pa.Array[Any], hosts: pa.Array[Any], migs: pa.Array[Any]) -> Array:
    """One number for each host, gpu and mig; -1 where hosts or migs do not name it."""
    host_code, mig_code = (
        pc.index_in(names, known).fill_null(-1).to_numpy().astype(np.int64)
        for names, known in ((host, hosts), (mig, migs))
    )
    return np.where((host_code < 0) | (mig_code < 0), -1, (host_code << 32) + (mig_code << 16) + gpu)


_KEPT = {
    "gpu_util_pct", "hbm_used_mib", "energy_mj", "power_w", "sm_clock_mhz",
    *(f"{name}_active_frac" for name in ("sm", "dram", "gr_engine", *PIPES)),
}  # fmt: skip


@dataclass(frozen=True)
class Units:
    """The GPUs of an hour, each a run of samples in time order. key: run * HOUR_MS + ms into the hour, ascending."""

    runs: RowRuns
    host: pa.Array[Any]
    gpu: Array
    mig: pa.Array[Any]
    time_ms: Array
    key: Array

    @classmethod
    def of(cls, hour: Hour) -> Units:
        """Index an hour's samples by GPU. Raises MisplacedError for unsorted, repeated, or foreign samples."""
        host, mig = hour.text("host"), hour.text("mig")
        gpu, time_ms = hour.numbers("gpu"), hour.numbers("time_ms")
        codes = (host.indices.to_numpy(), gpu, mig.indices.to_numpy())
        runs = RowRuns.of(*codes)
        into_ms = time_ms - hour.start_ms
        if len(into_ms) and (into_ms.min() < 0 or into_ms.max() >= HOUR_MS):
            raise MisplacedError
        key = into_ms + runs.spread(np.arange(len(runs.starts)) * HOUR_MS)
        units = set(zip(*(runs.first(code).tolist() for code in codes), strict=True))
        if (key[1:] <= key[:-1]).any() or len(units) < len(runs.starts):
            raise MisplacedError
        named = (text.take(runs.starts).dictionary_decode() for text in (host, mig))
        return cls(runs, next(named), runs.first(gpu), next(named), time_ms, key)


@dataclass(frozen=True)
class CounterValues:
    """Values of a counter; known: in which samples it is, None for all of them. A value that is not known is NaN."""

    values: Array
    known: Array | None

    @classmethod
    def of(cls, values: Array) -> CounterValues:
        missing = np.isnan(values)
        return cls(values, ~missing if missing.any() else None)

    def times(self, other: CounterValues) -> CounterValues:
        """The product, sample by sample; known where both are."""
        masks = [known for known in (self.known, other.known) if known is not None]
        values = self.values.astype(np.float64)
        values *= other.values
        return CounterValues(values, np.logical_and.reduce(masks) if masks else None)

    def missing(self, runs: RowRuns) -> Array:
        return np.zeros(len(runs.starts), np.int64) if self.known is None else runs.sum(~self.known)

    def total(self, runs: RowRuns) -> Array:
        return runs.sum(self.values if self.known is None else np.where(self.known, self.values, 0))


@dataclass(frozen=True)
class GpuSamples:
    """A run for each allocation with samples in the hour. allocation: its place in `allocations`. Runs share samples.

    Of the counters only those are kept that several metrics look at: an hour of a large site has millions of samples.
    """

    hour: Hour
    allocations: Allocations
    allocation: Array
    runs: RowRuns
    time_ms: Array
    _take: Callable[[Array], Array]
    _counters: dict[str, CounterValues | None] = field(default_factory=dict)

    @classmethod
    def of(cls, hour: Hour, allocations: Allocations) -> GpuSamples:
        """Select the samples of an hour that belong to allocations. Raises MisplacedError, as Units.of does."""
        units = Units.of(hour)
        allocation, run = allocations.find(hour.start_ms, units.host, units.gpu, units.mig)
        low, high = (
            np.searchsorted(units.key, run * HOUR_MS + np.clip(bound[allocation] - hour.start_ms, 0, HOUR_MS))
            for bound in (allocations.start_ms, allocations.end_ms)
        )
        low, high = _own(hour, allocations.label[allocation], low, high)
        held = np.flatnonzero(high > low)
        held = held[np.argsort(low[held], kind="stable")]
        runs, take = _taken(low[held], high[held], len(units.key))
        return cls(hour, allocations, allocation[held], runs, take(units.time_ms), take)

    @property
    def is_mig(self) -> Array:
        """True for each run whose GPU is a MIG instance."""
        return self.allocations.is_mig[self.allocation]

    def label(self) -> Array | None:
        """The job id that each sample's label names, -1 without one; None if no sample of the hour has a label."""
        column: Any = self.hour.read("job_label")
        return None if column is None else self._take(column.fill_null(-1).to_numpy())

    def uuid(self) -> tuple[list[str], Array]:
        """UUIDs, and the place of each sample's UUID in this list; -1 without one."""
        uuid = self.hour.text("uuid")
        if not len(uuid):
            return [], np.full(self.runs.rows, -1)
        return uuid.dictionary.to_pylist(), self._take(uuid.indices.fill_null(-1).to_numpy())

    def counter(self, name: str) -> CounterValues | None:
        """A counter's values in the samples; None if all of them are unknown in the hour.

        On a MIG instance, GPU_UTIL and GR_ENGINE_ACTIVE are what `_OF_SLICE` makes of them.
        """
        if name in self._counters:
            return self._counters[name]
        counter = self._read(name)
        if name in _OF_SLICE and self.is_mig.any():
            counter = self._with_slices(counter, _OF_SLICE[name](self))
        if name in _KEPT:
            self._counters[name] = counter
        return counter

    def _read(self, name: str) -> CounterValues | None:
        column = self.hour.read(name)
        return None if column is None else CounterValues.of(self._take(column.to_numpy()))

    def _with_slices(self, whole: CounterValues | None, of_slices: Array | None) -> CounterValues:
        unknown = np.full(self.runs.rows, np.nan)
        values = (unknown if each is None else each for each in (of_slices, whole.values if whole else None))
        return CounterValues.of(np.where(self.runs.spread(self.is_mig), *values))

    def _slice_engine_frac(self) -> Array | None:
        """GR_ENGINE_ACTIVE of a slice counts one of its engines (NVIDIA/DCGM issue 138): a full 3g slice shows 1/3.

        With several compute instances it shows more, and at most 1 is said. As it is where the size is not known.
        """
        engine = self._read("gr_engine_active_frac")
        engines = self.runs.spread(np.nan_to_num(self.allocations.engines[self.allocation], nan=1.0))
        return None if engine is None else np.minimum(engine.values.astype(np.float64) * engines, 1.0)

    def _slice_util_pct(self) -> Array | None:
        """SM_ACTIVE; if that is unknown, or 0 while the engine is busy, the engine."""
        sm, engine = self.counter("sm_active_frac"), self._slice_engine_frac()
        if sm is None or engine is None:
            known = engine if sm is None else sm.values.astype(np.float64)
            return None if known is None else 100 * known
        return 100 * np.where((sm.values > 0) | np.isnan(engine), sm.values, engine)


_OF_SLICE: dict[str, Callable[[GpuSamples], Array | None]] = {
    "gpu_util_pct": GpuSamples._slice_util_pct,
    "gr_engine_active_frac": GpuSamples._slice_engine_frac,
}
"""Replacements on MIG instances for counters that are no share of the instance there."""


def _own(hour: Hour, label: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Rows low..high of allocations without those at either end that carry the label of another job.

    Accounting knows whole seconds: in the one in which a job begins, its GPU may still show the job before it.
    """
    column: Any = hour.read("job_label") if (label != NO_LABEL).any() else None
    if column is None:
        return low, high
    said = np.append(column.fill_null(NO_LABEL).to_numpy(), NO_LABEL)

    def is_foreign(row: Array) -> Array:
        found: Array = (low < high) & (label != NO_LABEL) & (said[row] != NO_LABEL) & (said[row] != label)
        return found

    while (foreign := is_foreign(low)).any():
        low = low + foreign
    while (foreign := is_foreign(high - 1)).any():
        high = high - foreign
    return low, high


def _taken(low: Array, high: Array, rows: int) -> tuple[RowRuns, Callable[[Array], Array]]:
    """Runs of the rows low..high of each allocation, one after the other, and what takes these rows from a column."""
    runs = RowRuns.of_lengths(high - low)
    if runs.rows == rows and (low == runs.starts).all():
        return runs, lambda column: column
    places = ragged(low, runs)
    return runs, lambda column: column[places]
