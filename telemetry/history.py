"""History of past jobs for the advisor: one row per started GPU job, with its HBM peak if that shows the need."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.names import SCRIPT_PREFIX, is_family, name_key
from telemetry.counters import JOB_METRICS
from telemetry.health.failures import NODE_FAILED_SQL
from telemetry.metrics.data_quality import LOW_COVERAGE, NO_TELEMETRY, NOT_SUMMARISED, reserved_share_sql
from telemetry.store.database import names_sql
from telemetry.store.schema import JOBS
from telemetry.store.store import ClusterStore

if TYPE_CHECKING:
    import pandas as pd


UNASKED_SQL = """CASE WHEN gpu_count > 0 AND gpu_count_req IS NOT NULL THEN greatest(gpu_count - ceil(gpu_count_req
  * greatest(coalesce(node_count / nullif(node_count_req, 0), 1), 1)), 0)::BIGINT END"""
"""As reports.job.evidence.unasked_gpus, of rows of the table jobs. DuckDB's greatest passes over nulls."""


_METRICS = (
    "job_id", "submit_s", "hbm_peak_mib", "hbm_max_mib", "hbm_capacity_mib", "is_flat", "is_preallocated",
    "mean_gpu_util_pct", "mean_gr_engine_active_frac", "mean_sm_active_frac", "mean_dram_active_frac",
    "gpu_model", "has_profiling_fault", "coverage_frac", "coverage_sm_active_frac", "coverage_dram_active_frac",
    "mig_profile", "verdict", "gpu_errors",
)  # fmt: skip
_BASE = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "qos", "name", "name_key", "script_key",
    "node_count", "cpu_count", "gpu_count", "gpu_type", "gpu_type_req", "constraints", "tier", "time_limit_s",
    "is_array", "state", "elapsed_s", "hbm_peak_mib", "hbm_max_mib", "hbm_capacity_mib", "is_flat",
    "hbm_evidence", "mean_gpu_util_pct", "mean_gr_engine_active_frac", "mean_sm_active_frac", "mean_dram_active_frac",
    "gpu_model", "has_profiling_fault", "coverage_frac", "coverage_sm_active_frac", "coverage_dram_active_frac",
    "mig_profile", "verdict", "is_packed",
)  # fmt: skip
_JOBS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "partition_req", "qos", "name",
    "name_key", "script_key", "node_count", "cpu_count", "gpu_count", "cpu_count_req", "node_count_req",
    "gpu_count_req", "gpu_share_count", "gpu_type", "gpu_type_req", "constraints", "tier", "time_limit_s",
    "array_job_id", "array_task_id", "het_job_id", "het_offset",
    "state", "elapsed_s", "jobstats_hbm_peak_mib", "jobstats_hbm_total_mib",
    "jobstats_gpu_util_pct", "sacct_hbm_peak_mib", "sacct_hbm_least_mib", "sacct_gpu_util_pct", "gpu_memory_mib",
    "cpu_time_s", "host_mem_alloc_mib", "host_mem_peak_mib", "host_mem_task_peak_mib",
    "is_packed", "exit_code", "exit_signal",
)  # fmt: skip
_NEAR_LIMIT = 0.9
ACCOUNTED_SQL = f"""
  -- As for an idle job of telemetry: the memory of GPUs that were never used does not show the need of a run.
  CASE WHEN jobstats_gpu_util_pct <> 0 OR jobstats_gpu_util_pct IS NULL THEN jobstats_hbm_peak_mib END AS of_jobstats,
  CASE WHEN sacct_gpu_util_pct > 0 AND sacct_hbm_peak_mib <= gpu_memory_mib
         * CASE WHEN sacct_hbm_least_mib < sacct_hbm_peak_mib THEN {_NEAR_LIMIT} ELSE 1 END
       THEN sacct_hbm_peak_mib END AS of_sacct,
  coalesce(of_jobstats, of_sacct) AS accounted_peak_mib,
  CASE WHEN of_jobstats IS NOT NULL THEN 'jobstats' WHEN of_sacct IS NOT NULL THEN 'sacct' END AS accounted_by,
  coalesce(jobstats_hbm_total_mib, gpu_memory_mib) AS accounted_total_mib"""
