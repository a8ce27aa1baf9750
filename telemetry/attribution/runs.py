"""Runs of GPU jobs as the jobs table has them: those to summarize, their neighbors, and those that new rows make stale.

Metrics of a day are those of the jobs that ran in it. They depend on its samples; on these jobs' records; and, on
nodes that are shared, on the records and GPU bindings of their other jobs. So new samples make days stale, and
records make runs stale.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from almanac.units import DAY_S
from telemetry.attribution.allocations import JobRun, name_parts, parse_hosts
from telemetry.attribution.seen_units import days_of
from telemetry.store.progress import StaleRun
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore
from telemetry.store.writing import Opens

OVERTIME_S = 3600
IS_SUMMARIZED = "coalesce((coalesce(gpu_count, 0) > 0 OR gpu_share_count > 0) AND start_s < end_s, false)"
"""SQL over jobs: the ended runs that get a row in job_metrics. `load_runs` leaves out the others."""
_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "account", "partition", "time_limit_s",
    "gpu_type", "gpu_type_req", "gpu_share_count",
)  # fmt: skip


def occupied_until(start_s: int, end_s: int | None, time_limit_s: int | None, latest_s: int) -> int:
    """Return the time until which a run has its nodes. latest_s: the latest end that accounting knows, of any job.

    A run without an end has them until latest_s, after which there is nobody to share them with; but at most an hour
    beyond its time limit: a longer one is taken for a runaway record.
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
    rows = rows.filter(
        ~pc.field("start_s").is_null() & ((pc.field("gpu_count") > 0) | (pc.field("gpu_share_count") > 0))
    )
    end_s = rows["end_s"].combine_chunks()
    has_none = end_s.is_null()
    known = (rows[name].filter(has_none).to_pylist() for name in ("start_s", "time_limit_s"))
    until = [occupied_until(start_s, None, limit_s, latest_s) for start_s, limit_s in zip(*known, strict=True)]
    rows = rows.append_column("until_s", pc.replace_with_mask(end_s, has_none, pa.array(until, pa.int64())))
    return rows.filter(pc.field("start_s") < pc.field("until_s")).sort_by(
        [("start_s", "ascending"), ("job_id", "ascending"), ("submit_s", "ascending")]
    )


def ended_jobs(runs: pa.Table, since_s: int, until_s: int) -> list[JobRun]:
    """Return those of the runs that have ended and ran at some time of [since_s, until_s)."""
    return _jobs(runs.filter(~pc.field("end_s").is_null() & _is_within(since_s, until_s)))


def neighbors_of(runs: pa.Table, jobs: Sequence[JobRun]) -> list[JobRun]:
    """Return other runs, ended or not, that can decide which GPUs the given jobs had.

    They had a host of a given job on a day of that job, or have the id of a given job or of such a run. Hosts that
    differ only in case or domain count as one, because telemetry may not distinguish them. So the result for a job does
    not depend on the other given jobs.
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
    """Return those of `others` that had a host of one of `jobs` at the same time."""
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
            gpu_count=row["gpu_count"] or len(hosts(row["node_list"])) or 1,
            hosts=hosts(row["node_list"]),
            account=row["account"] or "",
            partition=row["partition"] or "",
            gpu_type=row["gpu_type"] or row["gpu_type_req"] or "",
            shares=0 if row["gpu_count"] else row["gpu_share_count"] or 0,
        )
        for row in runs.to_pylist()
    ]


LONGEST_DAYS = 400
"""A record of a longer run is taken for a wrong one: only its last days are looked at again."""

_LAST_DAY = 2_932_896  # 9999-12-31


def opens(store: ClusterStore, table: str, rows: pa.Table) -> Opens:
    """The days and runs that `ClusterStore.write` makes stale. The store is read at the first change."""
    if table == "telemetry":
        return lambda start_s: [start_s // DAY_S]
    find = {"jobs": _of_jobs, "bindings": _of_bindings, "steps": _of_steps}[table]
    runs = functools.cache(lambda: find(store, rows))
    return lambda start_s: runs()


@dataclass(frozen=True)
class _Record:
    """The part of a run's record that its metrics, and those of its neighbors, depend on."""

    job_id: int
    start_s: int
    until_s: int
    has_ended: bool
    place: tuple[Any, ...]
    owner: tuple[Any, ...]

    def stale(self, start_s: int, until_s: int, *, is_alone: bool = False) -> StaleRun:
        """The run on the days of [start_s, until_s). is_alone: the metrics of other jobs do not depend on it."""
        return _stale(self.job_id, "" if is_alone else self.place[0], start_s, until_s)


