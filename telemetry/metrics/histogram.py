"""Arithmetic intensity of single samples: a * F / (d * B) flop per byte, five bins a decade (paper-constants).

Bin 0 begins at 10 ** DECADES_FROM; bin -1 holds what is below, bin BINS what is above. Samples without activity of
the pipe or of the memory have no place on a logarithmic axis and are left out, as are GPUs without known peaks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.columns import NUMBER, WHOLE, Columns, Rows
from telemetry.metrics.roofline import Placed
from telemetry.metrics.runs import Array
from telemetry.metrics.samples import GpuSamples

DECADES_FROM = -3
PER_DECADE = 5
BINS = 30

KINDS = {"job": WHOLE, "pipe": WHOLE, "bin": WHOLE, "samples": NUMBER}
"""pipe: its place in PIPES."""
_PLACES = BINS + 2


def bin_edges() -> list[float]:
    """Lower edges of bins 0..BINS, flop per byte."""
    return [10 ** (DECADES_FROM + number / PER_DECADE) for number in range(BINS + 1)]


def measure(samples: GpuSamples, placed: Placed | None) -> Columns:
    memory = samples.counter("dram_active_frac")
    if placed is None or memory is None:
        return {}
    jobs, of_run = np.unique(samples.allocations.job[samples.allocation], return_inverse=True)
    run = samples.runs.spread(np.arange(len(of_run)))
    counts = np.zeros((len(jobs), len(PIPES), _PLACES), np.int64)
    for number, pipe in enumerate(PIPES):
        counter = samples.counter(f"{pipe}_active_frac")
        if counter is not None:
            chosen = np.flatnonzero(placed.flags & (counter.values > 0) & (memory.values > 0))
            ridge = samples.allocations.ridges[pipe][samples.allocation][run[chosen]]
            place = _places(counter.values[chosen], memory.values[chosen], ridge)
            counts[:, number] = _counted(of_run[run[chosen]], place, len(jobs))
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


def merge(given: Rows) -> Columns:
    rows, runs = given.by("job", "pipe", "bin")
    return {name: runs.first(rows[name]) for name in ("job", "pipe", "bin")} | rows.merged(runs)


def by_job(rows: Rows) -> pa.Table:
    """Per job the counts of the bins -1 .. BINS, a list for each pipe; null where there are none."""
    jobs, job = np.unique(rows["job"], return_inverse=True)
    counts = np.zeros((len(PIPES), len(jobs), _PLACES), np.int64)
    counts[rows["pipe"], job, rows["bin"] + 1] = rows["samples"]
    offsets: Any = pa.array(np.arange(len(jobs) + 1, dtype=np.int32) * _PLACES)
    columns: dict[str, Any] = {"job": pa.array(jobs)}
    for pipe, of_pipe in zip(PIPES, counts, strict=True):
        nothing: Any = pa.array(of_pipe.sum(axis=1) == 0)
        columns[f"intensity_bins_{pipe}"] = pa.ListArray.from_arrays(offsets, pa.array(of_pipe.ravel()), mask=nothing)
    return pa.table(columns)
