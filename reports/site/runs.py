"""The ended GPU jobs of a span, in one row each: the temporary table `runs` that all sums of the site report read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import duckdb

from telemetry.characterize.population import PART_OF_A_JOB, RUNS_SQL
from telemetry.metrics.data_quality import IDLE, NOT_SUMMARISED, OK
from telemetry.store.cluster_store import ClusterStore
from telemetry.unasked_gpus import SQL as UNASKED_SQL

_JOBS = (
    "job_id", "submit_s", "user", "account", "partition", "state", "tier", "gpu_count", "gpu_count_req", "gpu_type",
    "gpu_share_count", "node_count", "node_count_req", "start_s", "end_s", "elapsed_s", "name_key", "time_limit_s",
)  # fmt: skip
_METRICS = (
    "job_id", "submit_s", "verdict", "gpu_model", "mig_profile", "gpus_seen", "coverage_frac", "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "temporal_imbalance", "idle_gpus", "energy_j", "hbm_peak_mib", "is_preallocated",
)  # fmt: skip
_GPUS = ("job_id", "submit_s", "is_idle", "energy_j")
# A slice is no GPU of its model: hours and use of both would be mixed.
_TYPE = """CASE WHEN m.mig_profile IS NOT NULL THEN concat_ws(' ', m.gpu_model, m.mig_profile)
              ELSE coalesce(m.gpu_model, j.gpu_type, '') END"""
_RUNS = f"""
CREATE TEMP TABLE runs AS
WITH idle AS (
  SELECT job_id, submit_s, CASE WHEN count(energy_j) = count(*) THEN sum(energy_j) END AS idle_j
  FROM gpu_metrics WHERE is_idle GROUP BY ALL),
base AS (
  SELECT j.job_id, j.submit_s, coalesce(j."user", '') AS "user", coalesce(j.account, '') AS account,
         coalesce(j."partition", '') AS "partition", {_TYPE} AS gpu_type, j.tier,
         j.gpus, {UNASKED_SQL} AS unasked_gpus,
         j.ran_s, j.time_limit_s, j.name_key, j.gpus * j.ran_s / 3600.0 AS gpu_hours,
         coalesce(j.state, '') AS state, m.* EXCLUDE (job_id, submit_s),
         CASE WHEN j.state IN ('REQUEUED', 'RESIZING') THEN '{PART_OF_A_JOB}'
              ELSE coalesce(m.verdict, '{NOT_SUMMARISED}') END AS standing,
         coalesce(m.mean_gpu_util_pct, 100 * m.mean_gr_engine_active_frac) AS util_pct,
         CASE WHEN m.temporal_imbalance IS NOT NULL THEN len(m.idle_gpus) / nullif(m.gpus_seen, 0) END AS idle_share
  {RUNS_SQL} AND j.end_s <= coalesce($ended_by_s, j.end_s)),
measured AS (
  SELECT *, CASE WHEN standing IN ('{OK}', '{IDLE}') AND util_pct IS NOT NULL
                 THEN gpu_hours * coverage_frac END AS measured_h
  FROM base),
parted AS (
  SELECT *, CASE WHEN measured_h IS NOT NULL THEN least(util_pct / 100, 1) END AS util_frac,
         CASE WHEN standing = '{IDLE}' THEN measured_h WHEN measured_h IS NOT NULL THEN 0 END AS idle_job_h,
         CASE WHEN standing = '{OK}' THEN idle_share * measured_h
              WHEN measured_h IS NOT NULL THEN 0 END AS never_used_h
  FROM measured)
SELECT p.* EXCLUDE (gpus_seen, idle_gpus, coverage_frac, idle_share),
       CASE WHEN gpus_seen = gpus AND temporal_imbalance IS NOT NULL THEN len(idle_gpus) END AS idle_gpu_count,
       CASE WHEN standing = '{OK}' THEN greatest(measured_h * (1 - util_frac) - coalesce(never_used_h, 0), 0)
            WHEN measured_h IS NOT NULL THEN 0 END AS no_kernel_h,
       CASE WHEN standing = '{IDLE}' THEN p.energy_j WHEN never_used_h > 0 THEN idle_j
            WHEN never_used_h = 0 THEN 0 END AS wasted_j
FROM parted p LEFT JOIN idle i USING (job_id, submit_s)
"""


@contextlib.contextmanager
def site_runs(
    store: ClusterStore, since_s: int, until_s: int, *, ended_by_s: int | None = None, has_gpu_rows: bool = True
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the view `jobs` and the table `runs` of a span. Raises StoreError.

    runs: the GPU jobs submitted in [since_s, until_s) that have started and ended, by ended_by_s if it is given.
    has_gpu_rows: read each GPU's energy, too. Without it, the energy of GPUs that were never used is not known.
    """
    with store.connect() as db:
        store.view(db, "jobs", _JOBS, since_s, until_s)
        store.view(db, "job_metrics", _METRICS, since_s, until_s)
        store.view(db, "gpu_metrics", _GPUS, since_s, until_s if has_gpu_rows else since_s)
        db.execute(_RUNS, {"ended_by_s": ended_by_s}).fetchall()
        yield db
