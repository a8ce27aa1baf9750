"""Nodes of a node set in use, and wanted by pending jobs, per minute of any past span, from accounting.

The value of a minute is the highest of its seconds, as in an imported series. A run uses its nodes in [start, end), for
a second at least; a node counts once, however many jobs share it. A suspended job keeps its nodes: accounting records
for how long it was suspended, but not when. A job is wanted from when it is eligible (from its submission where that is
not recorded) until it starts or is canceled, see `telemetry.nodes.waits`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from almanac.actions_config import NodeSet
from almanac.records import Counts
from almanac.units import DAY_S, printable
from telemetry.nodes.runs import (
    MINUTE_S,
    Floats,
    NodeRuns,
    Tick,
    highest_per_minute,
    in_use_per_minute,
    merged,
    no_tick,
)
from telemetry.nodes.waits import NodeWaits, queued_per_minute, waits_of
from telemetry.run_times import ASKED, GPUS, ended_runs, expected_run_s
from telemetry.slurm.host_index import HostIndex
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.job_columns import Bools, JobColumns, TextColumn

RUNAWAY_S = DAY_S
"""A run without an end that is past its time limit by more than this ends there: its end was never recorded."""
SILENCE_S = 7 * DAY_S
"""Where no job of the whole cluster was submitted or ran for so long, accounting is taken to be lost."""
_COLUMNS = (
    "submit_s", "eligible_s", "start_s", "end_s", "time_limit_s", "partition", "constraints", "node_count", "node_list",
    "cpu_count", "gpu_count", "gpu_count_req", "gpu_share_count", "user", "name_key",
)  # fmt: skip
_NUMBERS = (
    "submit_s",
    "eligible_s",
    "start_s",
    "end_s",
    "time_limit_s",
    "node_count",
    "cpu_count",
    "gpus",
    "gpu_share_count",
)
_TEXTS = ("node_list", "partition", "constraints", "user", "name_key")
_KNOWN = """SELECT min(end_s) FILTER (WHERE start_s IS NOT NULL),
            max(greatest(submit_s, coalesce(start_s, 0), coalesce(end_s, 0))) FROM jobs"""
_ROWS = f"""SELECT *, {GPUS} AS gpus FROM jobs
            WHERE submit_s < $end_s AND (end_s IS NULL OR end_s >= $start_s)"""
UNREADABLE, REVERSED, NO_NODES = "node list cannot be read", "end before start", "ran, but has no node list"
RUNAWAY = "no end recorded: taken to end at the time limit"


@dataclass(frozen=True)
class Accounted:
    """Demand per minute from start_s on. active, wanted: (n_minutes,) nodes; NaN where accounting knows nothing.

    queued: (n_minutes,) node-minutes that pending jobs will likely run for, also NaN where no run time can be said.
    known_s: the span [first, last) for which accounting is complete; (0, 0): none. counts: job records of the span.
    """

    start_s: int
    active: Floats
    wanted: Floats
    queued: Floats
    runs: NodeRuns
    known_s: tuple[int, int] = (0, 0)
    counts: Counts = field(default_factory=Counts)


def accounted_demand(
    store: ClusterStore, node_set: NodeSet, names: Collection[str], start_s: int, end_s: int,
    tick: Tick = no_tick,
) -> Accounted:  # fmt: skip
    """Demand of the nodes of these names over the whole minutes that [start_s, end_s) touches.

    Accounting is complete from the first end of any job on, up to the watermark of sacct; without a watermark, up to
    the newest time of any job. Raises StoreError.
    """
    start_s, end_s = start_s // MINUTE_S * MINUTE_S, -(-end_s // MINUTE_S) * MINUTE_S
    size = max(0, end_s - start_s) // MINUTE_S
    jobs, ended, known_s = _read(store, start_s, end_s)
    counts = Counts(seen=len(jobs.number["start_s"]))
    jobs = _closed(jobs, known_s[1], counts)
    is_started = _is_started(jobs)
    started = jobs.where(is_started)
    nodes = _nodes_of(started.text["node_list"], names, counts)
    ran = started.where(started.text["node_list"].spread([len(one) > 0 for one in nodes]).astype(bool))
    runs = _runs(ran, nodes)
    counts.kept = counts.seen - counts.dropped.total()
    active, wanted, queued = (np.full(size, np.nan) for _ in range(3))
    first, last = -(-max(start_s, known_s[0]) // MINUTE_S), min(end_s, known_s[1]) // MINUTE_S
    if last > first:
        inside = slice(first - start_s // MINUTE_S, last - start_s // MINUTE_S)
        active[inside] = in_use_per_minute(runs, first * MINUTE_S, last * MINUTE_S, tick)
        waits = waits_of(jobs, is_started, ran, node_set, known_s[1])
        level = highest_per_minute(waits.begin_s, waits.until_s, waits.nodes, first * MINUTE_S, last * MINUTE_S)
        wanted[inside] = np.clip(np.ceil(level - 1e-6), 0, len(set(names)))
        minutes = expected_run_s(_asked(jobs, waits), ended) / MINUTE_S
        queued[inside] = queued_per_minute(waits, minutes, len(set(names)), first * MINUTE_S, last * MINUTE_S)
        for low_s, high_s in _silences(jobs, *known_s):
            lost = slice(max(0, -(-(low_s - start_s) // MINUTE_S)), max(0, (high_s - start_s) // MINUTE_S))
            active[lost] = wanted[lost] = queued[lost] = np.nan
    return Accounted(start_s, active, wanted, queued, runs, known_s, counts)


def _read(store: ClusterStore, start_s: int, end_s: int) -> tuple[JobColumns, pa.Table, tuple[int, int]]:
    """The records that matter in [start_s, end_s), the runs that ended by then, and where accounting is complete."""
    with store.connect() as db:
        store.view(db, "jobs", _COLUMNS)
        known = _known(store, db)
        rows: pa.Table = db.sql(_ROWS, params={"start_s": start_s, "end_s": end_s}).to_arrow_table()
        ended = ended_runs(db, start_s, end_s)
    return JobColumns.of(rows, _NUMBERS, _TEXTS), ended, known


def _asked(jobs: JobColumns, waits: NodeWaits) -> pa.Table:
    """Of schema ASKED."""
    texts = [jobs.text[name].array(waits.job) for name in ("user", "name_key")]
    numbers = [pa.array(jobs.number[name][waits.job], pa.int64()) for name in ("gpus", "submit_s", "time_limit_s")]
    return pa.Table.from_arrays([*texts, *numbers], schema=ASKED)


def _closed(jobs: JobColumns, known_until_s: int, counts: Counts) -> JobColumns:
    """The jobs whose times make sense; what still runs ends at known_until_s, a runaway at its time limit."""
    start, end, limit = (jobs.number[name] for name in ("start_s", "end_s", "time_limit_s"))
    is_reversed = (start >= 0) & (end >= 0) & (end < start)
    counts.drop(REVERSED, int(is_reversed.sum()))
    is_open = (start >= 0) & (end < 0)
    is_runaway = is_open & (limit > 0) & (start + limit + RUNAWAY_S < known_until_s)
    counts.note(RUNAWAY, int(is_runaway.sum()))
    end = np.where(is_runaway, start + limit, np.where(is_open, np.maximum(known_until_s, start), end))
    number = {**jobs.number, "end_s": np.where(start >= 0, np.maximum(end, start + 1), end)}
    return JobColumns(number, jobs.text).where(~is_reversed)


def _is_started(jobs: JobColumns) -> Bools:
    """A job that is canceled while it pends has a start on some releases: that of its end, without nodes."""
    start, end, node_list = jobs.number["start_s"], jobs.number["end_s"], jobs.text["node_list"]
    is_named = node_list.spread([text != "" for text in node_list.texts]).astype(bool)
    return np.asarray((start >= 0) & (is_named | (end > start + 1)))


def _silences(jobs: JobColumns, first_s: int, last_s: int) -> list[tuple[int, int]]:
    """Spans of [first_s, last_s) without any job of the cluster that are longer than SILENCE_S."""
    submit, start, end = (jobs.number[name] for name in ("submit_s", "start_s", "end_s"))
    ran = start >= 0
    begin = np.concatenate([submit, start[ran], [first_s, last_s]])
    until = np.concatenate([submit + 1, end[ran], [first_s, last_s]])
    begin, until, _ = merged(np.zeros(len(begin), dtype=np.int64), begin, until)
    gaps = zip(until[:-1].tolist(), begin[1:].tolist(), strict=True)
    return [(max(low, first_s), min(high, last_s)) for low, high in gaps if high - low > SILENCE_S]


def known_span(store: ClusterStore) -> tuple[int, int]:
    """The span [first, last) for which accounting is complete; (0, 0) where it is for none. Raises StoreError."""
    with store.connect() as db:
        store.view(db, "jobs", ("submit_s", "start_s", "end_s"))
        return _known(store, db)


def _known(store: ClusterStore, db: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    [(first, newest)] = db.sql(_KNOWN).fetchall()
    mark = store.watermark("sacct")
    return (0, 0) if first is None else (int(first), int(newest if mark is None else mark))


def _nodes_of(column: TextColumn, names: Collection[str], counts: Counts) -> tuple[NDArray[np.int32], ...]:
    """For each different node list the nodes of the set in it, by their place among the sorted names."""
    index = HostIndex(names)
    often = np.bincount(column.codes, minlength=len(column.texts)).tolist()
    found = []
    for text, number in zip(column.texts, often, strict=True):
        places = np.empty(0, dtype=np.int32)
        try:
            places = index.places(text) if number else places
        except ValueError:
            counts.drop(UNREADABLE, number, printable(text, 80))
        if not text:
            counts.drop(NO_NODES, number)
        found.append(places)
    return tuple(found)


def _runs(ran: JobColumns, nodes: tuple[NDArray[np.int32], ...]) -> NodeRuns:
    order = np.argsort(ran.number["start_s"], kind="stable")
    start, end = ran.number["start_s"], ran.number["end_s"]
    return NodeRuns(start[order], end[order], ran.text["node_list"].codes[order], nodes)
