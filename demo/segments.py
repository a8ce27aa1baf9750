"""Which GPU is held by which run in which hour, as stretches of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demo.counters import Segments, mix
from demo.plan import SitePlan
from demo.profile import Ints

HOUR_MS = 3_600_000
_BITS = np.array([bin(mask).count("1") for mask in range(1 << 8)])  # eight GPUs a node at most


@dataclass(frozen=True)
class Holdings:
    """One entry per (run, node), by node and time; times in ticks of the node's scrapes.

    Tick m of a node is at m * interval + its offset. run is len(runs) for a node that nobody holds. place: number of
    the node within its run. gap_ticks: ticks since the node's GPUs were last held (from the span's start on).
    """

    run: Ints
    node: Ints
    place: Ints
    first_tick: Ints
    end_tick: Ints
    gap_ticks: Ints


@dataclass(frozen=True)
class Timeline:
    """Holdings, the scrape offset of each node in ms, and the holdings of each hour of the span."""

    plan: SitePlan
    holdings: Holdings
    offset_ms: Ints
    hours: int
    by_hour: Ints
    hour_edges: Ints

    def tick_at(self, node: Ints, time_ms: Ints | int) -> Ints:
        """The first tick of each node at or after time_ms."""
        interval_ms = self.plan.shape.interval_s * 1000
        ticks: Ints = -((self.offset_ms[node] - time_ms) // interval_ms)
        return ticks

    def segments(self, hour: int) -> Segments:
        """All stretches of the hour, by host, GPU and time."""
        shape, h = self.plan.shape, self.holdings
        held = np.sort(self.by_hour[self.hour_edges[hour] : self.hour_edges[hour + 1]])
        begin_ms = shape.start_s * 1000 + hour * HOUR_MS
        node, run = h.node[held], h.run[held]
        first = np.maximum(self.tick_at(node, begin_ms), h.first_tick[held])
        until = np.minimum(self.tick_at(node, min(begin_ms + HOUR_MS, shape.end_s * 1000)), h.end_tick[held])
        mask = np.append(self.plan.runs.gpu_mask, (1 << shape.gpus_per_node) - 1)[run]
        which, gpu = np.nonzero((mask[:, None] >> np.arange(shape.gpus_per_node)) & 1)
        rank = _BITS[mask[which] & ((1 << gpu) - 1)]
        per_node = _BITS[mask[which]]
        length = np.maximum(until - first, 0)[which]
        order = np.lexsort((first[which], gpu, node[which]))
        order = order[length[order] > 0]
        at = which[order]
        return Segments(
            run=run[at], node=node[at], gpu=gpu[order], place=h.place[held][at] * per_node[order] + rank[order],
            first_tick=first[at], first_sample=(first - h.first_tick[held])[at], length=length[order],
            gap_ticks=h.gap_ticks[held][at],
        )  # fmt: skip


def make_timeline(plan: SitePlan) -> Timeline:
    """The site's holdings, cut at the end of its span."""
    shape = plan.shape
    interval_ms = shape.interval_s * 1000
    seeds = np.arange(shape.node_count, dtype=np.uint64) + np.uint64(shape.seed * 1_000_003)
    offset_ms = (mix(seeds) % np.uint64(interval_ms)).astype(np.int64)
    holdings = _holdings(plan, offset_ms, interval_ms)
    hours = -(-(shape.end_s - shape.start_s) // 3600)
    first_hour = _hour_of(plan, holdings.first_tick, holdings.node, offset_ms)
    last_hour = np.minimum(_hour_of(plan, holdings.end_tick - 1, holdings.node, offset_ms), hours - 1)
    spans = np.maximum(last_hour - first_hour + 1, 0)
    entry = np.repeat(np.arange(len(spans)), spans)
    hour = np.arange(len(entry)) - np.repeat(np.cumsum(spans) - spans - first_hour, spans)
    order = np.argsort(hour, kind="stable")
    edges = np.searchsorted(hour[order], np.arange(hours + 1))
    return Timeline(plan, holdings, offset_ms, hours, entry[order], edges)


def _hour_of(plan: SitePlan, tick: Ints, node: Ints, offset_ms: Ints) -> Ints:
    time_ms = tick * plan.shape.interval_s * 1000 + offset_ms[node]
    hour: Ints = (time_ms - plan.shape.start_s * 1000) // HOUR_MS
    return hour


def _holdings(plan: SitePlan, offset_ms: Ints, interval_ms: int) -> Holdings:
    """Every run's nodes. On shared nodes a gap is one in which no GPU of the node is held."""
    runs, shape = plan.runs, plan.shape
    sizes = np.diff(runs.first_node)
    run = np.repeat(np.arange(len(runs)), sizes)
    place = np.arange(len(run)) - np.repeat(runs.first_node[:-1], sizes)
    node, offset = runs.node, offset_ms[runs.node]
    start_s, end_s = runs.start_s[run], np.minimum(runs.end_s[run], shape.end_s)
    first = -((offset - start_s * 1000) // interval_ms)
    end = -((offset - end_s * 1000) // interval_ms)
    order = np.lexsort((first, node))
    run, node, place, first, end = (values[order] for values in (run, node, place, first, end))
    keep = end > first
    run, node, place, first, end = (values[keep] for values in (run, node, place, first, end))
    origin = -((offset_ms - shape.start_s * 1000) // interval_ms)
    before = _previous_end(node, end, origin)
    held = Holdings(run, node, place, first, end, np.maximum(first - before, 0))
    return _with_idle(plan, held, before, origin, offset_ms) if shape.has_idle_rows else held


def _with_idle(plan: SitePlan, held: Holdings, before: Ints, origin: Ints, offset_ms: Ints) -> Holdings:
    """The holdings and, as run len(runs), the stretches in between, which leave no gaps."""
    interval_ms = plan.shape.interval_s * 1000
    gaps = held.gap_ticks > 0
    last = origin.copy()
    np.maximum.at(last, held.node, held.end_tick)
    final = -((offset_ms - plan.shape.end_s * 1000) // interval_ms)
    nodes = np.arange(plan.shape.node_count)
    node = np.concatenate([held.node, held.node[gaps], nodes])
    first = np.concatenate([held.first_tick, before[gaps], last])
    end = np.concatenate([held.end_tick, held.first_tick[gaps], final])
    added = len(node) - len(held.run)
    run = np.concatenate([held.run, np.full(added, len(plan.runs))])
    place = np.concatenate([held.place, np.zeros(added, dtype=np.int64)])
    order = np.lexsort((first, node))
    order = order[(end > first)[order]]
    none = np.zeros(len(order), dtype=np.int64)
    return Holdings(run[order], node[order], place[order], first[order], end[order], none)


def _previous_end(node: Ints, end: Ints, origin: Ints) -> Ints:
    """For each holding, by node and time, the latest tick at which the node was held before, or the span's first."""
    is_first = np.concatenate([[True], node[1:] != node[:-1]]) if len(node) else np.zeros(0, dtype=bool)
    base = node * (int(end.max(initial=0)) + 1)
    latest = np.maximum.accumulate(end + base) - base if len(node) else end
    before = np.concatenate([[0], latest[:-1]]) if len(node) else end
    return np.where(is_first, origin[node], before)
