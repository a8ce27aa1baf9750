"""Spatial imbalance of a job in windows of time (perlmutter-telemetry, eq. 4 and 5).

A window with activity counts 1 - sum(a) / (k * max(a)) over its k GPUs with samples. a is the mean of a GPU's samples
in the window: in the paper's sum, lost samples would look like idle time. A window says little about GPUs without
samples. So partials group windows by k, and `finish` leaves out those with too few GPUs.
"""

from __future__ import annotations

import numpy as np

from telemetry.metrics.columns import NUMBER, TOTAL, WHOLE, Columns, Rows
from telemetry.metrics.hours import HOUR_MS
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import GpuSamples
from telemetry.metrics.scrapes import EVEN

KINDS = {"job": WHOLE, "gpus": WHOLE, "windows": NUMBER, "active_windows": NUMBER, "ratio_sum": TOTAL}


def widths_ms(job: Array, interval_ms: Array, width_ms: int) -> Array:
    """The window of each allocation: long enough for a sample of each GPU of its job, and a divisor of the hour.

    interval_ms: the scrape interval of each allocation's GPU. width_ms: the shortest window.
    """
    if not len(job):
        return np.full(0, width_ms)
    longest_ms = np.zeros(job.max() + 1)
    np.fmax.at(longest_ms, job, interval_ms)
    possible = [width_ms, *(width for width in range(2 * width_ms, HOUR_MS + 1, width_ms) if HOUR_MS % width == 0)]
    # A tenth more, because an interval of 60 s is measured as 60.1 s.
    place = np.searchsorted(EVEN * np.array(possible), longest_ms)
    return np.array(possible)[np.minimum(place, len(possible) - 1)][job]


def measure(samples: GpuSamples) -> Columns:
    """Windows of the hour, see KINDS. None crosses the hour, which their length divides."""
    counter = samples.counter("gpu_util_pct")
    if counter is None:
        return {}
    values, time_ms, places, runs = counter.values, samples.time_ms, np.arange(len(samples.allocation)), samples.runs
    if counter.known is not None:
        places, runs = runs.where(counter.known)
        values, time_ms = values[counter.known], time_ms[counter.known]
    allocation = samples.allocation[places]
    window = _windows(time_ms - samples.hour.start_ms, runs, samples.allocations.window_ms[allocation])
    run_of_row = runs.spread(np.arange(len(places)))
    pieces = RowRuns.of(run_of_row, window)
    job = samples.allocations.job[allocation[pieces.first(run_of_row)]]
    return _compared(job, pieces.first(window), pieces.sum(values) / pieces.lengths)


def _windows(into_ms: Array, runs: RowRuns, width_ms: Array) -> Array:
    """The window of each sample, counted from the begin of the hour."""
    widths = np.unique(width_ms)
    by: Array = widths if len(widths) == 1 else runs.spread(width_ms)  # to divide by one number is faster
    return into_ms.astype(np.int32) // by.astype(np.int32)


def _compared(job: Array, window: Array, mean: Array) -> Columns:
    """Windows of jobs, from one row per allocation and window."""
    if len(job):
        # One key, nearly in order already: a stable sort takes a tenth of np.lexsort's time.
        order = np.argsort(job * (window.max() + 1) + window, kind="stable")
        job, window, mean = job[order], window[order], mean[order]
    windows = RowRuns.of(job, window)
    whole, highest, gpus = windows.sum(mean), windows.max(mean), windows.lengths
    active = highest > 0
    found = {
        "job": windows.first(job),
        "gpus": gpus,
        "windows": np.ones(len(gpus), np.int64),
        "active_windows": active.astype(np.int64),
        "ratio_sum": np.divide(whole, highest, out=np.zeros(len(whole)), where=active),
    }
    return merge(Rows(KINDS, [found]))


def merge(given: Rows) -> Columns:
    rows, runs = given.by("job", "gpus")
    return {name: runs.first(rows[name]) for name in ("job", "gpus")} | rows.merged(runs)
