"""The ended GPU jobs of a span, in the temporary table `runs`, and their sums: total, by dimension, and by tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

from advisor.memory.runs import SPIKE_MARGIN
from almanac.config import Config
from slurm.states import ENDED_WELL
from telemetry.characterize.study import PART_OF_A_JOB, RUNS_SQL
from telemetry.characterize.usage import largest_tier_names
from telemetry.history import UNASKED_SQL
from telemetry.metrics.data_quality import IDLE, NOT_SUMMARISED, OK
from telemetry.store.store import ClusterStore

DIMENSIONS = {"partition": "partition", "account": "account", "gpu_type": "GPU type"}
"""Columns of `runs` that totals are broken down by, with their names on the page."""
_SUMS = """
count(*), count(measured_h), sum(gpu_hours), coalesce(sum(measured_h), 0),
sum(util_frac * measured_h) / nullif(sum(measured_h), 0), sum(idle_job_h), sum(never_used_h),
coalesce(sum(measured_h) FILTER (never_used_h IS NOT NULL), 0), sum(no_kernel_h),
sum(energy_j) / 3.6e6, coalesce(sum(gpu_hours) FILTER (energy_j IS NOT NULL), 0), sum(wasted_j) / 3.6e6,
coalesce(sum(idle_job_h + never_used_h) FILTER (wasted_j IS NOT NULL), 0),
sum(mfu_frac * measured_h) / nullif(sum(measured_h) FILTER (mfu_frac IS NOT NULL), 0),
coalesce(sum(measured_h) FILTER (mfu_frac IS NOT NULL), 0)
"""


@dataclass(frozen=True)
class Share:
    """Totals of some of the site's jobs; all hours are GPU-hours. None: not known for any job.

    measured_hours: the part that samples cover, in jobs with data quality ok or idle. All unused hours are parts of it.
    never_used_known_hours: in jobs whose unused GPUs are known. For other jobs, all time without a
    kernel is in no_kernel_hours. energy_hours: in jobs with known energy. wasted_kwh: the energy of wasted_kwh_hours,
    which are part of the idle hours. mfu_frac: weighted by mfu_hours, the measured hours of jobs with an MFU.
    """

    jobs: int
    measured_jobs: int
    hours: float
    measured_hours: float
    util_frac: float | None
    idle_job_hours: float | None
    never_used_hours: float | None
    never_used_known_hours: float
    no_kernel_hours: float | None
    energy_kwh: float | None
    energy_hours: float
    wasted_kwh: float | None
    wasted_kwh_hours: float
    mfu_frac: float | None
    mfu_hours: float

    @property
    def idle_hours(self) -> float | None:
        """GPU-hours of jobs that did nothing, and of GPUs never used in other jobs."""
        if self.idle_job_hours is None or self.never_used_hours is None:
            return None
        return self.idle_job_hours + self.never_used_hours

    @property
    def unused_hours(self) -> float | None:
        """Measured GPU-hours in which no kernel ran, on idle GPUs and on others."""
        if self.idle_job_hours is None or self.no_kernel_hours is None:
            return None
        return self.idle_job_hours + (self.never_used_hours or 0.0) + self.no_kernel_hours


@dataclass(frozen=True)
class Standing:
    """The jobs of one data quality. name: the quality, or why the jobs have none."""

    name: str
    jobs: int
    hours: float


@dataclass(frozen=True)
class LargeUser:
    """A user's jobs that asked for the largest tier. fit: those whose peak fits in the next smaller tier."""

    user: str
    asked_jobs: int
    asked_hours: float
    known_jobs: int
    fit_jobs: int
    fit_hours: float
    median_peak_mib: float | None
    highest_peak_mib: float | None


@dataclass(frozen=True)
class LargestTier:
    """Jobs that asked for the largest tier. users: those with jobs that would fit in `smaller`, most GPU-hours first.

    why_none: why there are no figures; then the rest is empty. limit_mib: the highest peak that fits in `smaller`.
    """

    why_none: str = ""
    names: tuple[str, ...] = ()
    smaller: str = ""
    limit_mib: float = 0.0
    asked_jobs: int = 0
    asked_hours: float = 0.0
    known_jobs: int = 0
    fit_jobs: int = 0
    fit_hours: float = 0.0
    users: tuple[LargeUser, ...] = ()


@dataclass(frozen=True)
class SiteTotals:
    """All totals. sharing: jobs with a part of a GPU (shard, mps), which no other total has.

    parts: by dimension and value, most GPU-hours first; the value "" means not recorded.

    """

    total: Share
    standings: tuple[Standing, ...]
    still_running: int
    sharing: int
    users: int
    parts: dict[str, dict[str, Share]]
    largest: LargestTier