def _of_jobs(store: ClusterStore, rows: pa.Table) -> set[StaleRun]:
    """Runs whose new records change the nodes or times of a job, or end it."""
    names = [name for name in _COLUMNS if name in rows.column_names]
    since_s, until_s = pc.min(rows["submit_s"]).as_py(), pc.max(rows["submit_s"]).as_py() + 1
    known = {
        (row["job_id"], row["submit_s"]): row for row in store.read("jobs", _COLUMNS, since_s, until_s).to_pylist()
    }
    newer: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows.select(names).to_pylist():
        key = (row["job_id"], row["submit_s"])
        before = newer.get(key) or known.get(key) or dict.fromkeys(_COLUMNS)
        newer[key] = {name: before[name] if row.get(name) is None else row[name] for name in _COLUMNS}
    changed = {key: row for key, row in newer.items() if row != known.get(key)}
    if not changed:
        return set()
    ends = [pc.max(store.read("jobs", ["end_s"])["end_s"]).as_py(), *(row["end_s"] for row in changed.values())]
    latest_s = max((end_s for end_s in ends if end_s is not None), default=0)
    return set().union(*(_touched(_run(known.get(key), latest_s), _run(row, latest_s)) for key, row in changed.items()))


def _run(row: Mapping[str, Any] | None, latest_s: int) -> _Record | None:
    """None where the record is of no GPU run that has started."""
    if row is None or row["start_s"] is None or not (row["gpu_count"] or row["gpu_share_count"]):
        return None
    until_s = occupied_until(row["start_s"], row["end_s"], row["time_limit_s"], latest_s)
    place, owner = (row["node_list"], row["gpu_count"] or row["gpu_share_count"]), (row["account"], row["partition"])
    return _Record(row["job_id"], row["start_s"], until_s, row["end_s"] is not None, place, owner)


def _touched(old: _Record | None, new: _Record | None) -> Iterable[StaleRun]:
    """The run on the days that differ between two records of it; empty if none does."""
    if old is None or new is None or (old.start_s, old.place) != (new.start_s, new.place):
        return {run.stale(run.start_s, run.until_s) for run in (old, new) if run is not None}
    if (old.until_s, old.has_ended) != (new.until_s, new.has_ended):
        first_s, last_s = sorted((old.until_s, new.until_s))
        return {new.stale(first_s - 1, last_s)}
    return {new.stale(new.until_s - 1, new.until_s, is_alone=True)} if old.owner != new.owner else ()


def _stale(job_id: int, node_list: str | None, start_s: int, until_s: int) -> StaleRun:
    days = days_of(start_s, until_s)
    end_day = min(max(days.stop, 0), _LAST_DAY)
    return StaleRun(job_id, node_list or "", min(max(days.start, days.stop - LONGEST_DAYS, 0), end_day), end_day)


def _of_bindings(store: ClusterStore, rows: pa.Table) -> set[StaleRun]:
    """The runs that a new binding can belong to. A run that is not known yet becomes stale when it comes."""
    since_s, until_s = pc.min(rows["seen_s"]).as_py(), pc.max(rows["seen_s"]).as_py() + 1
    key = [*TABLES["bindings"].key, "uuid", "mig"]
    known = {tuple(row.values()) for row in store.read("bindings", key, since_s, until_s).to_pylist()}
    ids = {row["job_id"] for row in rows.select(key).to_pylist() if tuple(row.values()) not in known}
    runs = load_runs(store).filter(pc.field("job_id").isin(pa.array(sorted(ids), pa.int64())))
    return {_stale(run["job_id"], run["node_list"], run["start_s"], run["until_s"]) for run in runs.to_pylist()}


def _of_steps(store: ClusterStore, rows: pa.Table) -> set[StaleRun]:
    """The last day of each run that has a changed step: it is then computed whole, and no other needs its steps.

    A run that has not ended as far as is known becomes stale when its end comes.
    """
    since_s, until_s = pc.min(rows["submit_s"]).as_py(), pc.max(rows["submit_s"]).as_py() + 1
    key = TABLES["steps"].key
    known = {tuple(row[name] for name in key): row for row in store.read("steps", None, since_s, until_s).to_pylist()}
    changed = {
        (row["job_id"], row["submit_s"])
        for row in rows.to_pylist()
        if _says_more(row, known.get(tuple(row[name] for name in key)))
    }
    ids = pa.array(sorted({job_id for job_id, _ in changed}), pa.int64())
    runs = load_runs(store).filter(~pc.field("end_s").is_null() & pc.field("job_id").isin(ids))
    return {
        _stale(run["job_id"], None, run["until_s"] - 1, run["until_s"])
        for run in runs.to_pylist()
        if (run["job_id"], run["submit_s"]) in changed
    }


def _says_more(row: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    """Return True if storing a row changes anything: a null never erases a known value."""
    return known is None or any(value is not None and value != known[name] for name, value in row.items())
