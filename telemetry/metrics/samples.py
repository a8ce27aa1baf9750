"""The samples of an hour that lie within allocations, GPU by GPU and in time order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from telemetry.metrics.allocation_arrays import NO_LABEL, Allocations
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.hours import HOUR_MS, Hour, MisplacedError
from telemetry.metrics.runs import Array, RowRuns, ragged

_KEPT = {
    "gpu_util_pct",
    "hbm_used_mib",
    "energy_mj",
    "power_w",
    *(f"{name}_active_frac" for name in ("sm", "dram", "gr_engine", *PIPES)),
}


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
        """Raises MisplacedError where the samples are not sorted, not unique, or of another hour."""
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
        """Raises MisplacedError, as Units.of."""
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
        """Whether the GPU of each run is a MIG instance."""
        return self.allocations.is_mig[self.allocation]

    def elapsed_ms(self, time_ms: Array) -> Array:
        """Times, one a run, since the start of its allocation."""
        return time_ms - self.allocations.start_ms[self.allocation]

    def label(self) -> Array | None:
        """The job id that each sample's label names, -1 without one; None where no sample of the hour has one."""
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
        """SM_ACTIVE; where it is unknown, or 0 beside a busy engine, the engine."""
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
