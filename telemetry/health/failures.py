"""GPU errors in the time of jobs, and the failure table: which jobs ended because of a node.

The XID gauge keeps its last value for good, and a later job shows it too: an error is a change of the gauge, between
two samples at most GAP_S apart. Of two jobs that had the GPU between them, the error is that of the one that failed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from slurm.hostlist import expand
from slurm.states import NODE_FAILED
from telemetry.attribution.allocations import JobRun
from telemetry.health.errors import (
    BEFORE_END_S,
    DIED,
    GAP_S,
    NODE_CAUSES,
    GpuError,
    codes_of,
    failed_node,
    fatal_error,
    gpu_error,
)
from telemetry.store.schema import TELEMETRY, schema_of
from telemetry.store.store import ClusterStore

CLOCK_S = 60
"""Clocks of nodes and of slurmctld differ by less."""
MOST_ERRORS = 100
"""Errors kept of one job: the first and the last of each GPU and code; of more than these, both ends by time."""
_ERRORS = f"""
WITH found AS (SELECT host, gpu, time_ms, xid, ecc_uncorrected FROM
  (FROM no_errors UNION ALL BY NAME FROM read_parquet($files, union_by_name = true, hive_partitioning = false))),
failed AS (SELECT host, gpu FROM found WHERE xid > 0 UNION SELECT host, gpu FROM found WHERE ecc_uncorrected > 0),
samples AS (SELECT host, gpu, time_ms, max(xid) AS xid, max(ecc_uncorrected) AS ecc
            FROM found SEMI JOIN failed USING (host, gpu) GROUP BY ALL),
changes AS (
  SELECT host, gpu, time_ms, lag(time_ms) OVER unit AS before_ms, 'XID ' || xid::INT AS code FROM samples
  WHERE xid IS NOT NULL WINDOW unit AS (PARTITION BY host, gpu ORDER BY time_ms)
  QUALIFY xid > 0 AND xid <> lag(xid) OVER unit
  UNION ALL
  SELECT host, gpu, time_ms, lag(time_ms) OVER unit AS before_ms, 'ECC' AS code FROM samples
  WHERE ecc IS NOT NULL WINDOW unit AS (PARTITION BY host, gpu ORDER BY time_ms)
  QUALIFY ecc > lag(ecc) OVER unit),
named AS (SELECT coalesce(n.node, c.host) AS host, gpu, time_ms, before_ms, code
          FROM changes c LEFT JOIN error_nodes n ON n.host = c.host AND n.day = c.time_ms // 86400000
          WHERE time_ms - before_ms <= {1000 * GAP_S}),
owned AS (
  SELECT a.job, c.* FROM named c JOIN owners a ON a.host = c.host AND a.gpu = c.gpu AND a.start_ms < c.time_ms
    AND a.end_ms >= c.before_ms - {1000 * CLOCK_S} AND (a.mig = '' OR list_contains($of_node, c.code))
  QUALIFY row_number() OVER (PARTITION BY c.host, c.gpu, a.mig, c.code, c.time_ms
    ORDER BY a.died AND a.end_ms <= c.time_ms + {1000 * CLOCK_S} DESC, a.end_ms DESC) = 1),
ends AS (SELECT DISTINCT job, host, gpu, code, time_ms // 1000 AS time_s FROM owned
         WINDOW one AS (PARTITION BY job, host, gpu, code)
         QUALIFY time_ms IN (min(time_ms) OVER one, max(time_ms) OVER one)),
texts AS (SELECT job, list(host || ':' || gpu || ':' || code || ':' || time_s ORDER BY time_s, host, gpu) AS all_of
          FROM ends GROUP BY job)
SELECT job, CASE WHEN len(all_of) <= {MOST_ERRORS} THEN all_of
                 ELSE all_of[:{MOST_ERRORS // 2}] || all_of[-{MOST_ERRORS // 2}:] END FROM texts"""
"""An error of a MIG instance is one of its GPU: that of a program (code) could be any tenant's, so it is none's."""


def errors_of_jobs(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    nodes: Mapping[int, Mapping[str, str]],
    jobs: Sequence[JobRun],
    failed: Collection[tuple[int, int]],
    allocations: pa.Table,
) -> pa.Array[Any]:
    """The column gpu_errors of these jobs. Raises duckdb.Error if a file is damaged.

    nodes: by day since 1970, the Slurm node of each host with another name in telemetry. failed: job_id and submit_s
    of jobs that failed.
    """
    kind = pa.list_(pa.string())
    if not files or not allocations.num_rows:
        return pa.nulls(len(jobs), kind)
    died = [(job.job_id, job.submit_s) in failed for job in jobs]
    places: list[Any] = allocations["job"].to_pylist()
    named = [(day, host, node) for day, of_day in nodes.items() for host, node in of_day.items()]
    schema = schema_of("day int64, host string, node string")
    given = {
        "no_errors": pa.schema([TELEMETRY.field(name) for name in _READ]).empty_table(),
        "owners": allocations.append_column("died", pa.array([died[place] for place in places], pa.bool_())),
        "error_nodes": pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in named], schema),
    }
    for name, table in given.items():
        db.register(name, table)
    params = {"files": [str(path) for path in files], "of_node": codes_of(NODE_CAUSES)}
    found = dict(db.execute(_ERRORS, params).fetchall())
    for name in given:
        db.unregister(name)
    return pa.array([found.get(place) for place in range(len(jobs))], kind)


