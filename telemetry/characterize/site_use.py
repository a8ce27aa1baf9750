"""Use of a site by time, partition, user, and final state: figures 1 to 9 of Hu et al. (SC'21), as tables.

Jobs are those that were submitted in the span and have ended; parts of requeued or resized jobs are no jobs. gpu_time
is GPUs times run time. A timeout and a failure of a node count as failed. delay is the start less the time from which
on the job was eligible.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from almanac.actions_config import NodeSet
from almanac.units import HOUR_S
from slurm.states import JOB_ENDED, JOB_FAILED, PART_OF_JOB
from telemetry.characterize.implications import debug_partition, implications
from telemetry.characterize.minute_use import COLUMNS, GPUS, PLACE, MinuteUse, minute_use
from telemetry.characterize.table import columns
from telemetry.power.demand import known_span
from telemetry.power.series import MINUTE_S, Floats, Ints
from telemetry.store.store import ClusterStore

_Row = Mapping[str, Any]
BY = ("time", "partition", "user", "state")
_SLOT_S = 900
"""Offsets of time zones are multiples of it."""
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
EVERY_DAY = "all"
_TIMES = (10, 30, 60, 120, 300, 600, 1800, *(hours * HOUR_S for hours in (1, 2, 4, 8, 12, 24, 48, 72, 168, 336)))
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Fewest GPUs of each size class; the last one has no limit."""
_TOP_FRACS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
MARQUEE_FRAC, MARQUEE_LEAST, LARGEST_USERS = 0.01, 3, 10
"""Marquee users: this share of all users, of those that wait longest in sum, at least so many; none of the users with
the most GPU time."""
_UTIL = (
    ("mean_util", "real", "GPUs in running jobs over GPUs in service, mean of minutes"), ("sd_util", "real"),
    ("known_frac", "real", "share of the minutes with accounting; means are of these"),
)  # fmt: skip
BY_HOUR = columns(
    ("weekday", "text", "Mon ... Sun, or all"), ("hour", "count", "local time"), *_UTIL, ("gpu_jobs_an_hour", "real"),
    ("cpu_jobs_an_hour", "real"),
)  # fmt: skip
BY_MONTH = columns(
    ("month", "text"), *((f"{kind}_jobs", "count") for kind in ("gpu", "one_gpu", "multi_gpu", "cpu")),
    ("mean_util", "real"), *((f"{kind}_util", "real", "part of mean_util") for kind in ("one_gpu", "multi_gpu")),
    ("known_frac", "real"), ("is_partial", "flag", "span or record does not cover all of it"),
)  # fmt: skip
PARTITIONS = columns(
    ("partition", "text"), ("gpus", "real", "in service, median"), *_UTIL,
    *((f"{name}_util", "real") for name in ("low", "q1", "median", "q3", "high")), ("jobs", "count", "with GPUs"),
    ("mean_gpus", "real"), ("mean_delay_s", "real"), ("p50_delay_s", "real"), ("mean_run_s", "real"),
)  # fmt: skip

_ENDED = f"""
CREATE TEMP TABLE ended AS
SELECT coalesce("user", '') AS person, {PLACE} AS place, {GPUS} AS gpus,
       coalesce(nullif(cpu_count, 0), cpu_count_req, 0) AS cpus, submit_s, start_s, node_gpu_count,
       CASE WHEN state = 'COMPLETED' THEN 'completed' WHEN list_contains($failed, state) THEN 'failed'
            ELSE 'canceled' END AS outcome,
       {GPUS} > 0 AS is_gpu,
       CASE WHEN start_s IS NULL THEN 0 ELSE greatest(coalesce(elapsed_s, end_s - start_s), 0) END AS ran_s,
       CASE WHEN start_s IS NOT NULL
            THEN greatest(start_s - greatest(coalesce(eligible_s, submit_s), submit_s), 0) END AS delay_s
FROM jobs
WHERE submit_s >= $since_s AND submit_s < $until_s AND end_s IS NOT NULL AND (start_s IS NULL OR end_s >= start_s)
  AND list_contains($ended, state)
"""

