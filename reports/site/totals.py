"""Totals of a site's jobs: GPU-hours, energy, unused GPU-hours, and requests for the largest memory tier.

DuckDB computes all sums on views of the store, so a long span needs no more memory than a short one.
docs/site-report.md says what each figure means.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from advisor.memory.peaks import ENDED_WELL, SPIKE_MARGIN
from almanac.config import Config
from telemetry.characterize.usage import largest_tier_names
from telemetry.metrics.data_quality import OK

DIMENSIONS = {"partition": "partition", "account": "account", "gpu_type": "GPU type"}
"""Columns of `runs` that totals are broken down by, with their names on the page."""
_SUMS = """
count(*), count(measured_h), sum(gpu_hours), coalesce(sum(measured_h), 0),
sum(util_frac * measured_h) / nullif(sum(measured_h), 0), sum(idle_job_h), sum(never_used_h),
coalesce(sum(measured_h) FILTER (never_used_h IS NOT NULL), 0), sum(no_kernel_h),
sum(energy_j) / 3.6e6, coalesce(sum(gpu_hours) FILTER (energy_j IS NOT NULL), 0), sum(wasted_j) / 3.6e6,
coalesce(sum(idle_job_h + never_used_h) FILTER (wasted_j IS NOT NULL), 0)
"""


@dataclass(frozen=True)
class Share:
    """Totals of some of the site's jobs; all hours are GPU-hours. None: not known for any job.

    measured_hours: the part that samples cover, in jobs with data quality ok or idle. All unused hours are parts of it.
    never_used_known_hours: in jobs where it is known which GPUs were never used. For other jobs, all time without a
    kernel is in no_kernel_hours. energy_hours: in jobs with known energy. wasted_kwh: the energy of wasted_kwh_hours,
    which are part of the idle hours.
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
