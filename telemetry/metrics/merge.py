"""From the partials of all days to one row per GPU and one per job."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import pyarrow as pa

from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.catalogue import GPU_METRICS, JOB_METRICS
from telemetry.metrics.inventory import rows
from telemetry.metrics.partials import PEAK_SPAN
from telemetry.metrics.preallocation import preallocated_sql

# GPU_UTIL means nothing under MIG (slurm-facts, dcgm-exporter).
_NOT_UNDER_MIG = "gpu_util_pct"
# Sums of floating point numbers in a fixed order: results do not depend on the number of threads.
_BY_UNIT = "ORDER BY host, gpu, mig"

OK = "ok"
NO_TELEMETRY = "no telemetry"
LOW_COVERAGE = "low coverage"
IDLE = "idle"


@dataclass(frozen=True)
class Results:
    """Rows of the tables gpu_metrics and job_metrics."""

    gpus: pa.Table
    jobs: pa.Table


def merge(
    db: duckdb.DuckDBPyConnection,
    partials: pa.Table,
    units: pa.Table,
    jobs: pa.Table,
    min_coverage: float,
    min_gpu_util_pct: float,
) -> Results:
    """Metrics of every job of `jobs` (job, job_id, submit_s, start_s, gpu_count, expected, set_aside, attributed_by).

    units: host, gpu, mig, gpu_model, capacity_mib. expected: samples that one GPU of the job should have. set_aside:
    a reason known beforehand, or null.
    """
    for name, table in (("partials", partials), ("units", units), ("jobs", jobs)):
        db.register(name, table)
    limits = {"min_coverage": min_coverage}
    per_gpu = rows(db, _per_gpu_sql(), limits)
    db.register("per_gpu", per_gpu)
    per_job = rows(db, _per_job_sql(), {**limits, "min_gpu_util_pct": min_gpu_util_pct})
    for name in ("partials", "units", "jobs", "per_gpu"):
        db.unregister(name)
    return Results(
        per_gpu.select(GPU_METRICS.names).cast(GPU_METRICS), per_job.select(JOB_METRICS.names).cast(JOB_METRICS)
    )


def _per_gpu_sql() -> str:
    sums = ", ".join(f"sum(sum_{c}) AS sum_{c}, sum(n_{c}) AS n_{c}" for c in COUNTER_COLUMNS)
    means = ", ".join(f"CASE WHEN {_is_covered(c)} THEN {_raw_mean(c)} END AS mean_{c}" for c in COUNTER_COLUMNS)
    raw = ", ".join(f"{_raw_mean(c)} AS raw_{c}, n_{c}" for c in COUNTER_COLUMNS)
    preallocated = preallocated_sql("s.steady_samples", "s.steady_low_mib", "s.hbm_peak_mib", "u.capacity_mib")
    return f"""
WITH s AS (
  SELECT job, host, gpu, mig, sum(samples) AS samples, {sums}, max(hbm_peak_mib) AS hbm_peak_mib,
         max(hbm_peak_key) AS peak_key, sum(steady_samples) AS steady_samples, min(steady_low_mib) AS steady_low_mib
  FROM partials GROUP BY job, host, gpu, mig)
SELECT s.job, j.job_id, j.submit_s, s.host, s.gpu, s.mig, s.samples, j.expected AS expected_samples,
       least(1.0, s.samples / j.expected) AS coverage_frac, u.gpu_model, u.capacity_mib AS hbm_capacity_mib,
       s.hbm_peak_mib, s.hbm_peak_mib / u.capacity_mib AS hbm_peak_frac,
       j.start_s * 1000 + ({PEAK_SPAN - 1} - s.peak_key % {PEAK_SPAN}) AS hbm_peak_ms,
       {preallocated} AS is_preallocated, {means}, {raw}
FROM s JOIN jobs j USING (job) LEFT JOIN units u USING (host, gpu, mig)
ORDER BY s.job, s.host, s.gpu, s.mig"""


def _raw_mean(column: str) -> str:
    mean = f"s.sum_{column} / nullif(s.n_{column}, 0)"
    return f"CASE WHEN s.mig = '' THEN {mean} END" if column == _NOT_UNDER_MIG else mean


def _is_covered(column: str) -> str:
    return f"s.n_{column} >= $min_coverage * j.expected"


def _per_job_sql() -> str:
    """A job's mean is the mean over its GPUs of each GPU's mean (perlmutter-telemetry, eq. 8)."""
    order = "ORDER BY hbm_peak_mib DESC NULLS LAST, host, gpu, mig"
    averages = ", ".join(f"avg(raw_{c} {_BY_UNIT}) AS avg_{c}, sum(n_{c}) AS n_{c}" for c in COUNTER_COLUMNS)
    means = ", ".join(
        f"CASE WHEN n_{c} >= $min_coverage * expected_samples THEN avg_{c} END AS mean_{c}" for c in COUNTER_COLUMNS
    )
    return f"""
WITH g AS (
  SELECT job, count(*) AS gpus_seen, sum(samples) AS samples, max(hbm_peak_mib) AS hbm_max_mib,
         max(hbm_peak_frac) AS peak_frac, bool_or(is_preallocated) AS is_preallocated,
         first(gpu_model {order}) AS gpu_model, first(hbm_capacity_mib {order}) AS hbm_capacity_mib,
         min(hbm_peak_ms) FILTER (WHERE hbm_peak_mib = top_mib) AS hbm_peak_ms, {averages}
  FROM (SELECT *, max(hbm_peak_mib) OVER (PARTITION BY job) AS top_mib FROM per_gpu) GROUP BY job),
measured AS (
  SELECT j.*, coalesce(g.gpus_seen, 0) AS gpus_seen, coalesce(g.samples, 0) AS samples,
         j.expected * greatest(j.gpu_count, coalesce(g.gpus_seen, 0)) AS expected_samples,
         g.* EXCLUDE (gpus_seen, samples, job)
  FROM jobs j LEFT JOIN g USING (job)),
averaged AS (
  SELECT *, coalesce(least(1.0, samples / expected_samples), 0.0) AS coverage_frac, {means} FROM measured),
judged AS (
  SELECT *, CASE WHEN set_aside IS NOT NULL THEN set_aside
                 WHEN samples = 0 THEN '{NO_TELEMETRY}'
                 WHEN coverage_frac < $min_coverage THEN '{LOW_COVERAGE}'
                 WHEN coalesce(mean_gpu_util_pct, 100 * mean_gr_engine_active_frac) < $min_gpu_util_pct THEN '{IDLE}'
                 ELSE '{OK}' END AS verdict
  FROM averaged)
SELECT * EXCLUDE (hbm_peak_ms),
       CASE WHEN verdict = '{OK}' AND n_hbm_used_mib >= $min_coverage * expected_samples THEN hbm_max_mib END
         AS hbm_peak_mib,
       CASE WHEN hbm_peak_mib IS NOT NULL THEN peak_frac END AS hbm_peak_frac, hbm_peak_ms
FROM judged ORDER BY job"""