"""SQL: the peak GPU memory of rows of the table jobs, by jobstats or else by Slurm.

A bound of Slurm's that a GPU may not have reached is left out near the GPU's memory: it would look like a job that
needs more. Use of the GPU must have been gathered too: a process that only holds memory shows no need.
"""
_OF_ACCOUNTING = {
    "cpu_time_s": "j.cpu_time_s",
    # The CPUs that it was given: those it asked for can be fewer.
    "cpu_use_frac": "(j.cpu_time_s / nullif(j.cpu_count * coalesce(j.elapsed_s, j.end_s - j.start_s), 0))::DOUBLE",
    **{f"host_mem_{part}_mib": f"j.host_mem_{part}_mib" for part in ("alloc", "peak", "task_peak")},
    "exit_code": "j.exit_code",
    "exit_signal": "j.exit_signal",
    "gpu_count_alloc": "j.gpu_count",
    "gpu_share_count": "j.gpu_share_count",
    "unasked_gpu_count": "j.unasked_gpu_count",
}
"""A job's end, its use of CPUs and host memory, and the GPUs it was given (gpu_count: those it asked for)."""
_OF_JOBS = frozenset(_BASE) - {*_METRICS, "hbm_evidence"} | {"job_id", "submit_s", "job", *_OF_ACCOUNTING}
"""Columns that need no row of job_metrics."""
MAX_NAMELESS = 2000
_RESERVED = reserved_share_sql("j.accounted_peak_mib", "j.accounted_total_mib")
_EVIDENCE = f"""CASE WHEN m.is_preallocated THEN 'preallocated'
            WHEN m.hbm_peak_mib IS NOT NULL
            THEN CASE WHEN NOT m.is_preallocated THEN 'telemetry' ELSE 'unclear' END
            WHEN by_jobstats AND j.accounted_peak_mib IS NOT NULL
            THEN CASE WHEN NOT ({_RESERVED}) THEN j.accounted_by ELSE 'unclear' END ELSE 'none' END"""
"""unclear: a peak that may be what a framework reserved, so that it does not show the need."""
_SPECIAL = {
    **_OF_ACCOUNTING,
    "hbm_peak_frac": f"""CASE {_EVIDENCE} WHEN 'telemetry' THEN m.hbm_peak_frac
         WHEN j.accounted_by THEN j.accounted_peak_mib / nullif(j.accounted_total_mib, 0) END::DOUBLE""",
    # The list is empty where nothing was idle, and where activity is not known.
    "idle_gpu_count": "CASE WHEN m.temporal_imbalance IS NOT NULL THEN len(m.idle_gpus) END",
    # As almanac.units.format_job_id.
    "job": """CASE WHEN j.array_job_id IS NOT NULL AND j.array_task_id IS NOT NULL
         THEN j.array_job_id || '_' || j.array_task_id
         WHEN j.het_job_id IS NOT NULL AND j.het_offset IS NOT NULL THEN j.het_job_id || '+' || j.het_offset
         ELSE j.job_id::VARCHAR END""",
}
"""Columns that need more than their column of a table."""
_JOIN = f"""
SELECT j.job_id, j.submit_s, j.start_s, j.end_s, coalesce(j."user", '') AS "user",
       coalesce(j.account, '') AS account, coalesce(j.partition_req, j."partition", '') AS "partition",
       coalesce(j.qos, '') AS qos, coalesce(j.name, '') AS name,
       regexp_replace(coalesce(j.name_key, ''), '[_?]+', '_', 'g') AS name_key,
       j.script_key, coalesce(j.node_count_req, j.node_count, 1) AS node_count,
       coalesce(j.cpu_count_req, j.cpu_count, 1) AS cpu_count,
       coalesce(nullif(j.gpu_count_req, 0), j.gpu_count, 0) AS gpu_count,
       coalesce(j.gpu_type, '') AS gpu_type, j.gpu_type_req, coalesce(j.constraints, '') AS constraints, j.tier,
       j.time_limit_s::DOUBLE AS time_limit_s, j.array_job_id IS NOT NULL AS is_array,
       CASE WHEN {NODE_FAILED_SQL} THEN 'NODE_FAIL' ELSE coalesce(j.state, '') END AS state,
       coalesce(j.elapsed_s, j.end_s - j.start_s)::DOUBLE AS elapsed_s,
       CASE WHEN m.is_preallocated THEN NULL
            WHEN m.hbm_peak_mib IS NOT NULL THEN m.hbm_peak_mib
            WHEN by_jobstats THEN j.accounted_peak_mib END::DOUBLE AS hbm_peak_mib,
       m.hbm_max_mib::DOUBLE AS hbm_max_mib, m.is_flat,
       coalesce(m.hbm_capacity_mib, j.accounted_total_mib)::DOUBLE AS hbm_capacity_mib,
       {_EVIDENCE} AS hbm_evidence,
       CASE WHEN m.mean_gpu_util_pct IS NOT NULL THEN m.mean_gpu_util_pct
            WHEN by_jobstats THEN j.jobstats_gpu_util_pct END::DOUBLE AS mean_gpu_util_pct,
       m.mean_gr_engine_active_frac, m.mean_sm_active_frac, m.mean_dram_active_frac, m.gpu_model, m.has_profiling_fault,
       m.coverage_frac, m.coverage_sm_active_frac, m.coverage_dram_active_frac, m.mig_profile,
       coalesce(m.verdict, '{NOT_SUMMARISED}') AS verdict, j.is_packed{{more}}
FROM (
  SELECT *, {UNASKED_SQL} AS unasked_gpu_count, {ACCOUNTED_SQL} FROM jobs) j LEFT JOIN (
  SELECT *, verdict IN ('{NO_TELEMETRY}', '{LOW_COVERAGE}') OR verdict LIKE 'shared node%' AS by_jobstats
  FROM job_metrics) m USING (job_id, submit_s)
WHERE CASE WHEN $running THEN j.start_s IS NOT NULL OR j.end_s IS NULL
  ELSE j.start_s IS NOT NULL AND j.end_s IS NOT NULL AND coalesce(j.state, '') NOT IN ('REQUEUED', 'RESIZING') END
  AND ($is_host OR greatest(coalesce(j.gpu_count, 0), coalesce(j.gpu_count_req, 0)) > 0
    OR ($has_parts AND j.gpu_share_count > 0))
"""
_ALL_OF_GPUS = {"running": True, "is_host": False, "has_parts": False}
_ORDER = " ORDER BY j.end_s, j.job_id, j.submit_s"


