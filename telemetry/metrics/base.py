"""Per claim: samples, sums of counters, extremes, and what the roofline says of single samples."""

from __future__ import annotations

import pyarrow as pa

from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.family import Column, number, summing_family, total
from telemetry.metrics.options import PIPES, Options

AVERAGED = tuple(c for c in COUNTER_COLUMNS if c not in ("energy_mj", "hbm_total_mib"))
"""Counters whose mean says something: not the cumulative one, not the capacity."""

# A peak and when it was first seen travel as one number: 1/64 MiB, above 36 bits of ms (two years) counted down.
PEAK_STEP = 64
PEAK_SPAN = 2**36

# PROF counters can read 0 while the GPU is busy, for instance after an Xid 31 (slurm-facts, dcgm-exporter).
BUSY_PCT = 50
_PROFILING = ("gr_engine", "sm", "dram", *PIPES)


def is_classified() -> str:
    """SQL: a sample that the roofline can place (paper-constants, Class).

    All its fractions are at most 1, device memory activity is known, and some floating-point pipe was active.
    """
    pipes = ", ".join(f"{pipe}_active_frac" for pipe in PIPES)
    return f"dram_active_frac <= 1 AND greatest({pipes}) > 0 AND greatest({pipes}) <= 1"


def is_compute(pipe: str) -> str:
    """SQL: whether a classified sample is right of the ridge, null where the pipe's counter is missing.

    The intensity a * F / (d * B) exceeds the balance point F / B exactly where a > d: the peaks cancel, so the class
    holds for GPUs that are not in the hardware table too. Without device memory traffic (d = 0) it is compute.
    """
    active = f"{pipe}_active_frac"
    return f"CASE WHEN {active} IS NOT NULL THEN {active} > dram_active_frac OR dram_active_frac = 0 END"


def _columns(options: Options) -> list[Column]:
    return [
        number("samples", "count(*)"),
        number("counted", "count(*) FILTER (WHERE t.time_ms >= getvariable('counted_from_ms')"
               " AND t.time_ms < getvariable('counted_until_ms'))"),
        *(column for counter in AVERAGED for column in _mean(counter)),
        *_activity(options.activity_sql()),
        *_memory(),
        *_faults(),
        *(column for pipe in PIPES for column in _classes(pipe)),
        Column("max_temp_c", pa.float64(), "max(temp_c)::DOUBLE", "max"),
    ]  # fmt: skip


def _mean(counter: str) -> list[Column]:
    return [total(f"sum_{counter}", f"sum({counter}::DOUBLE)"), number(f"n_{counter}", f"count({counter})")]


def _activity(activity: str) -> list[Column]:
    return [
        total("sum_activity", f"sum({activity})"),
        number("n_activity", f"count({activity})"),
        Column("max_activity", pa.float64(), f"max({activity})", "max"),
    ]


def _memory() -> list[Column]:
    steady = "FILTER (WHERE t.time_ms >= c.steady_from_ms AND t.time_ms < c.steady_until_ms)"
    hours = "(CASE WHEN hbm_used_mib IS NOT NULL THEN (t.time_ms - c.start_ms) / 3600000.0 END)"
    key = f"round(hbm_used_mib::DOUBLE * {PEAK_STEP})::BIGINT * {PEAK_SPAN}"
    return [
        Column("hbm_peak_mib", pa.float64(), "max(hbm_used_mib)::DOUBLE", "max"),
        Column("hbm_peak_key", pa.int64(), f"max({key} + ({PEAK_SPAN - 1} - (t.time_ms - c.start_ms)))", "max"),
        number("steady_samples", f"count(hbm_used_mib) {steady}"),
        Column("steady_low_mib", pa.float64(), f"min(hbm_used_mib)::DOUBLE {steady}".replace("::DOUBLE F", " F"), "min"),
        total("sum_h", f"sum{hours}"),
        total("sum_hh", f"sum({hours} * {hours})"),
        total("sum_h_mib", f"sum({hours} * hbm_used_mib::DOUBLE)"),
    ]


def _faults() -> list[Column]:
    idle = "greatest(" + ", ".join(f"{name}_active_frac" for name in _PROFILING) + ") = 0"
    return [
        number("busy_samples", f"count(*) FILTER (WHERE t.mig = '' AND gpu_util_pct >= {BUSY_PCT})"),
        number("fault_samples", f"count(*) FILTER (WHERE t.mig = '' AND gpu_util_pct >= {BUSY_PCT} AND {idle})"),
    ]


def _classes(pipe: str) -> list[Column]:
    placed = is_classified()
    return [
        number(f"n_known_{pipe}", f"count(*) FILTER (WHERE {placed} AND {pipe}_active_frac IS NOT NULL)"),
        number(f"n_compute_{pipe}", f"count(*) FILTER (WHERE {placed} AND ({is_compute(pipe)}))"),
    ]


BASE = summing_family("base", ("claim",), _columns)
