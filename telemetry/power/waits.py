"""Waits of pending jobs for nodes of a node set, as known at each time, and the likely run time of pending jobs. Pure.

A job's later fate decides nothing: neither the nodes that it gets, nor whether it starts at all. Its likely run time is
the median of the newest runs of its job family that had ended before it was submitted, else of its user, else of
everybody; at most its time limit. Live and in any past span it is the same value, since nothing after the submission
enters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from almanac.actions_config import NodeSet
from almanac.tiers import required_features
from slurm.queued_job import QueuedJob
from telemetry.power.series import Floats, highest_per_minute
from telemetry.store.store import ClusterStore

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TextColumn:
    """A column of texts: (n,) which of the different ones."""

    codes: Ints
    texts: tuple[str, ...]

    def used(self) -> list[str]:
        return [self.texts[code] for code in np.unique(self.codes).tolist()]

    def array(self, rows: Ints) -> pa.Array[Any]:
        """Return (n_rows,) the texts of these rows."""
        return pa.array(self.texts, pa.string()).take(pa.array(self.codes[rows], pa.int64()))

    def spread(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return (n,) the value of each row's text."""
        return np.array(values)[self.codes] if len(self.codes) else np.array(values)[:0]


@dataclass(frozen=True)
class JobColumns:
    """Job records as columns; a number that is missing is -1, a text that is missing is empty."""

    number: dict[str, Ints]
    text: dict[str, TextColumn]

    def __len__(self) -> int:
        return len(next(iter(self.number.values())))

    @classmethod
    def of(cls, rows: pa.Table, numbers: Sequence[str], texts: Sequence[str]) -> JobColumns:
        return cls({name: _ints(rows[name]) for name in numbers}, {name: _texts(rows[name]) for name in texts})

    def where(self, chosen: Bools) -> JobColumns:
        return JobColumns(
            {name: values[chosen] for name, values in self.number.items()},
            {name: TextColumn(column.codes[chosen], column.texts) for name, column in self.text.items()},
        )


def _ints(column: Any) -> Ints:
    return np.asarray(column.cast(pa.int64()).fill_null(-1).to_numpy(), dtype=np.int64)


def _texts(column: Any) -> TextColumn:
    encoded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
    return TextColumn(np.asarray(encoded.indices.to_numpy(), dtype=np.int64), tuple(encoded.dictionary.to_pylist()))


Split = Callable[[str], Iterable[str]]

NEVER_S, ALWAYS_S = 2**62, -(2**62)


@dataclass(frozen=True)
class NodeWaits:
    """Waits for nodes of the set: [begin_s, until_s), nodes that the job fills, and which of the jobs it is; (n,)."""

    begin_s: Ints
    until_s: Ints
    nodes: Floats
    job: Ints


def waits_of(jobs: JobColumns, is_started: Bools, ran: JobColumns, node_set: NodeSet, until_s: int) -> NodeWaits:
    """Waits of these jobs. ran: runs on nodes of the set. until_s: up to here what is still pending waits.

    A job waits from when it is eligible until it starts or is canceled. It counts where a run on the set's nodes had
    one of its partitions before, and where runs there required all features that it requires.
    """
    start, end = jobs.number["start_s"], jobs.number["end_s"]
    given_up = np.where(start >= 0, start, np.where(end >= 0, end, until_s))
    begin = np.maximum(np.maximum(jobs.number["eligible_s"], jobs.number["submit_s"]), _fits_from(jobs, ran, node_set))
    until = np.where(is_started, start, given_up)
    waited = np.flatnonzero(begin < until)
    return NodeWaits(begin[waited], until[waited], _filled(jobs, ran, waited, begin[waited]), waited)