def _history_schema() -> pa.Schema:
    known = {field.name: field.type for field in (*JOB_METRICS, *JOBS)}
    own = {
        "time_limit_s": pa.float64(),
        "is_array": pa.bool_(),
        "elapsed_s": pa.float64(),
        "hbm_evidence": pa.string(),
        "idle_gpu_count": pa.int64(),
        "gpu_count_alloc": pa.int64(),
        "unasked_gpu_count": pa.int64(),
        "cpu_use_frac": pa.float64(),
        "job": pa.string(),
    }
    rest = [name for name in JOB_METRICS.names if name not in _BASE]
    names = (*_BASE, *rest, "idle_gpu_count", *_OF_ACCOUNTING, "job")
    return pa.schema([(name, {**known, **own}[name]) for name in names])


HISTORY = _history_schema()
"""Schema of `load_history_table`: the columns of `load_history`, then every other one of job_metrics."""
UNITS = {
    "job": "id as Slurm shows it: 1234, a task 1234_5, or a component 1234+1",
    "gpu_count_alloc": "GPUs allocated; null: not recorded",
    "unasked_gpu_count": "GPUs allocated that it did not ask for, as with --exclusive; null: not known",
} | {
    field.name: field.metadata[b"unit"].decode()
    for field in (*JOB_METRICS, *JOBS)
    if field.name in HISTORY.names and field.metadata and field.metadata.get(b"unit")
}
"""Unit or meaning of these columns, as docs/tables.md has it; a column without an entry has none."""


def load_history(
    store: ClusterStore,
    since_s: int | None = None,
    until_s: int | None = None,
    user: str | Collection[str] | None = None,
    running: bool = False,
    also: Collection[str] = (),
) -> pd.DataFrame:
    """GPU jobs submitted in [since_s, until_s) that have started and ended, oldest end first; of some users, or all.

    Runs that were requeued, and the parts of a job that was resized, are left out: they are no whole job.
    also: users whose jobs come whenever submitted; not with `user`.
    running: they come too, and so does what has not ended, last, with an end_s of NaN; what waits has a start_s of NaN.

    Partitions and counts of nodes, CPUs, and GPUs are what was asked for, as a request of the same job names them; what
    was allocated (a whole node, with --exclusive) only where accounting does not have that. Missing numbers are NaN, a
    missing tier is None. hbm_evidence says where hbm_peak_mib comes from: "telemetry", "jobstats", "preallocated" (then
    the peak does not show the need and is NaN), "sacct" (an upper bound), "unclear" (perhaps preallocated), or "none".
    hbm_max_mib is the highest sample, whatever the verdict.
    """
    with store.connect() as db:
        join = _JOIN.format(more="")
        params: dict[str, Any] = {**_ALL_OF_GPUS, "running": running}
        if also:
            params |= {"since_s": since_s or 0, "also": sorted(also)}
            join += """ AND (j.submit_s >= $since_s OR list_contains($also, j."user"))"""
            since_s = None
        if user is None:
            store.view(db, "jobs", _JOBS, since_s, until_s)
            store.view(db, "job_metrics", _METRICS, since_s, until_s)
        else:
            _register(db, store, _METRICS, since_s, until_s, user)
        return _frame(db, join + _ORDER, params, running)


