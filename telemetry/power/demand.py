"""Demand of a node set per minute, from accounting and from the counts of power runs, and the use of its nodes.

The value of a minute is the highest of its seconds, as in an imported series. A run uses its nodes in [start, end), for
a second at least; a node counts once, however many jobs share it. A suspended job keeps its nodes: accounting records
for how long it was suspended, but not when. A job is wanted from when it is eligible (from its submission where that is
not recorded) until it starts or is canceled, see `telemetry.power.waits`. Power runs keep what they see in the table
`node_counts`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from almanac.actions_config import NodeSet
from almanac.records import Counts
from almanac.units import DAY_S, printable
from slurm.host_index import HostIndex
from slurm.hostlist import MAX_HOSTS
from slurm.node_sets import LiveDemand
from telemetry.power.series import (
    MINUTE_S,
    Floats,
    Ints,
    NodeRuns,
    NodeSeries,
    Tick,
    highest_per_minute,
    in_use_per_minute,
    marked_series,
    merged,
    no_tick,
)
from telemetry.power.waits import (
    ASKED,
    GPUS,
    Bools,
    JobColumns,
    NodeWaits,
    TextColumn,
    ended_runs,
    expected_run_s,
    queued_per_minute,
    waits_of,
)
from telemetry.store.schema import NODE_COUNTS
from telemetry.store.store import ClusterStore

RUNAWAY_S = DAY_S
"""A run without an end that is past its time limit by more than this ends there: its end was never recorded."""
SILENCE_S = 7 * DAY_S
"""Time without any job of the cluster, submitted or running, after which accounting is taken to be lost."""
_COLUMNS = (
    "submit_s", "eligible_s", "start_s", "end_s", "time_limit_s", "partition", "constraints", "node_count", "node_list",
    "cpu_count", "gpu_count", "gpu_count_req", "gpu_share_count", "user", "name_key",
)  # fmt: skip
_NUMBERS = (
    "submit_s", "eligible_s", "start_s", "end_s", "time_limit_s", "node_count", "cpu_count", "gpus", "gpu_share_count",
)  # fmt: skip
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

    queued: (n_minutes,) node-minutes that pending jobs will likely run for, also NaN if no run time can be predicted.
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
        submit, started_s, ended_s = (jobs.number[name] for name in ("submit_s", "start_s", "end_s"))
        for low_s, high_s in silences(submit, started_s, ended_s, known_s):
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


def silences(submit: Ints, start: Ints, end: Ints, span_s: tuple[int, int]) -> list[tuple[int, int]]:
    """Parts of a span without any job of the cluster that are longer than SILENCE_S. start: -1 for none."""
    first_s, last_s = span_s
    ran = start >= 0
    begin = np.concatenate([submit, start[ran], [first_s, last_s]])
    until = np.concatenate([submit + 1, end[ran], [first_s, last_s]])
    begin, until, _ = merged(np.zeros(len(begin), dtype=np.int64), begin, until)
    gaps = zip(until[:-1].tolist(), begin[1:].tolist(), strict=True)
    return [(max(low, first_s), min(high, last_s)) for low, high in gaps if high - low > SILENCE_S]


def known_span(store: ClusterStore) -> tuple[int, int]:
    """The span [first, last) for which accounting is complete; (0, 0) if there is none. Raises StoreError."""
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


TABLE = "node_counts"
COUNTED = ("time_s", "total", "active", "wanted", "asleep")
LIVE_HOLD_MIN = 20
"""A value that a power run saw holds for at most this long: two periods of its timer."""
TOTAL_HOLD_MIN = 1440
"""A total holds longer: nodes that are down are seldom repaired within minutes."""


@dataclass(frozen=True)
class NodeCounts:
    """Counts of one node set by power runs, in order of time: each (n,). queued_node_min: NaN if not known."""

    time_s: Ints
    total: Ints
    active: Ints
    wanted: Ints
    asleep: Ints
    queued_node_min: Floats

    def __len__(self) -> int:
        return len(self.time_s)


def append_counts(store: ClusterStore, node_set: str, time_s: int, demand: LiveDemand) -> None:
    """Keep what a power run saw. The last one of a minute counts. Raises StoreError."""
    row = {
        "node_set": node_set, "time_s": time_s // MINUTE_S * MINUTE_S,
        "total": demand.total, "active": demand.active, "wanted": demand.wanted, "asleep": demand.asleep,
        "queued_node_min": demand.queued_node_min,
    }  # fmt: skip
    store.write(TABLE, pa.Table.from_pylist([row], schema=NODE_COUNTS))


def read_counts(store: ClusterStore, node_set: str, start_s: int, end_s: int) -> NodeCounts:
    """Read the counts of power runs in [start_s, end_s); impossible rows are left out. Raises StoreError."""
    columns = (*COUNTED, "queued_node_min")
    rows = store.read(TABLE, columns, start_s, end_s, {"node_set": pa.array([node_set])}).sort_by("time_s")
    rows = rows.filter(pc.is_valid(functools.reduce(pc.add, (rows[name] for name in COUNTED))))
    found: dict[str, Any] = {name: np.asarray(rows[name].to_numpy(), dtype=np.int64) for name in COUNTED}
    queued = np.asarray(rows["queued_node_min"].to_numpy(), dtype=np.float64)
    is_sound = (found["total"] <= MAX_HOSTS) & (found["active"] <= found["total"]) & (found["wanted"] <= found["total"])
    is_sound &= np.minimum.reduce([found["active"], found["wanted"], found["asleep"]]) >= 0
    queued = np.where(np.isfinite(queued) & (queued >= 0), queued, np.nan)
    return NodeCounts(**{name: values[is_sound] for name, values in found.items()}, queued_node_min=queued[is_sound])


def demand_series(
    store: ClusterStore, node_set: NodeSet, names: Collection[str], start_s: int, end_s: int,
    tick: Tick = no_tick,
) -> NodeSeries:  # fmt: skip
    """Demand of a node set whose nodes have these names, over the minutes that [start_s, end_s) touches.

    active is that of accounting; what power runs saw fills in where accounting is not complete (the newest jobs are
    not ingested yet). wanted and queued are what power runs saw, where they ran, else those of accounting. total is
    what they saw within a day before, else the number of names, and at least active. Raises StoreError.
    """
    accounted = accounted_demand(store, node_set, names, start_s, end_s, tick)
    return with_counts(store, node_set, names, accounted)


def with_counts(store: ClusterStore, node_set: NodeSet, names: Collection[str], accounted: Accounted) -> NodeSeries:
    """The series of what is accounted and of what power runs saw, as `demand_series` merges them."""
    size, begin_s = len(accounted.active), accounted.start_s
    live = read_counts(store, node_set.name, begin_s - DAY_S, begin_s + size * MINUTE_S)
    seen = {
        name: held(live.time_s, getattr(live, name), begin_s, size, LIVE_HOLD_MIN)
        for name in ("active", "wanted", "queued_node_min")
    }
    total = held(live.time_s, live.total, begin_s, size, TOTAL_HOLD_MIN)
    active = np.where(np.isnan(accounted.active), seen["active"], accounted.active)
    wanted = np.where(np.isnan(seen["wanted"]), accounted.wanted, seen["wanted"])
    total = np.fmax(np.where(np.isnan(total), len(set(names)), total), active)
    is_empty = total < 1
    active, wanted, total = (np.where(is_empty, np.nan, values) for values in (active, np.fmin(wanted, total), total))
    wanted = np.where(np.isnan(active), np.nan, wanted)
    queued = np.where(np.isnan(seen["queued_node_min"]), accounted.queued, seen["queued_node_min"])
    queued = np.where(np.isnan(active), np.nan, queued)
    return marked_series(np.datetime64(begin_s // MINUTE_S, "m"), active, total, wanted, accounted.counts, queued)


def held(time_s: Ints, values: NDArray[Any], start_s: int, size: int, most_min: int) -> Floats:
    """(size,) the last value at or before each minute, NaN where there is none within most_min minutes."""
    if not len(time_s):
        return np.full(size, np.nan)
    minutes = start_s + np.arange(size) * MINUTE_S
    place = np.searchsorted(time_s, minutes, side="right") - 1
    age_s = minutes - time_s[np.maximum(place, 0)]
    is_held = (place >= 0) & (age_s < most_min * MINUTE_S)
    return np.where(is_held, values[np.maximum(place, 0)].astype(float), np.nan)


HOLD_S = 60 * LIVE_HOLD_MIN
"""A count stands until the next one, for at most so long. After that nothing is known."""


@dataclass(frozen=True)
class NodeCount:
    """Nodes of a set at one time. wanted: by pending jobs, not counting those in use."""

    time_s: int
    total: int
    active: int
    wanted: int
    asleep: int


@dataclass(frozen=True)
class NodeUse:
    """A node set over a span. known_s: seconds of it that counts cover; the other fields are of these alone.

    Hours are node-hours. wake_times_s: when fewer nodes were asleep than at the count before; two wake-ups between two
    counts are one. boots: by how many nodes fewer, together. short_min: minutes with nodes asleep while pending jobs
    wanted more nodes than were idle. newest: the last count; None without any. counts: those of the span.
    """

    span_s: int
    known_s: int
    total_hours: float
    active_hours: float
    asleep_hours: float
    wake_times_s: tuple[int, ...]
    short_min: float
    boots: int = 0
    newest: NodeCount | None = None
    counts: NodeCounts | None = field(default=None, repr=False, compare=False)

    @property
    def coverage(self) -> float:
        """Share of the span that counts cover."""
        return self.known_s / self.span_s if self.span_s else 0.0

    @property
    def known_days(self) -> float:
        return self.known_s / 86_400


def node_use(counts: NodeCounts, span_s: tuple[int, int]) -> NodeUse:
    """Add up the counts of one node set, each time once.

    span_s: begin and end; counts outside are not used.
    """
    is_inside = (counts.time_s >= span_s[0]) & (counts.time_s < span_s[1])
    time_s, total, active, wanted, asleep = columns = [getattr(counts, name)[is_inside] for name in COUNTED]
    stood_s = np.diff(time_s, append=span_s[1])
    is_followed = stood_s[:-1] <= HOLD_S
    stood_s = np.minimum(stood_s, HOLD_S)
    idle = np.maximum(total - active - asleep, 0)
    is_short = (asleep > 0) & (wanted > idle)
    # A set that lost nodes lost sleeping ones, too: that is no wake-up.
    woken = -np.diff(asleep) - np.maximum(-np.diff(total), 0)
    return NodeUse(
        span_s=max(span_s[1] - span_s[0], 0),
        known_s=int(stood_s.sum()),
        total_hours=float((total * stood_s).sum() / 3600),
        active_hours=float((active * stood_s).sum() / 3600),
        asleep_hours=float((asleep * stood_s).sum() / 3600),
        wake_times_s=tuple(time_s[1:][is_followed & (woken > 0)].tolist()),
        short_min=float(stood_s[is_short].sum() / 60),
        boots=int(woken[is_followed & (woken > 0)].sum()),
        newest=NodeCount(*(int(values[-1]) for values in columns)) if len(time_s) else None,
        counts=NodeCounts(time_s, total, active, wanted, asleep, counts.queued_node_min[is_inside]),
    )


def load_node_use(store: ClusterStore, span_s: tuple[int, int]) -> dict[str, NodeUse]:
    """Load the use of each node set that has counts in the span, by its name. Raises StoreError."""
    rows = store.read(TABLE, ("node_set", *COUNTED), *span_s).to_pandas().dropna()
    found = {}
    for name, own in rows.sort_values("time_s").groupby("node_set"):
        columns: dict[str, Any] = {column: own[column].to_numpy(dtype=np.int64) for column in COUNTED}
        counts = NodeCounts(**columns, queued_node_min=np.full(len(own), np.nan))
        found[str(name)] = node_use(counts, span_s)
    return found
