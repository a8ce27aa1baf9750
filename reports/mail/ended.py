"""Read from the store which runs have ended, and the facts that decide on their mail."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.errors import StoreError
from reports.mail.outbox import EndedRun, Told
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.schema import schema_of, table_of

_COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "elapsed_s", "user", "gpu_count", "array_job_id", "state",
    "refuses_mail", "account", "name_key",
)  # fmt: skip
_ENDED = """
SELECT job_id, submit_s, "user", end_s, gpu_count, array_job_id FROM jobs
WHERE end_s >= $since_s AND start_s IS NOT NULL AND gpu_count > 0 AND coalesce("user", '') != ''
  AND coalesce(state, '') NOT IN ('REQUEUED', 'RESIZING')
ORDER BY end_s, job_id, submit_s
"""
_FACTS = """
SELECT j.job_id, j.submit_s, j.end_s, coalesce(j.elapsed_s, j.end_s - j.start_s) AS elapsed_s,
       -- Slurm gives numbers again: a later job of another user is no later run.
       j.submit_s = max(j.submit_s) OVER (PARTITION BY j.job_id, j."user") AS is_last,
       j.refuses_mail, coalesce(j.account, ''), coalesce(j.name_key, ''), coalesce(j.state, '')
FROM jobs j WHERE j.job_id IN (SELECT job_id FROM wanted)
"""
_OPEN_ARRAYS = """
SELECT DISTINCT array_job_id FROM jobs WHERE end_s IS NULL AND array_job_id IN (SELECT array_job_id FROM wanted)
"""
_COMMENTS = "SELECT count(refuses_mail) > 0 FROM jobs WHERE end_s >= $comments_s"
FAILED_STATES = ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "TIMEOUT")
"""As in the rules failed and timeout. A preempted job, or one with an unknown end, has not failed."""
_WANTED = schema_of({"job_id": pa.int64(), "array_job_id": pa.int64()})


ENDED = "ended"


@dataclass(frozen=True)
class ReportCandidate:
    """A run that waits for its report. is_last: no later run of the job is known, so the job is over.

    refuses_mail: its comment has almanac:nomail; None: unknown. is_array_open: tasks of its array still run or pend.
    has_metrics: it has a row in job_metrics. has_comments: accounting has comments of other jobs that ended lately.
    name_key: the masked name. state: of the job in accounting, such as COMPLETED.
    """

    run: EndedRun
    elapsed_s: int
    is_last: bool = True
    refuses_mail: bool | None = False
    is_array_open: bool = False
    has_metrics: bool = False
    has_comments: bool = True
    account: str = ""
    name_key: str = ""
    state: str = ""

    def tells(self) -> Told:
        """What a mail about this run tells of how its job family ends."""
        return Told(self.run.cluster, self.name_key, self.run.gpu_count, outcome_of(self.state))


def outcome_of(state: str) -> str:
    """How a job ended, as a mail tells it: "ended FAILED"; "ended" for all states that are no failure."""
    return f"{ENDED} {state}" if state in FAILED_STATES else ENDED


def ended_since(store: ClusterStore, since_s: int) -> list[EndedRun]:
    """GPU runs that started, and ended at since_s or later, oldest end first. Raises StoreError.

    Leaves out runs that were requeued, and parts of jobs that were resized.
    """
    with _views(store) as db:
        rows = db.execute(_ENDED, {"since_s": since_s}).fetchall()
    return [
        EndedRun(store.cluster, job_id, submit_s, user, end_s, gpus, array)
        for job_id, submit_s, user, end_s, gpus, array in rows
    ]


def known_ends(store: ClusterStore, job_ids: Collection[int]) -> dict[int, int]:
    """By job id, the latest end of its runs (s since 1970). Leaves out jobs that have not ended."""
    rows = store.read("jobs", ["job_id", "end_s"], among={"job_id": pa.array(sorted(job_ids), pa.int64())})
    ended = rows.filter(~pc.field("end_s").is_null())
    ends: dict[int, int] = {}
    for job_id, end_s in zip(ended["job_id"].to_numpy().tolist(), ended["end_s"].to_numpy().tolist(), strict=True):
        ends[job_id] = max(end_s, ends.get(job_id, end_s))
    return ends


def look_up(store: ClusterStore, runs: Sequence[EndedRun], comments_s: int = 0) -> list[ReportCandidate]:
    """The facts about these runs, in their order. A run that is gone from the store counts as not the last one.

    comments_s: a known comment of a job that ended at this time or later shows that accounting keeps comments.
    Raises StoreError.
    """
    if not runs:
        return []
    with _views(store) as db:
        db.register("wanted", table_of(_WANTED, [(run.job_id, run.array_job_id) for run in runs]))
        facts = db.execute(_FACTS).fetchall()
        open_arrays = {array for (array,) in db.execute(_OPEN_ARRAYS).fetchall()}
        [(has_comments,)] = db.execute(_COMMENTS, {"comments_s": comments_s}).fetchall()
    known = {fact[:3]: fact[3:] for fact in facts}
    with_metrics = _with_metrics(store, runs)
    found = []
    for run in runs:
        key = run.job_id, run.submit_s, run.end_s
        elapsed_s, is_last, refuses, account, name_key, state = known.get(key, (0, False, False, "", "", ""))
        has_metrics = (run.job_id, run.submit_s) in with_metrics
        is_open = run.array_job_id in open_arrays
        about = (elapsed_s, is_last, refuses, is_open, has_metrics, has_comments, account, name_key, state)
        found.append(ReportCandidate(run, *about))
    return found


def _with_metrics(store: ClusterStore, runs: Sequence[EndedRun]) -> set[tuple[int, int]]:
    """Runs (job_id, submit_s) that have metrics. None of them if the metrics cannot be read.

    Then the metrics are computed again, which names the fault.
    """
    submits = [run.submit_s for run in runs]
    ids = {"job_id": pa.array(sorted({run.job_id for run in runs}), pa.int64())}
    try:
        rows = store.read("job_metrics", ("job_id", "submit_s"), min(submits), max(submits) + 1, ids)
    except StoreError:
        return set()
    return set(zip(rows["job_id"].to_numpy().tolist(), rows["submit_s"].to_numpy().tolist(), strict=True))


@contextlib.contextmanager
def _views(store: ClusterStore) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with a view of the table jobs. Raises StoreError."""
    with store.connect() as db:
        store.view(db, "jobs", _COLUMNS)
        yield db
