"""Per claim: samples, sums of counters, extremes, and what the roofline says of single samples."""

from __future__ import annotations

import pyarrow as pa

from telemetry.metrics.catalogue import AVERAGED, PIPES
from telemetry.metrics.family import Column, joined, number, summing_family, total
from telemetry.metrics.options import Options
from telemetry.metrics.samples import Known

# A peak and when it was first seen travel as one number: 1/64 MiB, above 36 bits of ms (two years) counted down.
STEPS_PER_MIB = 64
PEAK_SPAN = 2**36

_PEAK_KEY = f"hbm_steps * {PEAK_SPAN} + ({PEAK_SPAN - 1} - elapsed_ms)"
_COUNTED = "time_ms >= getvariable('counted_from_ms') AND time_ms < getvariable('counted_until_ms')"

# PROF counters can read 0 while the GPU is busy, for instance after an Xid 31 (slurm-facts, dcgm-exporter).
BUSY_PCT = 50
_PROFILING = ("sm", "dram", "gr_engine", *PIPES)


def is_placed(known: Known) -> str:
    """SQL: whether the roofline can place a sample (paper-constants, Class).

    All its fractions are at most 1, the activity of device memory is known, and some floating-point pipe was active.
    """
    names = [f"{pipe}_active_frac" for pipe in PIPES if f"{pipe}_active_frac" not in known.absent]
    if not names or "dram_active_frac" in known.absent:
        return "false"
    active = " OR ".join(f"{name} > 0" for name in names)
    if known.fractions.issuperset([*names, "dram_active_frac"]):
        return f"({active})"
    beyond = " OR ".join(f"{name} > 1" for name in names)
    return f"(dram_active_frac <= 1 AND ({active}) AND ({beyond}) IS NOT TRUE)"


def is_compute(pipe: str, known: Known) -> str:
    """SQL: whether a placed sample is right of the ridge, null where the pipe's counter is missing.

    The intensity a * F / (d * B) exceeds the balance point F / B exactly where a > d: the peaks cancel, so the class
    holds for GPUs that are not in the hardware table too. Without device memory traffic (d = 0) it is compute.
    """
    active = f"{pipe}_active_frac"
    if active in known.absent:
        return "NULL::BOOLEAN"
    right = f"{active} > dram_active_frac OR dram_active_frac = 0"
    return f"({right})" if active in known.complete else f"CASE WHEN {active} IS NOT NULL THEN {right} END"


def _samples(options: Options, known: Known) -> str:
    """Samples within claims, with what several columns need."""
    placed = is_placed(known)
    compute = ", ".join(f"{placed} AND {is_compute(pipe, known)} AS is_compute_{pipe}" for pipe in PIPES)
    whole = "" if known.is_whole else "t.mig = '' AND "
    busy = f"{whole}t.gpu_util_pct >= {BUSY_PCT}"
    has_hbm = "" if "hbm_used_mib" in known.complete else " AND hbm_used_mib IS NOT NULL"
    return f"""
SELECT c.claim, t.*, t.time_ms - c.start_ms AS elapsed_ms,
       t.time_ms >= c.steady_from_ms AND t.time_ms < c.steady_until_ms{has_hbm} AS is_steady,
       {options.activity_sql(known)} AS activity,
       round(hbm_used_mib::DOUBLE * {STEPS_PER_MIB})::BIGINT AS hbm_steps,
       CASE WHEN hbm_used_mib IS NOT NULL THEN t.time_ms - c.start_ms END AS hbm_ms,
       {placed} AS is_placed, {compute}, {busy} AS is_busy, {_is_fault(busy, known)} AS is_fault
FROM {joined(known)}"""


def _is_fault(busy: str, known: Known) -> str:
    """SQL: whether every profiling counter reads 0 in a busy sample. Most samples are told by the first two."""
    names = [name for name in (f"{part}_active_frac" for part in _PROFILING) if name not in known.absent]
    if not names:
        return "false"
    likely = " AND ".join(f"coalesce({name}, 0) = 0" for name in names[:2])
    silent = " AND ".join(f"coalesce({name}, 0) = 0" for name in names[2:]) or "true"
    return f"CASE WHEN {likely} THEN {busy} AND {silent} AND coalesce({', '.join(names)}) IS NOT NULL END"


def _mean(counter: str, known: Known) -> list[Column]:
    return [total(f"sum_{counter}", known.total(counter)), number(f"n_{counter}", known.count(counter))]


def _classes(pipe: str, known: Known) -> list[Column]:
    has_counter = "" if f"{pipe}_active_frac" in known.complete else f" AND {pipe}_active_frac IS NOT NULL"
    return [
        number(f"n_known_{pipe}", f"count(*) FILTER (WHERE is_placed{has_counter})"),
        number(f"n_compute_{pipe}", f"count(*) FILTER (WHERE is_compute_{pipe})"),
    ]


def _growth(time: str) -> list[Column]:
    """Sums of a least-squares line of memory (1/64 MiB) over time (ms): whole numbers, so that no digit is lost."""
    exact = pa.decimal128(38, 0)
    return [
        total("sum_t", f"sum({time})", exact),
        total("sum_tt", f"sum({time} * {time})", exact),
        total("sum_m", "sum(hbm_steps)", exact),
        total("sum_tm", "sum(elapsed_ms * hbm_steps)", exact),
    ]


def _columns(known: Known) -> list[Column]:
    return [
        number("samples", "count(*)"),
        number("counted", f"count(*) FILTER (WHERE {_COUNTED})"),
        *(column for counter in AVERAGED for column in _mean(counter.column, known)),
        total("sum_activity", "sum(activity)"),
        number("n_activity", "count(activity)"),
        Column("max_activity", pa.float64(), "max(activity)", "max"),
        Column("hbm_peak_mib", pa.float64(), "max(hbm_used_mib)", "max"),
        Column("hbm_peak_key", pa.int64(), f"max({_PEAK_KEY})", "max"),
        number("steady_samples", "count(*) FILTER (WHERE is_steady)"),
        Column("steady_low_mib", pa.float64(), "min(CASE WHEN is_steady THEN hbm_used_mib END)", "min"),
        *_growth("elapsed_ms" if "hbm_used_mib" in known.complete else "hbm_ms"),
        number("busy_samples", "count(*) FILTER (WHERE is_busy)"),
        number("fault_samples", "count(*) FILTER (WHERE is_fault)"),
        *(column for pipe in PIPES for column in _classes(pipe, known)),
        Column("max_temp_c", pa.float64(), "max(temp_c)", "max"),
    ]


BASE = summing_family("base", "claim", _columns, _samples)