_KIND = "CASE WHEN is_gpu THEN 'GPU' ELSE 'CPU' END AS kind"
_SQL: Mapping[str, str] = {
    "states": f"""
SELECT {_KIND}, outcome, count(*) AS jobs, count(*) / sum(count(*)) OVER (PARTITION BY is_gpu) AS share,
       sum(gpus * ran_s) / nullif(sum(sum(gpus * ran_s)) OVER (PARTITION BY is_gpu), 0) AS gpu_time_share,
       count(*) FILTER (start_s IS NULL) AS never_started
FROM ended GROUP BY is_gpu, outcome ORDER BY is_gpu DESC, outcome""",
    "states_by_size": """
SELECT s.gpus_from, outcome, count(*) AS jobs, count(*) / sum(count(*)) OVER (PARTITION BY s.gpus_from) AS share,
       sum(gpus * ran_s) / nullif(sum(sum(gpus * ran_s)) OVER (PARTITION BY s.gpus_from), 0) AS gpu_time_share
FROM ended ASOF JOIN sizes s ON gpus >= s.gpus_from GROUP BY s.gpus_from, outcome ORDER BY 1, 2""",
    "sizes": """
WITH found AS (
  SELECT s.gpus_from, count(*) AS jobs, sum(gpus * ran_s) AS time FROM ended ASOF JOIN sizes s ON gpus >= s.gpus_from
  GROUP BY s.gpus_from)
SELECT gpus_from, jobs, jobs / sum(jobs) OVER () AS share, time / nullif(sum(time) OVER (), 0) AS gpu_time_share,
       sum(jobs) OVER w / sum(jobs) OVER () AS cumulative_share,
       sum(time) OVER w / nullif(sum(time) OVER (), 0) AS cumulative_gpu_time_share
FROM found WINDOW w AS (ORDER BY gpus_from) ORDER BY 1""",
    "run_times": f"""
SELECT {_KIND}, count(*) AS jobs, avg(ran_s) AS mean_run_s, median(ran_s) AS p50_run_s,
       quantile_cont(ran_s, .25) AS p25_run_s, quantile_cont(ran_s, .75) AS p75_run_s,
       quantile_cont(ran_s, .95) AS p95_run_s, avg(delay_s) AS mean_delay_s, median(delay_s) AS p50_delay_s,
       quantile_cont(delay_s, .95) AS p95_delay_s
FROM ended WHERE start_s IS NOT NULL GROUP BY is_gpu ORDER BY is_gpu DESC""",
    "run_time_cdf": f"""
SELECT {_KIND}, t.most_s AS run_at_most_s, count(*) FILTER (ran_s <= t.most_s) / count(*) AS share,
       sum(gpus * ran_s) FILTER (ran_s <= t.most_s) / nullif(sum(gpus * ran_s), 0) AS gpu_time_share
FROM ended, times t WHERE start_s IS NOT NULL GROUP BY is_gpu, t.most_s ORDER BY is_gpu DESC, 2""",
    "user_shares": """
WITH own AS (SELECT person, sum(gpus * ran_s) AS gpu_time, sum(cpus * ran_s) AS cpu_time,
                    sum(coalesce(delay_s, 0)) FILTER (is_gpu) AS delay FROM ended GROUP BY person),
     long AS (UNPIVOT own ON gpu_time, cpu_time, delay INTO NAME quantity VALUE amount),
     ranked AS (SELECT quantity, sum(amount) OVER w AS most, sum(amount) OVER (PARTITION BY quantity) AS whole,
                       row_number() OVER w AS place
                FROM (SELECT quantity, coalesce(amount, 0)::DOUBLE AS amount, person FROM long)
                WINDOW w AS (PARTITION BY quantity ORDER BY amount DESC, person ROWS UNBOUNDED PRECEDING))
SELECT quantity, f.top_frac, place AS users, most / nullif(whole, 0) AS share
FROM fracs f CROSS JOIN (SELECT count(*) AS n FROM own) JOIN ranked ON place = ceil(round(f.top_frac * n, 9))
ORDER BY 1, 2""",
    "completion_rates": f"""
WITH own AS (SELECT {_KIND}, least(floor(10 * avg((outcome = 'completed')::INTEGER) + 1e-9), 9) / 10 AS completed_from
             FROM ended GROUP BY is_gpu, person)
SELECT kind, completed_from, count(*) AS users, count(*) / sum(count(*)) OVER (PARTITION BY kind) AS share
FROM own GROUP BY kind, completed_from ORDER BY kind DESC, 2""",
    "marquee_users": """
WITH own AS (SELECT person AS "user", count(*) AS jobs, sum(coalesce(delay_s, 0)) AS delay,
                    sum(gpus * ran_s) AS gpu_time FROM ended WHERE is_gpu GROUP BY person),
     ranked AS (SELECT *, rank() OVER (ORDER BY gpu_time DESC) AS gpu_time_rank,
                       row_number() OVER (ORDER BY delay DESC, "user") AS place FROM own)
SELECT "user", jobs, delay / 3600 AS delay_h, delay / nullif((SELECT sum(delay) FROM own), 0) AS delay_share,
       delay / jobs AS mean_delay_s, gpu_time / nullif((SELECT sum(gpu_time) FROM own), 0) AS gpu_time_share
FROM (SELECT *, row_number() OVER (ORDER BY place) AS kept FROM ranked WHERE gpu_time_rank > $largest AND delay > 0)
WHERE kept <= greatest($least, ceil($frac * (SELECT count(*) FROM own))) ORDER BY delay DESC, "user" """,
    "partition_jobs": """
SELECT place, count(*) AS jobs, avg(gpus) AS mean_gpus, avg(delay_s) AS mean_delay_s, median(delay_s) AS p50_delay_s,
       avg(ran_s) FILTER (start_s IS NOT NULL) AS mean_run_s FROM ended WHERE is_gpu GROUP BY place ORDER BY place""",
    "submissions": """
SELECT submit_s // 900 AS slot, is_gpu, gpus = 1 AS is_one, count(*) AS jobs FROM ended GROUP BY ALL""",
}
_OF = {
    "time": ("by_hour", "by_month", "run_times", "run_time_cdf"),
    "partition": ("partitions",),
    "user": ("user_shares", "completion_rates", "marquee_users"),
    "state": ("states", "states_by_size", "sizes"),
}


