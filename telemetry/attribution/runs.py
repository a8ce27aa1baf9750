"""Runs of GPU jobs as the store's jobs table has them: those to summarize, and those beside them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.units import DAY_S
from telemetry.attribution.allocations import JobRun, parse_hosts
from telemetry.attribution.host_names import name_parts
from telemetry.attribution.seen_units import days_of
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.marks import StaleRun

OVERTIME_S = 3600
IS_SUMMARIZED = "coalesce(gpu_count > 0 AND start_s < end_s, false)"
"""SQL over jobs: the ended runs that get a row in job_metrics. `load_runs` leaves out the others."""
_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "account", "partition", "time_limit_s",
    "gpu_type", "gpu_type_req",
)  # fmt: skip


def occupied_until(start_s: int, end_s: int | None, time_limit_s: int | None, latest_s: int) -> int:
    """Until when a run has its nodes. latest_s: the latest end that accounting knows, of any job.

    A run without an end has them until latest_s, after which there is nobody to share them with; but at most an hour
    beyond its time limit: what accounting lists for longer is taken for a runaway record.
    """
    if end_s is not None:
        return end_s
    limited_s = latest_s if time_limit_s is None else min(latest_s, start_s + time_limit_s + OVERTIME_S)
    return max(limited_s, start_s + 1)


def load_runs(store: ClusterStore) -> pa.Table:
    """Every GPU run that has started, in the order of its start: the columns of `JobRun`, and time_limit_s.

    end_s is null where accounting knows none; until_s is `occupied_until`. Runs of no length are left out.
    """
    rows = store.read("jobs", _COLUMNS)
    latest_s = pc.max(rows["end_s"]).as_py() or 0
    rows = rows.filter(~pc.field("start_s").is_null() & (pc.field("gpu_count") > 0))
    end_s = rows["end_s"].combine_chunks()
    has_none = end_s.is_null()
    known = (rows[name].filter(has_none).to_pylist() for name in ("start_s", "time_limit_s"))
    until = [occupied_until(start_s, None, limit_s, latest_s) for start_s, limit_s in zip(*known, strict=True)]
    rows = rows.append_column("until_s", pc.replace_with_mask(end_s, has_none, pa.array(until, pa.int64())))
    return rows.filter(pc.field("start_s") < pc.field("until_s")).sort_by(
        [("start_s", "ascending"), ("job_id", "ascending"), ("submit_s", "ascending")]
    )


def load_jobs(store: ClusterStore, since_s: int, until_s: int) -> list[JobRun]:
    """GPU jobs that have ended and ran at some time of [since_s, until_s), in the order of their start."""
    return ended_jobs(load_runs(store), since_s, until_s)


def ended_jobs(runs: pa.Table, since_s: int, until_s: int) -> list[JobRun]:
    """Those of the runs that have ended and ran at some time of [since_s, until_s)."""
    return _jobs(runs.filter(~pc.field("end_s").is_null() & _is_within(since_s, until_s)))


def neighbors_of(runs: pa.Table, jobs: Sequence[JobRun]) -> list[JobRun]:
    """Other runs, ended or not, that can decide which GPUs the given jobs had.

    They had a host of a given job on a day of that job, or have the id of a given job. Hosts that differ only in case
    or domain count as one, because telemetry may not distinguish them. So the result for a job does not depend on the
    other given jobs.
    """
    if not jobs:
        return []
    places = {place for job in jobs for place in _places(job)}
    span = days_of(min(job.start_s for job in jobs), max(job.end_s for job in jobs))
    near = _jobs(runs.filter(_is_within(span.start * DAY_S, span.stop * DAY_S)))
    beside = [job for job in near if any(place in places for place in _places(job, span))]
    ids = pa.array(sorted({job.job_id for job in (*jobs, *beside)}), pa.int64())
    found = {*beside, *_jobs(runs.filter(pc.field("job_id").isin(ids)))}
    return sorted(found.difference(jobs), key=lambda job: (job.start_s, job.job_id, job.submit_s))


def depending_jobs(runs: pa.Table, stale: Collection[StaleRun]) -> list[JobRun]:
    """Ended runs with metrics that depend on a stale run: on one of its days they had its job id, or a host of its.

    A record of GPUs goes to one of the runs with its job id, so the hosts of those runs count as well.
    """
    runs = runs.filter(_is_on_any({day for run in stale for day in run.days}, runs))
    near, is_ended = _jobs(runs), runs["end_s"].is_valid().to_pylist()
    ids = {(run.job_id, day) for run in stale for day in run.days}
    shared_ids = {(run.job_id, day) for run in stale if run.node_list for day in run.days}
    hosts = functools.cache(parse_hosts)
    places = {(name_parts(host)[0], day) for run in stale for host in hosts(run.node_list) for day in run.days}
    for job in near:
        if any((job.job_id, day) in shared_ids for day in days_of(job.start_s, job.end_s)):
            places.update(_places(job))
    return [
        job
        for job, has_ended in zip(near, is_ended, strict=True)
        if has_ended
        and (
            any((job.job_id, day) in ids for day in days_of(job.start_s, job.end_s))
            or any(place in places for place in _places(job))
        )
    ]


def _is_on_any(days: Collection[int], runs: pa.Table) -> pa.Array[Any]:
    """(n_runs,) whether each run had its nodes on one of these days since 1970."""
    wanted = np.array([*sorted(days), np.iinfo(np.int64).max])
    first, last = runs["start_s"].to_numpy() // DAY_S, (runs["until_s"].to_numpy() - 1) // DAY_S
    return pa.array(wanted[np.searchsorted(wanted, first)] <= last)


def sharing(jobs: Sequence[JobRun], others: Sequence[JobRun]) -> list[JobRun]:
    """Those of `others` that had a host of one of `jobs` at the same time."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for job in jobs:
        for host in job.hosts:
            spans[host].append((job.start_s, job.end_s))
    return [
        other
        for other in others
        if any(start < other.end_s and other.start_s < end for host in other.hosts for start, end in spans[host])
    ]


def _places(job: JobRun, within: range | None = None) -> Iterator[tuple[str, int]]:
    days = days_of(job.start_s, job.end_s)
    if within is not None:
        days = range(max(days.start, within.start), min(days.stop, within.stop))
    return ((name_parts(host)[0], day) for day in days for host in job.hosts)


def _is_within(since_s: int, until_s: int) -> pc.Expression:
    return (pc.field("start_s") < until_s) & (pc.field("until_s") > since_s)


def _jobs(runs: pa.Table) -> list[JobRun]:
    hosts = functools.cache(parse_hosts)
    return [
        JobRun(
            job_id=row["job_id"],
            submit_s=row["submit_s"],
            start_s=row["start_s"],
            end_s=row["until_s"],
            gpu_count=row["gpu_count"],
            hosts=hosts(row["node_list"]),
            account=row["account"] or "",
            partition=row["partition"] or "",
            gpu_type=row["gpu_type"] or row["gpu_type_req"] or "",
        )
        for row in runs.to_pylist()
    ]
