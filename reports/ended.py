"""What the store says of runs that have ended: which ones there are, and what decides on their mail."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.errors import StoreError
from reports.outbox import EndedRun
from telemetry.schema import schema_of, table_of
from telemetry.store import Store

_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "elapsed_s", "user", "gpu_count", "array_job_id", "state",
    "refuses_mail",
)  # fmt: skip
_ENDED = """
SELECT job_id, submit_s, "user", end_s, gpu_count, array_job_id FROM jobs
WHERE end_s >= $since_s AND start_s IS NOT NULL AND gpu_count > 0 AND coalesce("user", '') != ''
  AND coalesce(state, '') NOT IN ('REQUEUED', 'RESIZING')
ORDER BY end_s, job_id, submit_s
"""
_FACTS = """
SELECT j.job_id, j.submit_s, j.end_s, coalesce(j.elapsed_s, j.end_s - j.start_s) AS elapsed_s,
       j.submit_s = max(j.submit_s) OVER (PARTITION BY j.job_id) AS is_last,
       j.refuses_mail
FROM jobs j WHERE j.job_id IN (SELECT job_id FROM wanted)
"""
_OPEN_ARRAYS = """
SELECT DISTINCT array_job_id FROM jobs WHERE end_s IS NULL AND array_job_id IN (SELECT array_job_id FROM wanted)
"""
_COMMENTS = "SELECT count(refuses_mail) > 0 FROM jobs"
_METRICS = "SELECT job_id, submit_s FROM job_metrics WHERE job_id IN (SELECT job_id FROM wanted)"
_WANTED = schema_of({"job_id": pa.int64(), "array_job_id": pa.int64()})


@dataclass(frozen=True)
class Ended:
    """A run that waits for its report. is_last: no later run of the job is known, so that the job is over.

    is_array_open: tasks of its array still run or pend. has_metrics: it has a row in job_metrics.
    refuses_mail: its comment says almanac:nomail; None: not known. has_comments: this cluster's accounting tells
    comments, of other jobs at least.
    """

    run: EndedRun
    elapsed_s: int
    is_last: bool = True
    refuses_mail: bool | None = False
    is_array_open: bool = False
    has_metrics: bool = False
    has_comments: bool = True


def ended_since(store: Store, cluster: str, since_s: int) -> list[EndedRun]:
    """GPU runs that started, and ended at since_s or later, oldest end first.

    Runs that were requeued, and the parts of a job that was resized, are no ended jobs. Raises StoreError.
    """
    [rows] = _query(store, cluster, None, _ENDED, since_s=since_s)
    return [
        EndedRun(cluster, job_id, submit_s, user, end_s, gpus, array)
        for job_id, submit_s, user, end_s, gpus, array in rows
    ]


def known_ends(store: Store, cluster: str, job_ids: Collection[int]) -> dict[int, int]:
    """By job id, the end (s since 1970) of its latest run that has ended; jobs without one are left out."""
    rows = store.read("jobs", cluster, ["job_id", "end_s"], among={"job_id": pa.array(sorted(job_ids), pa.int64())})
    ended = rows.filter(~pc.field("end_s").is_null())
    ends: dict[int, int] = {}
    for job_id, end_s in zip(ended["job_id"].to_numpy().tolist(), ended["end_s"].to_numpy().tolist(), strict=True):
        ends[job_id] = max(end_s, ends.get(job_id, end_s))
    return ends


def look_up(store: Store, cluster: str, runs: Sequence[EndedRun]) -> list[Ended]:
    """What the store says of these runs, in their order; a run that it no longer has as such is not the last one."""
    if not runs:
        return []
    facts, opened, measured, comments = _query(store, cluster, runs, _FACTS, _OPEN_ARRAYS, _METRICS, _COMMENTS)
    known = {fact[:3]: fact[3:] for fact in facts}
    open_arrays, with_metrics = {array for (array,) in opened}, set(measured)
    [(has_comments,)] = comments
    found = []
    for run in runs:
        elapsed_s, is_last, refuses = known.get((run.job_id, run.submit_s, run.end_s), (0, False, False))
        has_metrics = (run.job_id, run.submit_s) in with_metrics
        is_open = run.array_job_id in open_arrays
        found.append(Ended(run, elapsed_s, is_last, refuses, is_open, has_metrics, has_comments))
    return found


def _query(
    store: Store, cluster: str, runs: Sequence[EndedRun] | None, *queries: str, **values: Any
) -> list[list[tuple[Any, ...]]]:
    """The rows of each query over the store's jobs and job_metrics, and over `wanted`, the runs."""
    with store.connect() as db:
        try:
            store.view(db, "jobs", cluster, _COLUMNS)
            store.view(db, "job_metrics", cluster, ("job_id", "submit_s"))
            if runs is not None:
                db.register("wanted", table_of(_WANTED, [(run.job_id, run.array_job_id) for run in runs]))
            return [db.execute(query, values or None).fetchall() for query in queries]
        except duckdb.Error as error:
            raise StoreError(f"{store.root}: the jobs cannot be read: {error}", "see `almanac doctor`") from error