@dataclass(frozen=True)
class SiteUse:
    """Tables by name, and a sentence for each implication: its subject (of BY) and text.

    note: how the GPUs in service are known. person is the user name.
    """

    tables: Mapping[str, pa.Table]
    implications: tuple[tuple[str, str], ...]
    note: str

    def of(self, subject: str) -> dict[str, pa.Table]:
        return {name: self.tables[name] for name in _OF[subject]}


def site_use(
    store: ClusterStore, span_s: tuple[int, int], node_sets: tuple[NodeSet, ...] = (), zone: dt.tzinfo | None = None
) -> SiteUse:
    """Characterize the jobs submitted in [start, end). zone: None: the machine's. Hours and months
    begin with the first job of the record to end. Raises StoreError.
    """
    known_s = known_span(store)
    use = minute_use(store, (max(span_s[0], min(known_s[0], span_s[1])), span_s[1]), node_sets)
    with store.connect() as db:
        store.view(db, "jobs", COLUMNS, *span_s)
        tables = _job_tables(db, span_s)
        debug = debug_partition(db)
    places = LocalTime.of(use, zone)
    submitted = tables.pop("submissions")
    tables["by_hour"] = by_hour(use, places, submitted)
    tables["by_month"] = by_month(use, places, submitted)
    tables["partitions"] = partitions(use, tables.pop("partition_jobs"))
    counted = "nodes that power runs counted, and of others those" if use.is_counted else "nodes"
    note = f"GPUs in service: of {counted} with a job within 30 days."
    return SiteUse(tables, tuple(implications(tables, debug)), note)


