"""Per allocation: the peak of device memory, its growth, and its least use once a reservation must stand."""

from __future__ import annotations

import numpy as np

from telemetry.metrics.columns import HIGHEST, LOWEST, NUMBER, REAL, TOTAL, WHOLE, Columns, Rows
from telemetry.metrics.runs import Array, RowRuns
from telemetry.metrics.samples import CounterValues, GpuSamples

KINDS = {
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


def measure(samples: GpuSamples, is_full: bool) -> Columns:
    used = samples.counter("hbm_used_mib")
    if used is None:
        return {}
    peak = samples.runs.max(used.values)
    peak_ms = samples.elapsed_ms(_first(samples.runs, used.values, peak, samples.time_ms))
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
    known = True if used.known is None else used.known
    total_ms = runs.sum(elapsed * known)
    with np.errstate(invalid="ignore"):
        time = (elapsed - runs.spread(total_ms / number)) * known
        memory = used.values - runs.spread(used.total(runs) / number)
    return {
        "hbm_ms": total_ms,
        "hbm_sum_mib": used.total(runs),
        "hbm_spread": runs.sum(np.where(known, time * time, 0)),
        "hbm_slope": runs.sum(np.where(known, time * memory, 0)),
    }


def merge(rows: Rows, runs: RowRuns) -> Columns:
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