_HOST = ("cpu_time_s", "host_mem_alloc_mib", "host_mem_peak_mib", "host_mem_task_peak_mib")


def load_host_history(store: ClusterStore, user: str | Collection[str] | None = None) -> pd.DataFrame:
    """As load_history(..., running=True), of jobs with and without GPUs, with the use of CPUs and host memory.

    It has no GPU metrics: their columns are null.
    """
    with store.connect() as db:
        if user is None:
            store.view(db, "jobs", _JOBS)
        else:
            _register(db, store, (), user=user)
        db.register("job_metrics", JOB_METRICS.empty_table())
        more = "".join(f", j.{name}" for name in _HOST)
        return _frame(db, _JOIN.format(more=more) + _ORDER, {**_ALL_OF_GPUS, "is_host": True}, True)


def _frame(db: duckdb.DuckDBPyConnection, sql: str, params: Mapping[str, Any], running: bool) -> pd.DataFrame:
    """Through Arrow, column by column: DuckDB's own frame has each text as an object first, twice the memory."""
    rows = db.sql(sql, params=dict(params)).to_arrow_table()
    frame: pd.DataFrame = rows.to_pandas(split_blocks=True, self_destruct=True)
    frame["name_key"] = _family_keys(frame)
    frame["tier"] = frame["tier"].astype(object).where(frame["tier"].notna(), None)
    maybe = "float64" if running else "int64"
    return frame.astype({"job_id": "int64", "submit_s": "int64", "start_s": maybe, "end_s": maybe})


def _family_keys(frame: pd.DataFrame) -> pd.Series[Any]:
    """The family keys by today's rule, whatever release recorded them; that of the script for a job without one."""
    import pandas as pd

    known = {key: key and name_key(key) for key in frame["name_key"].unique()}
    scripts = frame["script_key"].fillna("").tolist()
    keys = [
        own if not script or is_family(own) else SCRIPT_PREFIX + script
        for own, script in zip(frame["name_key"].map(known), scripts, strict=True)
    ]
    return pd.Series(keys, frame.index, dtype=frame["name_key"].dtype)


class UserHistories:
    """All that runs, has run or waits on a cluster, joined once, handed out by users: load_history(..., running=True).

    Holds a DuckDB connection until it is closed.
    """

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        with contextlib.ExitStack() as stack:
            self._db = stack.enter_context(store.connect())
            store.view(self._db, "jobs", _JOBS)
            store.view(self._db, "job_metrics", _METRICS)
            self._db.execute(f"CREATE TEMP TABLE history AS {_JOIN.format(more='')}", _ALL_OF_GPUS).fetchall()
            self._open = stack.pop_all()

    def digests(self, since_s: int) -> dict[str, str]:
        """Return a digest by user that changes with any of their rows; only users who submitted at since_s or later."""
        sql = """SELECT "user", count(*), bit_xor(hash(h)), sum(hash(h) % 65521) FROM history h
                 GROUP BY "user" HAVING max(submit_s) >= $since_s ORDER BY "user\""""
        with self._store.reading():
            found = self._db.sql(sql, params={"since_s": since_s}).fetchall()
        return {user: f"{number}-{mixed:x}-{total}" for user, number, mixed, total in found}

    def of(self, users: Sequence[str]) -> pd.DataFrame:
        """The rows of these users, as load_history has them. Looks at all rows each time: ask for many at once."""
        sql = 'SELECT * FROM history WHERE "user" IN (SELECT unnest($users)) ORDER BY end_s, job_id, submit_s'
        return self._frame(sql, {"users": list(users)})

    def newest(self, number: int, since_s: int) -> pd.DataFrame:
        """The newest so many rows of each GPU count that were submitted at since_s or later."""
        sql = """SELECT * FROM history WHERE submit_s >= $since_s QUALIFY
                 row_number() OVER (PARTITION BY gpu_count ORDER BY submit_s DESC, job_id DESC) <= $number
                 ORDER BY submit_s, job_id"""
        return self._frame(sql, {"since_s": since_s, "number": number})

    def close(self) -> None:
        self._open.close()

    def _frame(self, sql: str, params: Mapping[str, Any]) -> pd.DataFrame:
        with self._store.reading():
            return _frame(self._db, sql, params, True)