def _job_tables(db: duckdb.DuckDBPyConnection, span_s: tuple[int, int]) -> dict[str, pa.Table]:
    whole = {"failed": sorted(JOB_FAILED), "ended": sorted(JOB_ENDED - PART_OF_JOB)}
    db.execute(_ENDED, {**whole, "since_s": span_s[0], "until_s": span_s[1]})
    for name, column, values in (
        ("sizes", "gpus_from", _SIZES),
        ("times", "most_s", _TIMES),
        ("fracs", "top_frac", _TOP_FRACS),
    ):
        db.register(name, pa.table({column: values}))
    marquee = {"largest": LARGEST_USERS, "least": MARQUEE_LEAST, "frac": MARQUEE_FRAC}
    return {
        name: _plain(db.sql(sql, params=marquee if name == "marquee_users" else {}).to_arrow_table())
        for name, sql in _SQL.items()
    }


def _plain(table: pa.Table) -> pa.Table:
    """The table with texts, int64, and float64 alone: DuckDB's sums of integers are wider."""
    fields = []
    for field in table.schema:
        kind = field.type
        if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and not kind.scale):
            kind = pa.int64()
        elif not pa.types.is_string(kind) and not pa.types.is_boolean(kind):
            kind = pa.float64()
        fields.append(pa.field(field.name, kind))
    return table.cast(pa.schema(fields))


@dataclass(frozen=True)
class LocalTime:
    """Weekday (0 is Monday), hour, and month (12 times the year, and the month from 0) of slots of 15 minutes."""

    first: int
    weekday: Ints
    hour: Ints
    month: Ints
    minute_slot: Ints

    @classmethod
    def of(cls, use: MinuteUse, zone: dt.tzinfo | None) -> LocalTime:
        size = use.busy.shape[1]
        first, last = use.start_s // _SLOT_S, (use.start_s + size * MINUTE_S) // _SLOT_S + 1
        times = [dt.datetime.fromtimestamp(slot * _SLOT_S, zone) for slot in range(first, last)]
        fields = [(each.weekday(), each.hour, 12 * each.year + each.month - 1) for each in times]
        weekday, hour, month = np.array(fields, dtype=np.int64).reshape(-1, 3).T
        minute_slot = (use.start_s + np.arange(size) * MINUTE_S) // _SLOT_S - first
        return cls(first, weekday, hour, month, minute_slot)

    def counts(self, submitted: pa.Table, group: Ints, groups: int, chosen: Callable[[_Row], bool]) -> Floats:
        """Submissions by group of their slot, (groups,)."""
        slot = np.asarray(submitted["slot"], dtype=np.int64) - self.first
        is_in = np.array([chosen(row) for row in submitted.to_pylist()], dtype=np.bool_) & (slot >= 0)
        is_in &= slot < len(group)
        jobs = np.asarray(submitted["jobs"], dtype=np.float64)
        return np.bincount(group[slot[is_in]], jobs[is_in], groups).astype(np.float64)


def _is_gpu(row: _Row) -> bool:
    return bool(row["is_gpu"])


