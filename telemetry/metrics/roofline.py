"""Place samples on the roofline: on each side of the ridge, for how long, and at which arithmetic intensity.

Each sample that it can place weighs the time to the next one of its GPU. Samples that it cannot place are left out
first, so that the one before them weighs their time too (docs/formulas.md, Roofline). The last sample of a run weighs
nothing; at the end of an hour or a day its weight waits for the merge.

The intensity of a sample is a * F / (d * B) flop per byte, in bins of five a decade. Bin 0 begins at
10 ** DECADES_FROM; bin -1 holds what is below, bin BINS what is above. Samples without activity of the pipe or of the
memory have no place on a logarithmic axis and are left out, as are GPUs without known peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from telemetry.counters import PIPES
from telemetry.metrics.arrays import NUMBER, WHOLE, Array, Columns, RowRuns, Rows, grouped, scattered
from telemetry.metrics.samples import GpuSamples

PIPE_USED_FRAC = 0.005
"""Mean activity above which a floating-point pipe counts as used (Cankur et al., IV-B)."""

KINDS = {
    "placed": NUMBER,
    **{f"{name}_{pipe}": NUMBER for pipe in PIPES for name in ("compute", "unknown")},
    "placed_from_ms": WHOLE,
    "placed_until_ms": WHOLE,
    **{f"{name}_{pipe}": WHOLE for pipe in PIPES for name in ("compute_ms", "unknown_ms", "last")},
}
"""placed, compute, unknown: samples placed, right of the ridge, and placed without the pipe's counter; _ms: their time.

