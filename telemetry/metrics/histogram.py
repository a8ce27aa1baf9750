"""Arithmetic intensity of single samples: a * F / (d * B) flop per byte, five bins a decade (paper-constants).

Bin 0 begins at LOWEST; bin -1 holds what is below, bin BINS what is above. Samples without activity of the pipe or of
the memory have no place on a logarithmic axis and are left out, as are GPUs without known peaks.
"""

from __future__ import annotations

import numpy as np

from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.columns import NUMBER, WHOLE, Columns, Rows
from telemetry.metrics.roofline import Placed
from telemetry.metrics.runs import Array
from telemetry.metrics.samples import Samples

DECADES_FROM = -3
PER_DECADE = 5
BINS = 30

KINDS = {"job": WHOLE, "pipe": WHOLE, "bin": WHOLE, "samples": NUMBER}
"""pipe: its place in PIPES."""
_PLACES = BINS + 2


def bin_edges() -> list[float]:
    """Lower edges of bins 0..BINS, flop per byte."""
    return [10 ** (DECADES_FROM + number / PER_DECADE) for number in range(BINS + 1)]


def measure(samples: Samples, placed: Placed | None) -> Columns:
    memory = samples.counter("dram_active_frac")
    if placed is None or memory is None:
        return {}
    jobs, of_run = np.unique(samples.claims.job[samples.claim], return_inverse=True)
    counts = np.zeros((len(jobs), len(PIPES), _PLACES), np.int64)
    for number, pipe in enumerate(PIPES):
        counter = samples.counter(f"{pipe}_active_frac")
        if counter is not None:
            counts[:, number] = _count(samples, placed.flags & (memory.values > 0), counter.values, pipe, of_run)
    job, which, place = np.nonzero(counts)
    return {"job": jobs[job], "pipe": which, "bin": place - 1, "samples": counts[job, which, place]}


def _count(samples: Samples, flags: Array, active: Array, pipe: str, of_run: Array) -> Array:
    """Samples of each job and bin."""
    chosen = np.flatnonzero(flags & (active > 0))
    memory = samples.counter("dram_active_frac")
    assert memory is not None
    run = np.searchsorted(samples.runs.starts, chosen, side="right") - 1
    ridge = samples.claims.ridges[pipe][samples.claim][run]
    intensity = active[chosen].astype(np.float64) / memory.values[chosen].astype(np.float64) * ridge
    known = ~np.isnan(intensity)
    place = np.floor(PER_DECADE * (np.log10(intensity[known]) - DECADES_FROM))
    key = of_run[run[known]] * _PLACES + np.clip(place, -1, BINS).astype(np.int64) + 1
    return np.bincount(key, minlength=(of_run.max() + 1) * _PLACES).reshape(-1, _PLACES)


def merge(given: Rows) -> Columns:
    rows, runs = given.by("job", "pipe", "bin")
    return {name: runs.first(rows[name]) for name in ("job", "pipe", "bin")} | rows.merged(runs)
