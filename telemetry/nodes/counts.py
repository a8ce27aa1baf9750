"""Demand of node sets as power runs saw it (table `node_counts`), and the series of it with accounting."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from almanac.actions_config import NodeSet
from almanac.units import DAY_S
from telemetry.nodes.demand import Accounted, accounted_demand
from telemetry.nodes.runs import MINUTE_S, Floats, Tick, no_tick
from telemetry.nodes.series import NodeSeries, marked_series
from telemetry.slurm.hostlist import MAX_HOSTS
from telemetry.slurm.node_sets import LiveDemand
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.schema import NODE_COUNTS

TABLE = "node_counts"
COUNTED = ("time_s", "total", "active", "wanted", "asleep")
LIVE_HOLD_MIN = 20
"""A value that a power run saw holds for at most this long: two periods of its timer."""
TOTAL_HOLD_MIN = 1440
"""A total holds longer: nodes that are down are seldom repaired within minutes."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class NodeCounts:
    """What power runs saw of one node set, in order of time: each (n,). queued_node_min: NaN where not known."""

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
    """What power runs saw in [start_s, end_s); rows that cannot be are left out. Raises StoreError."""
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
        name: _held(live.time_s, getattr(live, name), begin_s, size, LIVE_HOLD_MIN)
        for name in ("active", "wanted", "queued_node_min")
    }
    total = _held(live.time_s, live.total, begin_s, size, TOTAL_HOLD_MIN)
    active = np.where(np.isnan(accounted.active), seen["active"], accounted.active)
    wanted = np.where(np.isnan(seen["wanted"]), accounted.wanted, seen["wanted"])
    total = np.fmax(np.where(np.isnan(total), len(set(names)), total), active)
    is_empty = total < 1
    active, wanted, total = (np.where(is_empty, np.nan, values) for values in (active, np.fmin(wanted, total), total))
    wanted = np.where(np.isnan(active), np.nan, wanted)
    queued = np.where(np.isnan(seen["queued_node_min"]), accounted.queued, seen["queued_node_min"])
    queued = np.where(np.isnan(active), np.nan, queued)
    return marked_series(np.datetime64(begin_s // MINUTE_S, "m"), active, total, wanted, accounted.counts, queued)


def _held(time_s: Ints, values: NDArray[Any], start_s: int, size: int, most_min: int) -> Floats:
    """(size,) the last value at or before each minute, NaN where there is none within most_min minutes."""
    if not len(time_s):
        return np.full(size, np.nan)
    minutes = start_s + np.arange(size) * MINUTE_S
    place = np.searchsorted(time_s, minutes, side="right") - 1
    age_s = minutes - time_s[np.maximum(place, 0)]
    is_held = (place >= 0) & (age_s < most_min * MINUTE_S)
    return np.where(is_held, values[np.maximum(place, 0)].astype(float), np.nan)
