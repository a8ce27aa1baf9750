"""Per allocation: samples, weighted sums of counters, extremes of activity, and profiling faults."""

from __future__ import annotations

import numpy as np

from telemetry.metrics.catalogue import AVERAGED, PIPES
from telemetry.metrics.columns import HIGHEST, NUMBER, TOTAL, Columns
from telemetry.metrics.hours import HOUR_MS
from telemetry.metrics.runs import Array
from telemetry.metrics.samples import CounterValues, GpuSamples
from telemetry.metrics.weights import Weights

MEANS = tuple(counter.column for counter in AVERAGED)

# PROF counters can read 0 while the GPU is busy, for instance after an Xid 31 (slurm-facts, dcgm-exporter).
BUSY_PCT = 50
_PROFILING = ("sm", "dram", "gr_engine", *PIPES)

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


def measure(samples: GpuSamples, counted_ms: tuple[int, int]) -> Columns:
    """uncounted: samples outside the span counted_ms. missing_*: samples in which the counter is not known.

    extra_weight: sum over all samples of weight - 1 (see `weights`). missing_extra_*: the same over missing samples.
    """
    runs = samples.runs
    found: Columns = {"samples": runs.lengths}
    start_ms = samples.hour.start_ms
    if start_ms < counted_ms[0] or start_ms + HOUR_MS > counted_ms[1]:
        found["uncounted"] = runs.sum((samples.time_ms < counted_ms[0]) | (samples.time_ms >= counted_ms[1]))
    weights = Weights.of(runs, samples.time_ms, samples.allocations.interval_ms[samples.allocation])
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
