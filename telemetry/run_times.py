"""How long a job will likely run, by the jobs that had ended before it was submitted.

The median of the newest runs of its job family, else of its user, else of everybody; at most its time limit. Live and
in any past span it is the same value, since nothing after the submission enters.
"""

from __future__ import annotations

from collections.abc import Sequence

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from telemetry.slurm.backend import PendingJob
from telemetry.store.cluster_store import ClusterStore

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HISTORY_S = 30 * 86_400
"""Older runs say nothing: users and codes change, and a live run need not read more."""
NEWEST = 8
NEWEST_OF_ALL = 64
_WIDTH = 2**34
"""Seconds since 1970 are below this, so that a group and a time make one number."""

_GROUPED = (("user", pa.string()), ("name_key", pa.string()), ("gpus", pa.int64()))
ASKED = pa.schema([*(pa.field(*each) for each in _GROUPED), pa.field("submit_s", pa.int64()),
                   pa.field("time_limit_s", pa.int64())])  # fmt: skip
GPUS = "greatest(coalesce(gpu_count, 0), coalesce(gpu_count_req, 0))"
_COLUMNS = ("submit_s", "start_s", "end_s", "user", "name_key", "gpu_count", "gpu_count_req", "node_list")
_ENDED = f"""SELECT coalesce("user", '') AS user, coalesce(name_key, '') AS name_key, {GPUS} AS gpus, end_s,
                    greatest(end_s - start_s, 1) AS run_s
             FROM jobs WHERE end_s >= $start_s AND end_s < $end_s AND end_s >= start_s AND node_list <> ''"""
ENDED = pa.schema(
    [*(pa.field(*each) for each in _GROUPED), pa.field("end_s", pa.int64()), pa.field("run_s", pa.int64())]
)


def expected_run_s(asked: pa.Table, ended: pa.Table) -> Floats:
    """(n_asked,) predicted seconds; without any run before it the time limit, NaN where there is none either.

    asked: of schema ASKED. ended: of schema ENDED, in any order, at least those of HISTORY_S before each submission.
    """
    submit_s, limit_s = _times(asked, "submit_s"), _numbers(asked, "time_limit_s")
    end_s, run_s = _times(ended, "end_s"), _numbers(ended, "run_s").astype(np.float64)
    found = np.full(len(submit_s), np.nan)
    for names, newest in ((("user", "name_key", "gpus"), NEWEST), (("user",), NEWEST), ((), NEWEST_OF_ALL)):
        left = np.flatnonzero(np.isnan(found))
        group = _groups(asked, ended, names)
        past = _Past(group[len(submit_s) :], end_s, run_s)
        found[left] = past.median(group[: len(submit_s)][left], submit_s[left], newest)
    limit = np.where(limit_s > 0, limit_s.astype(np.float64), np.nan)
    return np.asarray(np.fmin(found, limit), dtype=np.float64)


def ended_runs(db: duckdb.DuckDBPyConnection, start_s: int, end_s: int) -> pa.Table:
    """Of schema ENDED, from the view `jobs`: what can say something of submissions in [start_s, end_s)."""
    span = {"start_s": start_s - HISTORY_S, "end_s": end_s}
    found: pa.Table = db.sql(_ENDED, params=span).to_arrow_table().cast(ENDED)
    return found


def pending_run_s(store: ClusterStore, pending: Sequence[PendingJob], now_s: int) -> dict[int, float]:
    """Return predicted run times (s) by job id; jobs without a prediction are left out. Raises StoreError."""
    if not pending:
        return {}
    rows = [
        {
            "user": job.user.encode(errors="replace").decode(), "name_key": job.request().name_key,
            "gpus": max(0, job.gpu_count), "submit_s": job.submit_s, "time_limit_s": job.time_limit_s or 0,
        }
        for job in pending
    ]  # fmt: skip
    asked = pa.Table.from_pylist(rows, schema=ASKED)
    first_s = max(min(job.submit_s for job in pending), now_s - HISTORY_S)
    with store.connect() as db:
        store.view(db, "jobs", _COLUMNS)
        ended = ended_runs(db, first_s, now_s)
    times = expected_run_s(asked, ended).tolist()
    return {job.job_id: run_s for job, run_s in zip(pending, times, strict=True) if run_s == run_s}


class _Past:
    """Ended runs in order of group and time."""

    def __init__(self, group: Ints, end_s: Ints, run_s: Floats) -> None:
        order = np.argsort(group * _WIDTH + end_s, kind="stable")
        self.key, self.run_s = (group * _WIDTH + end_s)[order], run_s[order]

    def median(self, group: Ints, submit_s: Ints, newest: int) -> Floats:
        """(n,) median of the newest runs of the group that had ended before; NaN where there is none."""
        begin = np.searchsorted(self.key, group * _WIDTH + np.maximum(submit_s - HISTORY_S, 0))
        end = np.searchsorted(self.key, group * _WIDTH + submit_s)
        count = np.minimum(end - begin, newest)
        known = np.flatnonzero(count)
        found = np.full(len(group), np.nan)
        if len(known):
            place = end[known, None] - 1 - np.arange(newest)
            is_own = np.arange(newest) < count[known, None]
            runs = np.sort(np.where(is_own, self.run_s[np.maximum(place, 0)], np.inf), axis=1)
            row, size = np.arange(len(known)), count[known]
            found[known] = (runs[row, (size - 1) // 2] + runs[row, size // 2]) / 2
        return found


def _numbers(table: pa.Table, name: str) -> Ints:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def _times(table: pa.Table, name: str) -> Ints:
    return np.clip(_numbers(table, name), 0, _WIDTH - 1)


def _groups(asked: pa.Table, ended: pa.Table, names: tuple[str, ...]) -> Ints:
    """(n_asked + n_ended,) a number for each different combination of values; 0 for all without names."""
    group = np.zeros(len(asked) + len(ended), dtype=np.int64)
    for name in names:
        column = pa.chunked_array([*asked[name].chunks, *ended[name].chunks], type=ASKED.field(name).type)
        codes = column.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
        group = np.unique(group * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return group