def by_hour(use: MinuteUse, places: LocalTime, submitted: pa.Table) -> pa.Table:
    """Utilization and submissions an hour, by weekday and hour, and by hour of all days (weekday "all")."""
    share, rows = use.share(), list[dict[str, object]]()
    for names, group in (((EVERY_DAY,), places.hour), (_DAYS, places.weekday * 24 + places.hour)):
        groups = 24 * len(names)
        seen = group[places.minute_slot]
        stats = [_stats(share[seen == number]) for number in range(groups)]
        hours = np.bincount(seen[np.isfinite(use.busy.sum(axis=0))], minlength=groups) / 60
        is_there = np.bincount(seen, minlength=groups) > 0
        gpu = places.counts(submitted, group, groups, _is_gpu)
        cpu = places.counts(submitted, group, groups, lambda row: not row["is_gpu"])
        rows += [
            {"weekday": names[n // 24], "hour": n % 24, **stats[n],
             "gpu_jobs_an_hour": gpu[n] / hours[n] if hours[n] else None,
             "cpu_jobs_an_hour": cpu[n] / hours[n] if hours[n] else None}
            for n in range(groups) if is_there[n]
        ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=BY_HOUR)


def _stats(values: Floats) -> dict[str, float | None]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {"mean_util": None, "sd_util": None, "known_frac": 0.0}
    return {"mean_util": known.mean(), "sd_util": known.std(), "known_frac": len(known) / len(values)}


def by_month(use: MinuteUse, places: LocalTime, submitted: pa.Table) -> pa.Table:
    """Submissions and utilization by calendar month; is_partial: the span or the record does not cover all of it."""
    rows = []
    months, group = np.unique(places.month, return_inverse=True)
    seen, share, one = group[places.minute_slot], use.share(), use.share_of_one_gpu()
    gpu = places.counts(submitted, group, len(months), _is_gpu)
    single = places.counts(submitted, group, len(months), lambda row: row["is_gpu"] and row["is_one"])
    cpu = places.counts(submitted, group, len(months), lambda row: not row["is_gpu"])
    for n, month in enumerate(months.tolist()):
        inside = seen == n
        if not inside.any():
            continue
        stats, year = _stats(share[inside]), month // 12
        next_first = dt.date(year + (month % 12 == 11), (month + 1) % 12 + 1, 1)
        minutes = (next_first - dt.date(year, month % 12 + 1, 1)).days * 1440
        one_util = _stats(one[inside])["mean_util"]
        known = stats["known_frac"] or 0.0
        rows.append({
            "month": f"{year}-{month % 12 + 1:02}", "gpu_jobs": gpu[n], "one_gpu_jobs": single[n],
            "multi_gpu_jobs": gpu[n] - single[n], "cpu_jobs": cpu[n], "mean_util": stats["mean_util"],
            "one_gpu_util": one_util,
            "multi_gpu_util": None if one_util is None else (stats["mean_util"] or 0.0) - one_util,
            "known_frac": known, "is_partial": bool(known * inside.sum() < minutes - 90),
        })  # fmt: skip
    return pa.Table.from_pylist(rows, schema=BY_MONTH)


def partitions(use: MinuteUse, jobs: pa.Table) -> pa.Table:
    """Quartiles of the utilization of each partition per minute, with whiskers of 1.5 IQR, and its jobs."""
    of_jobs = {row.pop("place"): row for row in jobs.to_pylist()}
    shares, rows = use.shares(), []
    for number, name in enumerate(use.partitions):
        known = shares[number][np.isfinite(shares[number])]
        row = {"partition": name, **_stats(shares[number]), **of_jobs.get(name, {"jobs": 0})}
        if len(known):
            q1, q2, q3 = np.quantile(known, (0.25, 0.5, 0.75))
            low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
            ends = known[known >= low].min(), known[known <= high].max()
            row |= dict(
                zip(
                    ("low_util", "q1_util", "median_util", "q3_util", "high_util"),
                    (ends[0], q1, q2, q3, ends[1]),
                    strict=True,
                )
            )
            row["gpus"] = float(np.nanmedian(use.capacity[number]))
        rows.append(row)
    rows.sort(key=lambda row: (-(row.get("gpus") or 0), row["partition"]))
    return pa.Table.from_pylist(rows, schema=PARTITIONS)