from, until: of the first and last placed sample, ms since the start of the allocation. last: the last placed sample,
whose weight is unknown yet: 1 right of the ridge, -1 without the pipe's counter, 0 else.
"""


@dataclass(frozen=True)
class Placed:
    """Places of samples on the roofline.

    flags: whether a sample is placed. compute: by pipe, whether it is right of the ridge; a pipe without any value is
    left out. unknown: by pipe, whether it has no value of the pipe; a pipe with all values is left out.
    """

    flags: Array
    compute: dict[str, Array]
    unknown: dict[str, Array]


def place(samples: GpuSamples) -> Placed | None:
    """Place samples whose fractions are at most 1, whose memory's is known, and with some pipe active.

    The intensity a * F / (d * B) exceeds the balance point F / B exactly where a > d: the peaks cancel, so the class
    holds for GPUs that are not in the hardware table too. Without device memory traffic (d = 0) it is compute.
    """
    memory = samples.counter("dram_active_frac")
    counters = {pipe: samples.counter(f"{pipe}_active_frac") for pipe in PIPES}
    pipes = {pipe: counter for pipe, counter in counters.items() if counter is not None}
    if memory is None or not pipes:
        return None
    is_active, is_possible, still = np.zeros(samples.runs.rows, bool), memory.values <= 1, memory.values == 0
    for counter in pipes.values():
        is_active |= counter.values > 0
        is_possible &= ~(counter.values > 1)
    flags = is_active & is_possible
    compute = {pipe: flags & ((counter.values > memory.values) | still) for pipe, counter in pipes.items()}
    unknown = {pipe: flags for pipe in PIPES if pipe not in pipes}
    for pipe, counter in pipes.items():
        if counter.known is not None:
            compute[pipe] &= counter.known
            unknown[pipe] = flags & ~counter.known
    return Placed(flags, compute, unknown)


def measure(samples: GpuSamples, placed: Placed | None, is_full: bool) -> Columns:
    if placed is None:
        return {}
    runs = samples.runs
    found = {"placed": runs.sum(placed.flags)}
    for name, flags in (("compute", placed.compute), ("unknown", placed.unknown)):
        found |= {f"{name}_{pipe}": runs.sum(flag) for pipe, flag in flags.items()}
    return found | _weights(samples, placed) if is_full else found


def _weights(samples: GpuSamples, placed: Placed) -> Columns:
    """Weights of the placed samples, and what the last one of each run is."""
    places, runs = samples.runs.where(placed.flags)
    time_ms = samples.time_ms[placed.flags]
    weight = np.diff(time_ms, append=0)
    weight[runs.ends - 1] = 0
    start_ms = samples.allocations.start_ms[samples.allocation[places]]
    found = {"placed_from_ms": runs.first(time_ms) - start_ms, "placed_until_ms": runs.last(time_ms) - start_ms}
    for pipe in PIPES:
        last = np.zeros(len(places), np.int64)
        for name, flags, sign in (("compute", placed.compute, 1), ("unknown", placed.unknown, -1)):
            if pipe in flags:
                held = flags[pipe][placed.flags]
                found[f"{name}_ms_{pipe}"] = runs.sum(weight * held)
                last += sign * runs.last(held)
        found[f"last_{pipe}"] = last
    return scattered(found, places, len(samples.allocation))


def merge(rows: Rows, all_runs: RowRuns) -> Columns:
    """Rows in runs of the same allocation, in any order of time: a last sample weighs the time to the next row."""
    number = np.arange(len(all_runs.starts))
    allocation = all_runs.spread(number)
    held = np.flatnonzero(rows["placed"])
    order, runs = grouped(allocation[held], rows["placed_from_ms"][held])
    chosen = {name: rows[name][held][order] for name in KINDS}
    carried = np.append(chosen["placed_from_ms"][1:] - chosen["placed_until_ms"][:-1], 0)[: len(order)]
    carried[runs.ends - 1] = 0
    found = {
        "placed_from_ms": runs.first(chosen["placed_from_ms"]),
        "placed_until_ms": runs.last(chosen["placed_until_ms"]),
    }
    for pipe in PIPES:
        last = chosen[f"last_{pipe}"]
        found[f"compute_ms_{pipe}"] = runs.sum(chosen[f"compute_ms_{pipe}"] + carried * (last == 1))
        found[f"unknown_ms_{pipe}"] = runs.sum(chosen[f"unknown_ms_{pipe}"] + carried * (last == -1))
        found[f"last_{pipe}"] = runs.last(last)
    return scattered(found, allocation[held][order][runs.starts], len(number))


DECADES_FROM = -3
PER_DECADE = 5
BINS = 30

HISTOGRAM_KINDS = {"job": WHOLE, "pipe": WHOLE, "bin": WHOLE, "samples": NUMBER}
"""pipe: its place in PIPES."""
_PLACES = BINS + 2


def bin_edges() -> list[float]:
    """Lower edges of bins 0..BINS, flop per byte."""
    return [10 ** (DECADES_FROM + number / PER_DECADE) for number in range(BINS + 1)]


def measure_histogram(samples: GpuSamples, placed: Placed | None) -> Columns:
    memory = samples.counter("dram_active_frac")
    if placed is None or memory is None:
        return {}
    jobs, of_run = np.unique(samples.allocations.job[samples.allocation], return_inverse=True)
    run = samples.runs.spread(np.arange(len(of_run)))
    counts = np.zeros((len(jobs), len(PIPES), _PLACES), np.int64)
    possible = placed.flags & (memory.values > 0)
    for number, pipe in enumerate(PIPES):
        counter = samples.counter(f"{pipe}_active_frac")
        if counter is not None:
            chosen = np.flatnonzero(possible & (counter.values > 0))
            held = run[chosen]
            ridge = samples.allocations.ridges[pipe][samples.allocation][held]
            place = _places(counter.values[chosen], memory.values[chosen], ridge)
            counts[:, number] = _counted(of_run[held], place, len(jobs))
    job, which, place = np.nonzero(counts)
    return {"job": jobs[job], "pipe": which, "bin": place - 1, "samples": counts[job, which, place]}


def _places(active: Array, memory: Array, ridge: Array) -> Array:
    """Bins of samples as numbers; NaN where the ridge is not known."""
    intensity = active.astype(np.float64) / memory.astype(np.float64) * ridge
    place: Array = np.clip(np.floor(PER_DECADE * (np.log10(intensity) - DECADES_FROM)), -1, BINS)
    return place


def _counted(job: Array, place: Array, jobs: int) -> Array:
    """Samples of each job and bin."""
    known = ~np.isnan(place)
    key = job[known] * _PLACES + place[known].astype(np.int64) + 1
    return np.bincount(key, minlength=jobs * _PLACES).reshape(jobs, _PLACES)


def by_job(rows: Rows) -> pa.Table:
    """Return each job's counts of the bins -1 .. BINS, a list for each pipe; null if there are none."""
    jobs, job = np.unique(rows["job"], return_inverse=True)
    counts = np.zeros((len(PIPES), len(jobs), _PLACES), np.int64)
    counts[rows["pipe"], job, rows["bin"] + 1] = rows["samples"]
    offsets: Any = pa.array(np.arange(len(jobs) + 1, dtype=np.int32) * _PLACES)
    columns: dict[str, Any] = {"job": pa.array(jobs)}
    for pipe, of_pipe in zip(PIPES, counts, strict=True):
        nothing: Any = pa.array(of_pipe.sum(axis=1) == 0)
        columns[f"intensity_bins_{pipe}"] = pa.ListArray.from_arrays(offsets, pa.array(of_pipe.ravel()), mask=nothing)
    return pa.table(columns)
