"""Which samples the roofline can place, on which side of the ridge, and for how long.

Each sample that it can place weighs the time to the next one of its GPU. Samples that it cannot place are left out
first, so that the one before them weighs their time too (paper-constants, Class). The last sample of a run weighs
nothing; at the end of an hour or a day its weight waits for the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.columns import NUMBER, WHOLE, Columns, Rows, scattered
from telemetry.metrics.runs import Array, RowRuns, grouped
from telemetry.metrics.samples import GpuSamples

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
    """Of each sample: whether it is placed; by pipe: whether it is right of the ridge, and has no value of the pipe.

    A pipe without any value is not in `compute`, one with all of them not in `unknown`.
    """

    flags: Array
    compute: dict[str, Array]
    unknown: dict[str, Array]


def place(samples: GpuSamples) -> Placed | None:
    """Placed are samples whose fractions are at most 1, whose memory's is known, and with some pipe active.

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