def queued_per_minute(waits: NodeWaits, run_min: Floats, most: int, start_s: int, end_s: int) -> Floats:
    """(n_minutes,) node-minutes of the waits in each minute of [start_s, end_s): nodes, at most `most`, x run time.

    run_min: (n_waits,) minutes that each job will likely run for. NaN while one of them is not known.
    """
    is_known = ~np.isnan(run_min)
    amount = np.where(is_known, np.minimum(waits.nodes, most) * np.where(is_known, run_min, 0.0), 0.0)
    level = highest_per_minute(waits.begin_s, waits.until_s, amount, start_s, end_s)
    unknown = highest_per_minute(waits.begin_s, waits.until_s, (~is_known).astype(float), start_s, end_s)
    return np.where(unknown > 0, np.nan, np.maximum(level, 0.0))


def _fits_from(jobs: JobColumns, ran: JobColumns, node_set: NodeSet) -> Ints:
    """(n,) second from which it is known that a job can run on the set: the begin of the first runs like it there."""
    partitions = _first_seen(ran, "partition", lambda text: text.split(","), node_set.partitions)
    features = _first_seen(ran, "constraints", required_features, {node_set.feature} - {""})
    names, constraints = jobs.text["partition"], jobs.text["constraints"]
    in_partition = [
        min((partitions.get(name, NEVER_S) for name in text.split(",")), default=NEVER_S) if text else ALWAYS_S
        for text in names.texts
    ]
    has_features = [
        max((features.get(name, NEVER_S) for name in required_features(text)), default=ALWAYS_S)
        for text in constraints.texts
    ]
    return np.asarray(np.maximum(names.spread(in_partition), constraints.spread(has_features)), dtype=np.int64)


def _first_seen(ran: JobColumns, column: str, split: Split, always: Collection[str]) -> dict[str, int]:
    """Return the start of the first run whose text in this column holds the name; of the set's own names, always."""
    texts = ran.text[column]
    first = np.full(len(texts.texts), NEVER_S)
    np.minimum.at(first, texts.codes, ran.number["start_s"])
    found = dict.fromkeys(always, ALWAYS_S)
    for text, begin_s in zip(texts.texts, first.tolist(), strict=True):
        for name in split(text):
            found[name] = min(found.get(name, NEVER_S), begin_s)
    return found


def _filled(jobs: JobColumns, ran: JobColumns, waited: Ints, begin_s: Ints) -> Floats:
    """Nodes that each job that waited fills: whole ones if it takes several, else its share, as of pending jobs now."""
    nodes = np.maximum(jobs.number["node_count"][waited], 1)
    share = np.zeros(len(nodes))
    for name in ("gpus", "gpu_share_count", "cpu_count"):
        used, most = jobs.number[name][waited], _largest_before(ran, name, begin_s)
        is_known = (most > 0) & (used > 0)
        fitting = np.maximum(1, most // np.maximum(used, 1))
        share = np.maximum(share, np.where(is_known, 1 / fitting, 0.0))
    return np.where((nodes > 1) | (share == 0), nodes, share)


def _largest_before(ran: JobColumns, name: str, times_s: Ints) -> Ints:
    """(n,) GPUs, their shards, or CPUs of a node of the set: the most that a run had per node up to each time; 0: not
    known.
    """
    order = np.argsort(ran.number["start_s"], kind="stable")
    per_node = (ran.number[name] // np.maximum(ran.number["node_count"], 1))[order]
    largest = np.concatenate([[0], np.maximum.accumulate(per_node)]) if len(order) else np.zeros(1, dtype=np.int64)
    return np.asarray(largest[np.searchsorted(ran.number["start_s"][order], times_s, side="right")])


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
    """Return the runs of the view `jobs` that are evidence on submissions in [start_s, end_s), as schema ENDED."""
    span = {"start_s": start_s - HISTORY_S, "end_s": end_s}
    found: pa.Table = db.sql(_ENDED, params=span).to_arrow_table().cast(ENDED)
    return found


def pending_run_s(store: ClusterStore, pending: Sequence[QueuedJob], now_s: int) -> dict[int, float]:
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
