"""Energy from the cumulative counter.

The counter is mJ since the driver was loaded, so energy is the sum of its steps in time order. A fall means that
the driver was loaded again. The reading after it is energy used since (paper-constants, Energy). So the energy is the
last reading less the first, and the readings before each fall.
"""

from __future__ import annotations

import numpy as np

from telemetry.metrics.columns import NUMBER, REAL, WHOLE, Columns, Rows, scattered
from telemetry.metrics.runs import Array, RowRuns, grouped
from telemetry.metrics.samples import GpuSamples

KINDS = {
    "missing_energy_mj": NUMBER,
    "energy_from_ms": WHOLE,
    "energy_until_ms": WHOLE,
    "energy_from_mj": REAL,
    "energy_until_mj": REAL,
    "energy_lost_mj": REAL,
    "energy_resets": WHOLE,
}
"""from, until: of the first and last reading, ms since the start of the allocation."""


def measure(samples: GpuSamples) -> Columns:
    counter = samples.counter("energy_mj")
    if counter is None:
        return {"missing_energy_mj": samples.runs.lengths}
    readings, time_ms, places, runs = counter.values, samples.time_ms, np.arange(len(samples.allocation)), samples.runs
    if counter.known is not None:
        places, runs = runs.where(counter.known)
        readings, time_ms = readings[counter.known], time_ms[counter.known]
    start_ms = samples.allocations.start_ms[samples.allocation[places]]
    falls = _falls(readings, readings, runs)
    found = {
        "energy_from_ms": runs.first(time_ms) - start_ms,
        "energy_until_ms": runs.last(time_ms) - start_ms,
        "energy_from_mj": runs.first(readings),
        "energy_until_mj": runs.last(readings),
        "energy_lost_mj": runs.sum(np.where(falls, readings, 0.0)),
        "energy_resets": runs.sum(falls),
    }
    return {"missing_energy_mj": counter.missing(samples.runs)} | scattered(found, places, len(samples.allocation))


def _falls(first: Array, last: Array, runs: RowRuns) -> Array:
    """Whether the first reading of the next row of the run is below the last one of this row."""
    falls = np.append(first[1:] < last[:-1], False)[: len(first)]
    falls[runs.ends - 1] = False
    return falls


def merge(rows: Rows, all_runs: RowRuns) -> Columns:
    """Rows in runs of the same allocation, in any order of time."""
    number = np.arange(len(all_runs.starts))
    allocation = all_runs.spread(number)
    held = np.flatnonzero(rows["samples"] > rows["missing_energy_mj"])
    order, runs = grouped(allocation[held], rows["energy_from_ms"][held])
    chosen = {name: rows[name][held][order] for name in KINDS}
    falls = _falls(chosen["energy_from_mj"], chosen["energy_until_mj"], runs)
    found = {
        "energy_from_ms": runs.first(chosen["energy_from_ms"]),
        "energy_until_ms": runs.last(chosen["energy_until_ms"]),
        "energy_from_mj": runs.first(chosen["energy_from_mj"]),
        "energy_until_mj": runs.last(chosen["energy_until_mj"]),
        "energy_lost_mj": runs.sum(chosen["energy_lost_mj"] + np.where(falls, chosen["energy_until_mj"], 0.0)),
        "energy_resets": runs.sum(chosen["energy_resets"] + falls),
    }
    return scattered(found, allocation[held][order][runs.starts], len(number))
