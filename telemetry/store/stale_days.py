"""Which job metrics depend on rows that are about to be stored: those of days, or those of runs and their neighbors.

Metrics of a day are those of the jobs that ran in it. They depend on its samples; on these jobs' records; and, on
nodes that are shared, on the records and GPU bindings of the jobs beside them. So new samples make days stale, and
records make runs stale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from almanac.units import DAY_S
from telemetry.attribution.runs import load_runs, occupied_until
from telemetry.attribution.seen_units import days_of
from telemetry.store.cluster_store import ClusterStore, Opens
from telemetry.store.marks import StaleRun
from telemetry.store.schema import TABLES

LONGEST_DAYS = 400
"""A record of a longer run is taken for a wrong one: only its last days are looked at again."""

_LAST_DAY = 2_932_896  # 9999-12-31
_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "account", "partition", "time_limit_s",
    "gpu_type", "gpu_type_req",
)  # fmt: skip


def opens(store: ClusterStore, table: str, rows: pa.Table) -> Opens:
    """The days and runs that `ClusterStore.write` makes stale. The store is read at the first change."""
    if table == "telemetry":
        return lambda start_s: [start_s // DAY_S]
    find = {"jobs": _of_jobs, "bindings": _of_bindings, "steps": _of_steps}[table]
    runs = functools.cache(lambda: find(store, rows))
    return lambda start_s: runs()


@dataclass(frozen=True)
class _Record:
    """What a run's metrics, and those of its neighbors, take from its record."""

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
    """Runs where job records change what was known of who had which nodes, or end a job."""
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
    ends = [
        pc.max(store.read("jobs", ["end_s"])["end_s"]).as_py(),
        *(row["end_s"] for row in changed.values()),
    ]
    latest_s = max((end_s for end_s in ends if end_s is not None), default=0)
    return set().union(*(_touched(_run(known.get(key), latest_s), _run(row, latest_s)) for key, row in changed.items()))


def _run(row: Mapping[str, Any] | None, latest_s: int) -> _Record | None:
    """None where the record is of no GPU run that has started."""
    if row is None or row["start_s"] is None or not row["gpu_count"]:
        return None
    until_s = occupied_until(row["start_s"], row["end_s"], row["time_limit_s"], latest_s)
    place, owner = (row["node_list"], row["gpu_count"]), (row["account"], row["partition"])
    return _Record(row["job_id"], row["start_s"], until_s, row["end_s"] is not None, place, owner)


def _touched(old: _Record | None, new: _Record | None) -> Iterable[StaleRun]:
    """What differs between two records of a run."""
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
    """Whether storing a row changes anything: a null never erases a known value."""
    return known is None or any(value is not None and value != known[name] for name, value in row.items())