def load_history_table(
    store: ClusterStore,
    columns: Sequence[str],
    since_s: int | None = None,
    until_s: int | None = None,
    user: str | Collection[str] | None = None,
    among: Mapping[str, pa.Array[Any]] | None = None,
    has_parts: bool = False,
) -> pa.Table:
    """The same jobs in the same order, with any columns of HISTORY; a missing value is null.

    hbm_peak_frac is, as hbm_peak_mib, null for a preallocated job, and from jobstats if jobstats is the evidence.
    has_parts: also jobs with parts of a GPU (shards), which have no GPU of their own.
    among: return only jobs whose job_id or submit_s, or both, are among these values. DuckDB reads no other rows.
    """
    metrics = [name for name in columns if name not in _BASE and name not in _SPECIAL]
    more = [f"m.{name}" for name in metrics]
    more += [f"{_SPECIAL[name]} AS {name}" for name in columns if name in _SPECIAL]
    wanted = sorted({*_METRICS, *metrics, "hbm_peak_frac", "temporal_imbalance", "idle_gpus"})
    needs_metrics = not _OF_JOBS.issuperset(columns)
    with store.connect() as db:
        if user is not None or among:
            _register(db, store, wanted if needs_metrics else (), since_s, until_s, user, among)
        else:
            store.view(db, "jobs", _JOBS, since_s, until_s)
            if needs_metrics:
                store.view(db, "job_metrics", wanted, since_s, until_s)
        if not needs_metrics:
            db.register("job_metrics", JOB_METRICS.empty_table())
        joined = _JOIN.format(more="".join(f", {part}" for part in more))
        # Of a view, DuckDB reads only the columns that the outermost SELECT needs.
        sql = f"SELECT {names_sql(columns)} FROM ({joined}) j {_ORDER}"
        rows: pa.Table = db.sql(sql, params={**_ALL_OF_GPUS, "running": False, "has_parts": has_parts}).to_arrow_table()
    return rows.cast(pa.schema([HISTORY.field(name) for name in columns]))


def _register(
    db: duckdb.DuckDBPyConnection,
    store: ClusterStore,
    metrics: Sequence[str],
    since_s: int | None = None,
    until_s: int | None = None,
    user: str | Collection[str] | None = None,
    among: Mapping[str, pa.Array[Any]] | None = None,
) -> None:
    """Of users who are named only their rows are read: whoever asks for their own advice has little memory to spare."""
    users = [user] if isinstance(user, str) else user
    own = {**(among or {}), **({"user": pa.array(sorted(users), pa.string())} if users is not None else {})}
    jobs = store.read("jobs", _JOBS, since_s, until_s, own)
    theirs = {name: pc.unique(jobs[name].combine_chunks()) for name in ("job_id", "submit_s")} if own else None
    db.register("jobs", jobs)
    if metrics:
        db.register("job_metrics", store.read("job_metrics", metrics, since_s, until_s, theirs))


def open_jobs(store: ClusterStore) -> dict[int, int]:
    """Ids of the jobs to ask for again, and when they were submitted (s since 1970).

    They are those without an end, and the newest without a name (sacct --json failed).
    """
    jobs = store.read("jobs", ["job_id", "submit_s", "end_s", "name"])
    nameless = jobs.filter(pc.is_null(jobs["name"])).sort_by("submit_s")
    nameless = nameless.slice(max(0, len(nameless) - MAX_NAMELESS))
    asked = pa.concat_tables([nameless, jobs.filter(pc.is_null(jobs["end_s"]))]).sort_by([("submit_s", "descending")])
    return dict(zip(*(asked[name].to_numpy().tolist() for name in ("job_id", "submit_s")), strict=True))


def plain_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as dictionaries; NaN is None, so that JSON can hold it."""
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows.to_pylist()
    ]
