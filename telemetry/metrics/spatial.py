"""Spatial imbalance of a job in windows of time (perlmutter-telemetry, eq. 4 and 5).

1 - sum(TC) / (g * max(TC)) needs g, the number of GPUs seen anywhere in the job, which is known at the end only. So a
partial holds, over windows with activity, the sum of sum(TC) / max(TC), with the number of windows. Windows that
cross the hour stay open: a partial holds TC of each allocation.
"""

from __future__ import annotations

import numpy as np

from telemetry.metrics.base import activity
from telemetry.metrics.columns import NUMBER, TOTAL, WHOLE, Columns, Rows
from telemetry.metrics.hours import HOUR_MS
from telemetry.metrics.options import Options
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import GpuSamples

CLOSED = {"job": WHOLE, "windows": NUMBER, "active_windows": NUMBER, "ratio_sum": TOTAL}
OPEN = {"job": WHOLE, "allocation": WHOLE, "opened_ms": WHOLE, "total": TOTAL}


def measure(samples: GpuSamples, options: Options) -> tuple[Columns, Columns]:
    """Closed and open windows of the hour, see CLOSED and OPEN."""
    counter = activity(samples, options)
    if counter is None:
        return {}, {}
    values, time_ms, places, runs = counter.values, samples.time_ms, np.arange(len(samples.allocation)), samples.runs
    if counter.known is not None:
        places, runs = runs.where(counter.known)
        values, time_ms = values[counter.known], time_ms[counter.known]
    allocation = samples.allocation[places]
    # How far into a window the hour begins.
    ahead_ms = (samples.hour.start_ms - samples.allocations.offset_ms[allocation]) % options.window_ms
    window = _windows(time_ms - samples.hour.start_ms, ahead_ms, runs, options.window_ms)
    run_of_row = runs.spread(np.arange(len(places)))
    pieces = RowRuns.of(run_of_row, window)
    run = pieces.first(run_of_row)
    opened_ms = pieces.first(window).astype(np.int64) * options.window_ms - ahead_ms[run]
    rows = {
        "job": samples.allocations.job[allocation[run]],
        "allocation": samples.allocations.number[allocation[run]],
        "opened_ms": opened_ms + samples.hour.start_ms,
        "total": pieces.sum(values),
    }
    is_closed = (opened_ms >= 0) & (opened_ms + options.window_ms <= HOUR_MS)
    closed, still = ({name: column[chosen] for name, column in rows.items()} for chosen in (is_closed, ~is_closed))
    return fold(closed), still


def _windows(into_ms: Array, ahead_ms: Array, runs: RowRuns, width_ms: int) -> Array:
    """The window of each sample, counted from the one in which the hour begins."""
    shifted = into_ms.astype(np.int32)
    if ahead_ms.any():
        shifted += runs.spread(ahead_ms.astype(np.int32))
    return shifted // np.int32(width_ms)


def fold(rows: Columns | Rows) -> Columns:
    """Closed windows of TC by job, window and allocation."""
    job, opened, total = (rows[name] for name in ("job", "opened_ms", "total"))
    if len(job):
        # One key, nearly in order already: a stable sort takes a tenth of np.lexsort's time.
        first_ms = opened.min()
        order = np.argsort(job * (opened.max() - first_ms + 1) + opened - first_ms, kind="stable")
        job, opened, total = job[order], opened[order], total[order]
    windows = RowRuns.of(job, opened)
    whole, highest, of_job = windows.sum(total), windows.max(total), windows.first(job)
    jobs = RowRuns.of(of_job)
    active = highest > 0
    ratio = np.divide(whole, highest, out=np.zeros(len(whole)), where=active)
    return {
        "job": jobs.first(of_job),
        "windows": jobs.lengths,
        "active_windows": jobs.sum(active),
        "ratio_sum": jobs.sum(ratio),
    }


def merge_closed(given: Rows) -> Columns:
    rows, runs = given.by("job")
    return {"job": runs.first(rows["job"])} | rows.merged(runs)


def merge_open(given: Rows) -> Columns:
    rows, runs = given.by("allocation", "opened_ms")
    keys = {name: runs.first(rows[name]) for name in ("job", "allocation", "opened_ms")}
    return keys | rows.merged(runs)