def load_totals(db: duckdb.DuckDBPyConnection, config: Config) -> SiteTotals:
    """Totals of the jobs of `site_runs`."""
    standings = db.execute(
        "SELECT standing, count(*), round(sum(gpu_hours), 6) FROM runs GROUP BY 1 ORDER BY 3 DESC NULLS LAST, 1"
    ).fetchall()
    [(running,)] = db.execute(
        """SELECT count(*) FROM jobs WHERE start_s IS NOT NULL AND end_s IS NULL
           AND coalesce(nullif(gpu_count, 0), gpu_count_req) > 0"""
    ).fetchall()
    [(sharing,)] = db.execute(
        "SELECT count(*) FROM jobs WHERE start_s IS NOT NULL AND gpu_share_count > 0 AND coalesce(gpu_count, 0) = 0"
    ).fetchall()
    [(users,)] = db.execute('SELECT count(DISTINCT "user") FROM runs').fetchall()
    return SiteTotals(
        total=load_total(db),
        standings=tuple(Standing(name, jobs, hours or 0.0) for name, jobs, hours in standings),
        still_running=running,
        sharing=sharing,
        users=users,
        parts={dimension: _parts(db, dimension) for dimension in DIMENSIONS},
        largest=_largest(db, config),
    )


def load_total(db: duckdb.DuckDBPyConnection) -> Share:
    """The sums of all jobs of `site_runs`."""
    [total] = db.execute(f"SELECT {_SUMS} FROM runs").fetchall()
    return _share(total)


def _share(row: tuple[float | int | None, ...]) -> Share:
    jobs, measured_jobs, hours, *rest = row
    return Share(jobs, measured_jobs, hours or 0.0, *rest)  # type: ignore[arg-type]


def _parts(db: duckdb.DuckDBPyConnection, dimension: str) -> dict[str, Share]:
    rows = db.execute(
        f'SELECT "{dimension}", {_SUMS} FROM runs GROUP BY 1 ORDER BY round(sum(gpu_hours), 6) DESC NULLS LAST, 1'
    ).fetchall()
    return {name: _share(tuple(sums)) for name, *sums in rows}


def _largest(db: duckdb.DuckDBPyConnection, config: Config) -> LargestTier:
    """Requests for the largest tier, with the margins of the advice: SPIKE_MARGIN and advice.headroom_mib."""
    names = sorted(largest_tier_names(config))
    below = [tier for tier in config.tiers if tier.name not in names]
    if not names:
        return LargestTier(why_none="no memory tiers are configured")
    if not below:
        return LargestTier(why_none="only one size of memory tier is configured")
    smaller = max(below, key=lambda tier: tier.capacity_mib)
    limit_mib = (smaller.capacity_mib - config.advice.headroom_mib) / (1 + SPIKE_MARGIN)
    ended = " OR ".join(f"starts_with(state, '{state}')" for state in ENDED_WELL)
    known = f"standing = '{OK}' AND hbm_peak_mib IS NOT NULL AND coalesce(NOT is_preallocated, false) AND ({ended})"
    # Sums from several threads differ in their last digits. Rounding keeps users with equal sums in order.
    sql = f"""
    WITH large AS (SELECT *, {known} AS is_known, {known} AND hbm_peak_mib <= $limit AS is_fit
                   FROM runs WHERE list_contains($names, tier))
    SELECT "user", count(*), sum(gpu_hours), count(*) FILTER (is_known), count(*) FILTER (is_fit),
           coalesce(round(sum(gpu_hours) FILTER (is_fit), 6), 0),
           median(hbm_peak_mib) FILTER (is_known), max(hbm_peak_mib) FILTER (is_known)
    FROM large GROUP BY 1 ORDER BY 6 DESC, 1
    """
    rows = [LargeUser(*row) for row in db.execute(sql, {"limit": limit_mib, "names": names}).fetchall()]
    return LargestTier(
        names=tuple(names),
        smaller=smaller.name,
        limit_mib=limit_mib,
        asked_jobs=sum(row.asked_jobs for row in rows),
        asked_hours=sum(row.asked_hours for row in rows),
        known_jobs=sum(row.known_jobs for row in rows),
        fit_jobs=sum(row.fit_jobs for row in rows),
        fit_hours=sum(row.fit_hours for row in rows),
        users=tuple(row for row in rows if row.fit_jobs),
    )


_JOBS = (
    "job_id", "submit_s", "user", "account", "partition", "state", "tier", "gpu_count", "gpu_count_req", "gpu_type",
    "gpu_share_count", "node_count", "node_count_req", "start_s", "end_s", "elapsed_s", "name_key", "time_limit_s",
)  # fmt: skip
_METRICS = (
    "job_id", "submit_s", "verdict", "gpu_model", "mig_profile", "gpus_seen", "coverage_frac", "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "temporal_imbalance", "idle_gpus", "energy_j", "hbm_peak_mib", "is_preallocated",
    "mfu_frac",
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
