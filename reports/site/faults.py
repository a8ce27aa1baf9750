"""The to-do list of the site report: GPU-hours that jobs waste, by user and fault, and what to ask of whom.

Each job counts for its largest fault only, so no GPU-hour counts twice. docs/site-report.md has the rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import duckdb

from telemetry.metrics.data_quality import EXCLUDED_BY_SITE, OK

IDLE_JOBS, NEVER_USED, LOW_USE, FAILED_AGAIN = "idle job", "GPUs never used", "low use", "failed again"
UNASKED = "GPUs not asked for"
FAULTS = (IDLE_JOBS, NEVER_USED, UNASKED, LOW_USE, FAILED_AGAIN)
MOST_ITEMS = 1000
"""Most rows by user that are read; a list of 10,000 users helps nobody."""
LOW_BUSY_FRAC = 0.3
"""Below 30% GPU_UTIL counts as low (Cankur et al., VI)."""
FAILED_RUNS = 3
"""Failed runs of a job family from which on the later ones count."""
LIMIT_MIN_S, LIMIT_USED_FRAC, LIMIT_JOBS = 3600, 0.5, 3
"""A time limit is too long if a completed job used at most half of it, as in the job report (limit_far)."""

_OF_SITE = "NOT list_contains($excluded, standing)"
_FAULTS = f"""
CREATE TEMP TABLE faults AS
WITH failed AS (
  SELECT job_id, submit_s, gpu_hours AS failed_h FROM runs
  WHERE (starts_with(state, 'FAILED') OR starts_with(state, 'OUT_OF_MEMORY')) AND {_OF_SITE}
    AND regexp_matches(name_key, '[a-z]')
  QUALIFY count(*) OVER (PARTITION BY "user", name_key, gpus) >= {FAILED_RUNS}
    AND row_number() OVER (PARTITION BY "user", name_key, gpus ORDER BY submit_s, job_id) > 1),
parts AS (
  SELECT "user", gpus, job_id, gpus - idle_gpu_count AS used_gpus, coalesce(failed_h, 0) AS failed_h,
         coalesce(idle_job_h, 0) AS idle_job_h, coalesce(never_used_h, 0) AS never_used_h,
         idle_job_h * coalesce(unasked_gpus / gpus, 0) AS unasked_idle_h,
         never_used_h * coalesce(least(coalesce(unasked_gpus, 0), idle_gpu_count) / nullif(idle_gpu_count, 0), 0)
           AS unasked_never_h,
         coalesce(no_kernel_h, 0) AS pause_h,
         coalesce(measured_h, 0) - coalesce(never_used_h, 0) AS active_h,
         CASE WHEN standing = '{OK}' AND no_kernel_h >= {1 - LOW_BUSY_FRAC} * (measured_h - coalesce(never_used_h, 0))
              THEN no_kernel_h ELSE 0 END AS low_h
  FROM runs LEFT JOIN failed USING (job_id, submit_s)),
split AS (
  SELECT *, idle_job_h - coalesce(unasked_idle_h, 0) AS idle_h, never_used_h - coalesce(unasked_never_h, 0) AS never_h,
         coalesce(unasked_idle_h, 0) + coalesce(unasked_never_h, 0) AS unasked_h
  FROM parts),
largest AS (SELECT *, greatest(failed_h, idle_h, never_h, unasked_h, low_h) AS hours FROM split)
SELECT CASE WHEN failed_h = hours THEN '{FAILED_AGAIN}' WHEN idle_h = hours THEN '{IDLE_JOBS}'
            WHEN unasked_h = hours THEN '{UNASKED}' WHEN never_h = hours THEN '{NEVER_USED}'
            ELSE '{LOW_USE}' END AS fault,
       "user", gpus, job_id, hours, used_gpus, active_h, pause_h, idle_job_h + never_used_h + pause_h AS unused_h
FROM largest WHERE hours > 0
"""
# Sums from several threads differ in their last digits. Rounding keeps items with equal sums in order.
_ITEMS = """
SELECT fault, "user", gpus, count(*), round(sum(hours), 6),
       CASE WHEN count(used_gpus) = count(*) THEN min(used_gpus) END,
       CASE WHEN count(used_gpus) = count(*) THEN max(used_gpus) END,
       1 - sum(pause_h) / nullif(sum(active_h), 0), arg_max(job_id, (hours, job_id))