_READ = ("host", "gpu", "time_ms", "xid", "ecc_uncorrected")


_CODES = ", ".join(f"'{code}'" for code in codes_of(NODE_CAUSES))
NODE_FAILED_SQL = f"""(coalesce(j.state, '') IN {NODE_FAILED} OR (j.state = '{DIED}' AND coalesce(len(
    list_filter(m.gpu_errors, lambda e: string_split(e, ':')[-2] IN ({_CODES})
      AND string_split(e, ':')[-1]::BIGINT - j.end_s BETWEEN -{BEFORE_END_S} AND {GAP_S})), 0) > 0))"""
"""SQL: a job of the table jobs (j) with its row of job_metrics (m), or null, ended because of its node."""
_FAILURES = f"""
SELECT j.job_id, j.submit_s, j."user", coalesce(j.state, '') AS state, j.node_list, j.failed_node, j.gpu_count,
       j.end_s, m.gpu_errors
FROM jobs j LEFT JOIN job_metrics m USING (job_id, submit_s)
WHERE j.end_s >= $since_s AND j.end_s < $until_s AND j.start_s IS NOT NULL AND {NODE_FAILED_SQL}
ORDER BY j.end_s, j.job_id, j.submit_s"""
"""A job that Slurm requeued after a node failure has a run of its own with the state NODE_FAIL."""


@dataclass(frozen=True)
class JobFailure:
    """A job that ended because of a node. node: "" if nothing says which of several. code: "" without a GPU error."""

    job_id: int
    submit_s: int
    user: str
    state: str
    node: str
    gpu: str
    code: str
    time_s: int
    gpu_count: int

    @property
    def error(self) -> GpuError | None:
        return gpu_error(self.code) if self.code else None


def node_failures(store: ClusterStore, since_s: int, until_s: int, submitted_from_s: int) -> list[JobFailure]:
    """The failure table: jobs that ended in [since_s, until_s) because of a node, by time. Raises StoreError."""
    with store.connect() as db:
        store.view(db, "jobs", _JOBS, submitted_from_s, until_s)
        store.view(db, "job_metrics", ("job_id", "submit_s", "gpu_errors"), submitted_from_s, until_s)
        rows = db.execute(_FAILURES, {"since_s": since_s, "until_s": until_s}).fetchall()
    found = []
    for job_id, submit_s, user, state, node_list, accounted, gpu_count, end_s, texts in rows:
        error = fatal_error(state, end_s, texts, accounted)
        node = failed_node(state, node_list, accounted, error)
        gpu, code, time_s = (error.gpu, error.code, error.time_s) if error else ("", "", end_s)
        found.append(JobFailure(job_id, submit_s, user or "", state, node, gpu, code, time_s, gpu_count or 0))
    return found


_JOBS = (
    "job_id", "submit_s", "user", "state", "node_list", "failed_node", "gpu_count", "start_s", "end_s",
)  # fmt: skip
_EXPOSURE = """
WITH ran AS (SELECT coalesce(gpu_count, 0) AS gpus, node_list, greatest(start_s, $since_s) AS from_s,
                    least(end_s, $until_s) AS to_s FROM jobs
             WHERE start_s < $until_s AND end_s > $since_s AND start_s < end_s)
"""


def gpu_exposure(store: ClusterStore, since_s: int, until_s: int, submitted_from_s: int) -> list[tuple[int, float]]:
    """Number of GPUs of a job, and the hours that jobs of this size ran in [since_s, until_s)."""
    sql = f"{_EXPOSURE} SELECT gpus, sum(to_s - from_s) / 3600.0 FROM ran WHERE gpus > 0 GROUP BY 1 ORDER BY 1"
    return [(gpus, hours) for gpus, hours in _ran(store, sql, since_s, until_s, submitted_from_s)]


def node_days(store: ClusterStore, since_s: int, until_s: int, submitted_from_s: int) -> dict[str, int]:
    """By node, the number of days (UTC) of [since_s, until_s) on which it ran jobs with GPUs."""
    sql = f"""{_EXPOSURE} SELECT DISTINCT node_list, unnest(range(from_s // 86400, (to_s - 1) // 86400 + 1)) AS day
              FROM ran WHERE gpus > 0 AND node_list IS NOT NULL"""
    days = dict[str, set[int]]()
    hosts = dict[str, tuple[str, ...]]()
    for node_list, day in _ran(store, sql, since_s, until_s, submitted_from_s):
        if node_list not in hosts:
            try:
                hosts[node_list] = tuple(expand(node_list))
            except ValueError:
                hosts[node_list] = ()
        for host in hosts[node_list]:
            days.setdefault(host, set()).add(day)
    return {host: len(of_host) for host, of_host in sorted(days.items())}


def _ran(store: ClusterStore, sql: str, since_s: int, until_s: int, submitted_from_s: int) -> list[tuple[Any, ...]]:
    with store.connect() as db:
        store.view(db, "jobs", _JOBS, submitted_from_s, until_s)
        return db.execute(sql, {"since_s": since_s, "until_s": until_s}).fetchall()
