"""Use of the GPUs: per allocation counters, faults, and memory; per job the imbalance between its GPUs.

Spatial imbalance is measured in windows of time (Cankur et al., eq. 4 and 5). A window with activity counts
1 - sum(a) / (k * max(a)) over its k GPUs with samples. a is the mean of a GPU's samples in the window: in the paper's
sum, lost samples would look like idle time. A window says little about GPUs without samples. So partials group windows
by k, and the engine leaves out those with too few GPUs.

A sample's weight is the time that it stands for, in scrape intervals of its GPU: the time to the next sample, but at
most twice the longer of the two neighboring distances. So a gap has little weight. The last sample weighs as much as
the one before it. A weight within a tenth of 1 is 1. So most samples weigh 1, and only the others cost time. Each hour
of an allocation is weighed separately, so that files can be cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telemetry.counters import AVERAGED, PIPES
from telemetry.metrics.arrays import HIGHEST, HOUR_MS, LOWEST, NUMBER, REAL, TOTAL, WHOLE, Array, Columns, RowRuns, Rows
from telemetry.metrics.samples import CounterValues, GpuSamples
from telemetry.metrics.scrapes import EVEN, gaps_ms

MEANS = tuple(counter.column for counter in AVERAGED)

# PROF counters can read 0 while the GPU is busy, for instance after an Xid 31 (slurm-facts, dcgm-exporter).
BUSY_PCT = 50
_PROFILING = ("sm", "dram", "gr_engine", *PIPES)

_LONGEST_GAPS = 2


@dataclass(frozen=True)
class SampleWeights:
    """Weights of the samples that do not weigh 1.

    rows: these samples, in order; run: the run of each; extra: the weight of each minus 1.
    """

    rows: Array
    run: Array
    extra: Array

    @classmethod
    def of_samples(cls, samples: GpuSamples) -> SampleWeights:
        return cls.of(samples.runs, samples.time_ms, samples.allocations.interval_ms[samples.allocation])

    @classmethod
    def of(cls, runs: RowRuns, time_ms: Array, interval_ms: Array) -> SampleWeights:
        """Weights of the samples of each run. interval_ms: the scrape interval of its GPU; NaN if unknown."""
        gap = gaps_ms(runs, time_ms)
        differs = (gap > runs.spread(EVEN * interval_ms)) | (gap < runs.spread(interval_ms / EVEN))
        rows = np.flatnonzero(differs & (gap > 0))
        run = np.searchsorted(runs.starts, rows, side="right") - 1
        return cls(rows, run, _bounded_ms(runs, run, gap, rows) / interval_ms[run] - 1)

    def added(self, values: Array | float, number: int) -> Array:
        """The sums of extra * values in each of `number` runs. values: of the samples in `rows`."""
        found: Array = np.bincount(self.run, self.extra * values, number)
        return found

    def total(self, counter: CounterValues, runs: RowRuns) -> Array:
        """The weighted sum of each run."""
        plain = counter.total(runs)
        if not len(self.rows):
            return plain
        values = counter.values[self.rows]
        if counter.known is not None:
            values = np.where(counter.known[self.rows], values, 0)
        return plain + self.added(values, len(runs.starts))


def _bounded_ms(runs: RowRuns, run: Array, gap: Array, rows: Array) -> Array:
    """The time that these samples stand for."""
    first, last = runs.starts[run], runs.ends[run] - 1
    rows = np.minimum(rows, last - 1)
    before = np.where(rows > first, gap[rows - 1], 0)
    after = np.where(rows + 1 < last, gap[np.minimum(rows + 1, len(gap) - 1)], 0)
    beside = np.maximum(before, after)
    found: Array = np.where(beside > 0, np.minimum(gap[rows], _LONGEST_GAPS * beside), gap[rows])
    return found


KINDS = {
    "samples": NUMBER,
    "uncounted": NUMBER,
    **{f"sum_{name}": TOTAL for name in MEANS},
    **{f"missing_{name}": NUMBER for name in MEANS},
    "extra_weight": TOTAL,
    **{f"missing_extra_{name}": TOTAL for name in MEANS},
    "max_activity": HIGHEST,
    "max_temp_c": HIGHEST,
    "busy_samples": NUMBER,
    "fault_samples": NUMBER,
}


def measure(samples: GpuSamples, weights: SampleWeights, counted_ms: tuple[int, int]) -> Columns:
    """Return sums and counts of the samples of each run.

    uncounted: samples outside the span counted_ms. missing_*: samples in which the counter is not known. extra_weight:
    sum over all samples of weight - 1 (see `weights`). missing_extra_*: the same over missing samples.
    """
    runs = samples.runs
    found: Columns = {"samples": runs.lengths}
    start_ms = samples.hour.start_ms
    if start_ms < counted_ms[0] or start_ms + HOUR_MS > counted_ms[1]:
        found["uncounted"] = runs.sum((samples.time_ms < counted_ms[0]) | (samples.time_ms >= counted_ms[1]))
    extra = weights.added(1.0, len(runs.starts)) if len(weights.rows) else None
    if extra is not None:
        found["extra_weight"] = extra
    for name in MEANS:
        counter = samples.counter(name)
        found[f"missing_{name}"] = runs.lengths if counter is None else counter.missing(runs)
        if counter is not None:
            found[f"sum_{name}"] = weights.total(counter, runs)
        if extra is not None and counter is None:
            found[f"missing_extra_{name}"] = extra
        elif extra is not None and counter is not None and counter.known is not None:
            found[f"missing_extra_{name}"] = weights.added(~counter.known[weights.rows], len(runs.starts))
    for column, name in (("max_activity", "gpu_util_pct"), ("max_temp_c", "temp_c")):
        extreme = samples.counter(name)
        if extreme is not None:
            found[column] = runs.max(extreme.values)
    return found | _faults(samples)


def _faults(samples: GpuSamples) -> Columns:
    """Samples in which the GPU is busy, and among them those in which every profiling counter reads 0."""
    use = samples.counter("gpu_util_pct")
    if use is None:
        return {}
    busy = use.values >= BUSY_PCT
    if samples.is_mig.any():
        busy &= ~samples.runs.spread(samples.is_mig)
    found = {"busy_samples": samples.runs.sum(busy)}
    profiling = [samples.counter(f"{name}_active_frac") for name in _PROFILING]
    silent = _silent(busy, [counter for counter in profiling if counter is not None])
    return found | ({"fault_samples": samples.runs.sum(silent)} if silent.any() else {})


def _silent(busy: Array, profiling: list[CounterValues]) -> Array:
    silent, any_known = busy.copy(), np.zeros(len(busy), bool)
    for counter in profiling:
        silent &= ~(counter.values > 0)
        if not silent.any():
            break
        any_known |= True if counter.known is None else counter.known
    return silent & any_known


CLOCKED_KINDS = {f"{name}_{pipe}": TOTAL for pipe in PIPES for name in ("clocked_mhz", "clocked_weight")}
"""clocked_mhz: sum over samples of weight * activity of the pipe * clock; clocked_weight: sum of these weights."""


def measure_clocked(samples: GpuSamples, weights: SampleWeights) -> Columns:
    """Return sums of activity times clock over the samples that have both counters.

    The mean of the products counts, because a pipe can be active when the clock is low.
    """
    clock = samples.counter("sm_clock_mhz")
    if clock is None:
        return {}
    runs, found = samples.runs, Columns()
    for pipe in PIPES:
        active = samples.counter(f"{pipe}_active_frac")
        if active is not None:
            product = active.times(clock)
            known = True if product.known is None else product.known[weights.rows]
            found[f"clocked_mhz_{pipe}"] = weights.total(product, runs)
            extra = weights.added(known, len(runs.starts)) if len(weights.rows) else 0.0
            found[f"clocked_weight_{pipe}"] = runs.lengths - product.missing(runs) + extra
    return found


MEMORY_KINDS = {
    "hbm_peak_mib": HIGHEST,
    "hbm_peak_ms": WHOLE,
    "steady_samples": NUMBER,
    "steady_low_mib": LOWEST,
    "hbm_ms": NUMBER,
    "hbm_sum_mib": TOTAL,
    "hbm_spread": REAL,
    "hbm_slope": REAL,
}
"""hbm_peak_ms: first time of the peak since the start of the allocation. Of the least-squares line of memory over time:
hbm_ms, the sum of times t; hbm_sum_mib, of memory m; hbm_spread, of (t - mean(t)) ** 2; hbm_slope, of
(t - mean(t)) * (m - mean(m)).
"""
_NEVER = 2**62


def measure_memory(samples: GpuSamples, is_full: bool) -> Columns:
    used = samples.counter("hbm_used_mib")
    if used is None:
        return {}
    peak = samples.runs.max(used.values)
    peak_ms = _first(samples.runs, used.values, peak, samples.time_ms)
    peak_ms -= samples.allocations.start_ms[samples.allocation]
    found = {"hbm_peak_mib": peak, "hbm_peak_ms": np.where(np.isnan(peak), 0, peak_ms)}
    return found | _steady(samples, used) | _growth(samples, used) if is_full else found


def _first(runs: RowRuns, values: Array, peak: Array, time_ms: Array) -> Array:
    return runs.min(np.where(values == runs.spread(peak), time_ms, _NEVER))


def _steady(samples: GpuSamples, used: CounterValues) -> Columns:
    runs, allocations = samples.runs, samples.allocations
    after, before = (bound[samples.allocation] for bound in (allocations.steady_from_ms, allocations.steady_until_ms))
    steady = (samples.time_ms >= runs.spread(after)) & (samples.time_ms < runs.spread(before))
    low = np.where(steady, used.values, np.nan)
    return {"steady_samples": runs.sum(~np.isnan(low)), "steady_low_mib": runs.min(low)}


def _growth(samples: GpuSamples, used: CounterValues) -> Columns:
    """From the means of the hour on, so that no digits are lost to the length of the job."""
    runs, number = samples.runs, samples.runs.lengths - used.missing(samples.runs)
    elapsed = samples.time_ms - runs.spread(samples.allocations.start_ms[samples.allocation])
    whole_mib = used.total(runs)
    total_ms = runs.sum(elapsed if used.known is None else elapsed * used.known)
    with np.errstate(invalid="ignore"):
        time = elapsed - runs.spread(total_ms / number)
        memory = used.values - runs.spread(whole_mib / number)
    if used.known is not None:
        time, memory = (np.where(used.known, each, 0) for each in (time, memory))
    memory *= time
    time *= time
    return {
        "hbm_ms": total_ms,
        "hbm_sum_mib": whole_mib,
        "hbm_spread": runs.sum(time),
        "hbm_slope": runs.sum(memory),
    }


def merge_memory(rows: Rows, runs: RowRuns) -> Columns:
    """Rows in runs of the same allocation. See Chan and others (1983), Algorithms for computing the sample variance."""
    peak = runs.max(rows["hbm_peak_mib"])
    number = rows["samples"] - rows["missing_hbm_used_mib"]
    with np.errstate(invalid="ignore"):
        time, memory = (
            np.nan_to_num(rows[name] / number - runs.spread(runs.sum(rows[name]) / runs.sum(number)))
            for name in ("hbm_ms", "hbm_sum_mib")
        )
    peak_ms = _first(runs, rows["hbm_peak_mib"], peak, rows["hbm_peak_ms"])
    return {
        "hbm_peak_ms": np.where(np.isnan(peak), 0, peak_ms),
        "hbm_spread": runs.sum(rows["hbm_spread"] + number * time * time),
        "hbm_slope": runs.sum(rows["hbm_slope"] + number * time * memory),
    }


WINDOW_MS = 60_000
"""Shortest window of spatial imbalance; a divisor of the hour."""
WINDOW_KINDS = {"job": WHOLE, "gpus": WHOLE, "windows": NUMBER, "active_windows": NUMBER, "ratio_sum": TOTAL}


def widths_ms(job: Array, interval_ms: Array) -> Array:
    """The window of each allocation: long enough for a sample of each GPU of its job, and a divisor of the hour.

    interval_ms: the scrape interval of each allocation's GPU.
    """
    if not len(job):
        return np.full(0, WINDOW_MS)
    longest_ms = np.zeros(job.max() + 1)
    np.fmax.at(longest_ms, job, interval_ms)
    possible = [width for width in range(WINDOW_MS, HOUR_MS + 1, WINDOW_MS) if HOUR_MS % width == 0]
    # A tenth more, because an interval of 60 s is measured as 60.1 s.
    place = np.searchsorted(EVEN * np.array(possible), longest_ms)
    return np.array(possible)[np.minimum(place, len(possible) - 1)][job]


def measure_windows(samples: GpuSamples) -> Columns:
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
    return Rows(WINDOW_KINDS, [found]).totals("job", "gpus")