FROM faults WHERE "user" <> '' GROUP BY ALL ORDER BY 5 DESC, 1, 2, 3 LIMIT $most
"""
_SUMS = """
SELECT fault, count(*), count(DISTINCT "user"), round(sum(hours), 6), round(sum(least(unused_h, hours)), 6)
FROM faults GROUP BY 1 ORDER BY 4 DESC, 1
"""
_LIMITS = f"""
SELECT "user", gpus, count(*), round(sum(gpus * (time_limit_s - ran_s) / 3600.0), 6), median(ran_s / time_limit_s)
FROM runs
WHERE starts_with(state, 'COMPLETED') AND time_limit_s >= {LIMIT_MIN_S} AND ran_s <= {LIMIT_USED_FRAC} * time_limit_s
  AND "user" <> '' AND {_OF_SITE}
GROUP BY ALL HAVING count(*) >= {LIMIT_JOBS} ORDER BY 4 DESC, 1, 2 LIMIT $most
"""

ItemKey = tuple[str, str, int]
"""Fault, user, and GPUs of a job."""


@dataclass(frozen=True)
class FaultItem:
    """A user's jobs with one number of GPUs and one fault. hours: GPU-hours that could be won, at most.

    used_least, used_most: GPUs that the jobs used; None if not known for every job. busy_frac: share of the time with
    a kernel on the GPUs in use; None if nothing was measured. example: the job with the most GPU-hours.
    """

    fault: str
    user: str
    gpus: int
    jobs: int
    hours: float
    used_least: int | None
    used_most: int | None
    busy_frac: float | None
    example: int

    @property
    def key(self) -> ItemKey:
        return self.fault, self.user, self.gpus


@dataclass(frozen=True)
class FaultSum:
    """All jobs of a fault. unused_hours: the part of `hours` that is also in the table of unused GPU-hours."""

    fault: str
    jobs: int
    users: int
    hours: float
    unused_hours: float


@dataclass(frozen=True)
class LimitItem:
    """A user's completed jobs that used at most half of their time limits.

    hours: GPU-hours requested and not used. Nobody loses them, but they keep Slurm from starting the jobs early.
    """

    user: str
    gpus: int
    jobs: int
    hours: float
    used_frac: float


@dataclass(frozen=True)
class SiteFaults:
    """Faults of a site's jobs, most GPU-hours first. items, limits: at most MOST_ITEMS of each. sums: by fault."""

    items: tuple[FaultItem, ...]
    sums: tuple[FaultSum, ...]
    limits: tuple[LimitItem, ...]

    @property
    def hours(self) -> float:
        return sum(each.hours for each in self.sums)

    @property
    def unused_hours(self) -> float:
        return sum(each.unused_hours for each in self.sums)


def load_faults(db: duckdb.DuckDBPyConnection) -> SiteFaults:
    """The faults of the jobs of `site_runs`."""
    _make_faults(db)
    limits = db.execute(_LIMITS, {"most": MOST_ITEMS, "excluded": EXCLUDED_BY_SITE}).fetchall()
    return SiteFaults(
        items=tuple(FaultItem(*row) for row in db.execute(_ITEMS, {"most": MOST_ITEMS}).fetchall()),
        sums=tuple(FaultSum(*row) for row in db.execute(_SUMS).fetchall()),
        limits=tuple(LimitItem(*row) for row in limits),
    )


def load_fault_hours(
    db: duckdb.DuckDBPyConnection, users: Iterable[str]
) -> tuple[dict[str, float], dict[ItemKey, float]]:
    """GPU-hours by fault, and by item of these users, of the jobs of `site_runs`."""
    _make_faults(db)
    by_fault = db.execute("SELECT fault, sum(hours) FROM faults GROUP BY 1").fetchall()
    by_item = db.execute(
        """SELECT fault, "user", gpus, sum(hours) FROM faults
           WHERE "user" IN (SELECT unnest($users::VARCHAR[])) GROUP BY ALL""",
        {"users": sorted(set(users))},
    ).fetchall()
    return dict(by_fault), {(fault, user, gpus): hours for fault, user, gpus, hours in by_item}


def _make_faults(db: duckdb.DuckDBPyConnection) -> None:
    db.execute(_FAULTS, {"excluded": EXCLUDED_BY_SITE}).fetchall()
