"""Per claim: samples, sums of counters, extremes, and what the roofline says of single samples."""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.catalogue import AVERAGED, PIPES
from telemetry.metrics.family import JOIN, Column, number, summing_family, total
from telemetry.metrics.options import Options

# A peak and when it was first seen travel as one number: 1/64 MiB, above 36 bits of ms (two years) counted down.
PEAK_STEP = 64
PEAK_SPAN = 2**36

# PROF counters can read 0 while the GPU is busy, for instance after an Xid 31 (slurm-facts, dcgm-exporter).
BUSY_PCT = 50
_PROFILING = ("gr_engine", "sm", "dram", *PIPES)


def is_placed() -> str:
    """SQL: whether the roofline can place a sample (paper-constants, Class).

    All its fractions are at most 1, the activity of device memory is known, and some floating-point pipe was active.
    """
    active = " OR ".join(f"{pipe}_active_frac > 0" for pipe in PIPES)
    beyond = " OR ".join(f"{pipe}_active_frac > 1" for pipe in PIPES)
    return f"(dram_active_frac <= 1 AND ({active}) AND ({beyond}) IS NOT TRUE)"


def is_compute(pipe: str) -> str:
    """SQL: whether a placed sample is right of the ridge, null where the pipe's counter is missing.

    The intensity a * F / (d * B) exceeds the balance point F / B exactly where a > d: the peaks cancel, so the class
    holds for GPUs that are not in the hardware table too. Without device memory traffic (d = 0) it is compute.
    """
    active = f"{pipe}_active_frac"
    return f"CASE WHEN {active} IS NOT NULL THEN {active} > dram_active_frac OR dram_active_frac = 0 END"


def _samples(options: Options) -> str:
    """Samples within claims, with what several columns need."""
    compute = ", ".join(f"{is_compute(pipe)} AS is_compute_{pipe}" for pipe in PIPES)
    profiling = [f"{name}_active_frac" for name in _PROFILING]
    return f"""
SELECT c.claim, t.*, t.time_ms - c.start_ms AS elapsed_ms,
       t.time_ms >= c.steady_from_ms AND t.time_ms < c.steady_until_ms AS is_steady,
       {options.activity_sql()} AS activity,
       CASE WHEN hbm_used_mib IS NOT NULL THEN (t.time_ms - c.start_ms) / 3600000.0::DOUBLE END AS hours,
       {is_placed()} AS is_placed, {compute},
       t.mig = '' AND t.gpu_util_pct >= {BUSY_PCT} AS is_busy,
       ({" OR ".join(f"{name} > 0" for name in profiling)}) IS NOT TRUE
         AND coalesce({", ".join(profiling)}) IS NOT NULL AS is_silent
FROM {JOIN}"""


def _mean(counter: str) -> list[Column]:
    return [total(f"sum_{counter}", f"sum({counter}::DOUBLE)"), number(f"n_{counter}", f"count({counter})")]


def _classes(pipe: str) -> list[Column]:
    return [
        number(f"n_known_{pipe}", f"count(is_compute_{pipe}) FILTER (is_placed)"),
        number(f"n_compute_{pipe}", f"count(*) FILTER (is_placed AND is_compute_{pipe})"),
    ]


_COUNTED = "time_ms >= getvariable('counted_from_ms') AND time_ms < getvariable('counted_until_ms')"
_PEAK_KEY = f"round(hbm_used_mib::DOUBLE * {PEAK_STEP})::BIGINT * {PEAK_SPAN} + ({PEAK_SPAN - 1} - elapsed_ms)"

_COLUMNS = [
    number("samples", "count(*)"),
    number("counted", f"count(*) FILTER ({_COUNTED})"),
    *(column for counter in AVERAGED for column in _mean(counter.column)),
    total("sum_activity", "sum(activity)"),
    number("n_activity", "count(activity)"),
    Column("max_activity", pa.float64(), "max(activity)", "max"),
    Column("hbm_peak_mib", pa.float64(), "max(hbm_used_mib)", "max"),
    Column("hbm_peak_key", pa.int64(), f"max({_PEAK_KEY})", "max"),
    number("steady_samples", "count(hbm_used_mib) FILTER (is_steady)"),
    Column("steady_low_mib", pa.float64(), "min(hbm_used_mib) FILTER (is_steady)", "min"),
    total("sum_h", "sum(hours)"),
    total("sum_hh", "sum(hours * hours)"),
    total("sum_h_mib", "sum(hours * hbm_used_mib::DOUBLE)"),
    number("busy_samples", "count(*) FILTER (is_busy)"),
    number("fault_samples", "count(*) FILTER (is_busy AND is_silent)"),
    *(column for pipe in PIPES for column in _classes(pipe)),
    Column("max_temp_c", pa.float64(), "max(temp_c)", "max"),
]

BASE = summing_family("base", "claim", _COLUMNS, _samples)
