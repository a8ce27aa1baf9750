"""Spatial imbalance of a job in windows of time (perlmutter-telemetry, eq. 4 and 5).

A window with activity counts 1 - sum(a) / (k * max(a)) over its k GPUs with samples. a is the mean of a GPU's samples
in the window: in a sum, lost samples would look like idle time. The paper's variant has sums, and divides by the GPUs
seen anywhere in the job. A window says little about GPUs without samples. So partials group windows by k, and `finish`
leaves out those with too few GPUs. Windows that cross the hour stay open: a partial holds each allocation's total.
"""

from __future__ import annotations

import numpy as np

from telemetry.metrics.columns import NUMBER, TOTAL, WHOLE, Columns, Rows
from telemetry.metrics.hours import HOUR_MS
from telemetry.metrics.options import Options
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import GpuSamples
from telemetry.metrics.scrapes import EVEN

MEANS, PAPER = "means", "paper"
CLOSED = {"job": WHOLE, "gpus": WHOLE, "windows": NUMBER, "active_windows": NUMBER, "ratio_sum": TOTAL}
OPEN = {"job": WHOLE, "allocation": WHOLE, "opened_ms": WHOLE, "number": NUMBER, "total": TOTAL}


def widths_ms(job: Array, interval_ms: Array, options: Options) -> Array:
    """The window of each allocation: long enough for a sample of each GPU of its job, and a divisor of the hour.

    interval_ms: the scrape interval of each allocation's GPU.
    """
    width_ms = options.window_ms
    if options.spatial_method == PAPER or not len(job):
        return np.full(len(job), width_ms)
    longest_ms = np.zeros(job.max() + 1)
    np.fmax.at(longest_ms, job, interval_ms)
    possible = [width_ms, *(width for width in range(2 * width_ms, HOUR_MS + 1, width_ms) if HOUR_MS % width == 0)]
    # A tenth more, because an interval of 60 s is measured as 60.1 s.
    place = np.searchsorted(EVEN * np.array(possible), longest_ms)
    return np.array(possible)[np.minimum(place, len(possible) - 1)][job]


def measure(samples: GpuSamples, options: Options) -> tuple[Columns, Columns]:
    """Closed and open windows of the hour, see CLOSED and OPEN."""
    counter = samples.counter(options.imbalance_counter)
    if counter is None:
        return {}, {}
    values, time_ms, places, runs = counter.values, samples.time_ms, np.arange(len(samples.allocation)), samples.runs
    if counter.known is not None:
        places, runs = runs.where(counter.known)
        values, time_ms = values[counter.known], time_ms[counter.known]
    allocation = samples.allocation[places]
    # How far into a window the hour begins.
    width_ms = samples.allocations.window_ms[allocation]
    ahead_ms = (samples.hour.start_ms - samples.allocations.offset_ms[allocation]) % width_ms
    window = _windows(time_ms - samples.hour.start_ms, ahead_ms, runs, width_ms)
    run_of_row = runs.spread(np.arange(len(places)))
    pieces = RowRuns.of(run_of_row, window)
    run = pieces.first(run_of_row)
    opened_ms = pieces.first(window).astype(np.int64) * width_ms[run] - ahead_ms[run]
    rows = {
        "job": samples.allocations.job[allocation[run]],
        "allocation": samples.allocations.number[allocation[run]],
        "opened_ms": opened_ms + samples.hour.start_ms,
        "number": pieces.lengths,
        "total": pieces.sum(values),
    }
    is_closed = (opened_ms >= 0) & (opened_ms + width_ms[run] <= HOUR_MS)
    closed, still = ({name: column[chosen] for name, column in rows.items()} for chosen in (is_closed, ~is_closed))
    return fold(closed, options), still


def _windows(into_ms: Array, ahead_ms: Array, runs: RowRuns, width_ms: Array) -> Array:
    """The window of each sample, counted from the one in which the hour begins."""
    shifted = into_ms.astype(np.int32)
    if ahead_ms.any():
        shifted += runs.spread(ahead_ms.astype(np.int32))
    widths = np.unique(width_ms)
    by: Array = widths if len(widths) == 1 else runs.spread(width_ms)  # to divide by one number is faster
    return shifted // by.astype(np.int32)


def fold(rows: Columns | Rows, options: Options) -> Columns:
    """Windows with all their samples, one row per allocation, as closed windows."""
    job, opened, total = (rows[name] for name in ("job", "opened_ms", "total"))
    if options.spatial_method == MEANS:
        total = total / rows["number"]
    if len(job):
        # One key, nearly in order already: a stable sort takes a tenth of np.lexsort's time.
        first_ms = opened.min()
        order = np.argsort(job * (opened.max() - first_ms + 1) + opened - first_ms, kind="stable")
        job, opened, total = job[order], opened[order], total[order]
    windows = RowRuns.of(job, opened)
    whole, highest, gpus = windows.sum(total), windows.max(total), windows.lengths
    active = highest > 0
    found = {
        "job": windows.first(job),
        "gpus": gpus,
        "windows": np.ones(len(gpus), np.int64),
        "active_windows": active.astype(np.int64),
        "ratio_sum": np.divide(whole, highest, out=np.zeros(len(whole)), where=active),
    }
    return merge_closed(Rows(CLOSED, [found]))


def merge_closed(given: Rows) -> Columns:
    rows, runs = given.by("job", "gpus")
    return {name: runs.first(rows[name]) for name in ("job", "gpus")} | rows.merged(runs)


def merge_open(given: Rows) -> Columns:
    rows, runs = given.by("allocation", "opened_ms")
    keys = {name: runs.first(rows[name]) for name in ("job", "allocation", "opened_ms")}
    return keys | rows.merged(runs)
