"""Runs on the nodes of a node set, and the highest sum of overlapping spans per minute. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from almanac.units import DAY_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tick = Callable[[float, float, str], None]

MINUTE_S = 60
MAX_PAIRS = 4_000_000
"""Nodes of runs that are in memory at once, unless a single hour has more."""


def no_tick(done: float, total: float, note: str) -> None:
    """Shows no progress."""


@dataclass(frozen=True)
class NodeRuns:
    """Runs that used nodes of a set, in order of their start: [start_s, end_s), and which of the set's nodes.

    nodes: for each different node list the set's nodes in it, by index; node_list: (n_runs,) which of them.
    """

    start_s: Ints
    end_s: Ints
    node_list: Ints
    nodes: tuple[NDArray[np.int32], ...]

    def __len__(self) -> int:
        return len(self.start_s)

    def windows(self, start_s: int, end_s: int) -> Iterator[tuple[int, int]]:
        """[start_s, end_s) cut at full minutes into parts of a day, or less where a part would have too many pairs."""
        sizes = np.array([len(nodes) for nodes in self.nodes], dtype=np.int64)
        low_s = start_s
        while low_s < end_s:
            length_s = DAY_S
            while length_s > MINUTE_S * 60:
                chosen = (self.start_s < low_s + length_s) & (self.end_s > low_s)
                if sizes[self.node_list[chosen]].sum() <= MAX_PAIRS:
                    break
                length_s = length_s // (2 * MINUTE_S) * MINUTE_S
            yield low_s, min(low_s + length_s, end_s)
            low_s += length_s

    def pairs(self, low_s: int, high_s: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Run, node, start, and end of each node of each run within [low_s, high_s), times cut to it."""
        chosen = np.flatnonzero((self.start_s < high_s) & (self.end_s > low_s))
        lists = [self.nodes[which] for which in self.node_list[chosen].tolist()]
        sizes = np.fromiter(map(len, lists), np.int64, len(lists))
        node = np.concatenate(lists).astype(np.int64) if lists else np.empty(0, np.int64)
        run = np.repeat(chosen, sizes)
        return run, node, np.maximum(self.start_s[run], low_s), np.minimum(self.end_s[run], high_s)


def in_use_per_minute(runs: NodeRuns, start_s: int, end_s: int, tick: Tick = no_tick) -> Floats:
    """(n_minutes,) nodes in use, the highest of the seconds of each minute of [start_s, end_s), whole minutes.

    Part by part, so that memory is bounded.
    """
    parts = []
    for low_s, high_s in runs.windows(start_s, end_s):
        tick(low_s - start_s, end_s - start_s, "nodes in use")
        _, node, begin, until = runs.pairs(low_s, high_s)
        begin, until, _ = merged(node, begin, until)
        parts.append(highest_per_minute(begin, until, np.ones(len(begin)), low_s, high_s))
    return np.concatenate(parts) if parts else np.empty(0)


def merged(node: Ints, begin: Ints, until: Ints) -> tuple[Ints, Ints, Ints]:
    """Spans in which a node is in use, of spans in which a job uses it: those that touch or overlap become one.

    Begin and end of each, and the place of the given span that begins it.
    """
    if not len(node):
        return begin, until, np.empty(0, dtype=np.int64)
    order = np.lexsort((begin, node))
    node, begin, until = node[order], begin[order], until[order]
    # Each node's times are moved above those of the nodes before it, so that one running maximum serves all.
    width = int(until.max() - begin.min()) + 1
    reached = np.maximum.accumulate(until + node * width) - node * width
    first = np.flatnonzero(np.r_[True, (node[1:] != node[:-1]) | (begin[1:] > reached[:-1])])
    return begin[first], reached[np.r_[first[1:] - 1, len(node) - 1]], order[first]


def highest_per_minute(begin: Ints, until: Ints, amount: Floats, start_s: int, end_s: int) -> Floats:
    """(n_minutes,) highest sum of the amounts of the spans [begin, until) in the seconds of each minute."""
    size = (end_s - start_s) // MINUTE_S
    inside = (begin < end_s) & (until > start_s) & (until > begin)
    begin, until, amount = np.maximum(begin[inside], start_s), until[inside], amount[inside]
    if not len(begin):
        return np.zeros(size)
    is_end = until < end_s
    times = np.concatenate([begin, until[is_end]]) - start_s
    seconds, place = np.unique(times, return_inverse=True)
    levels = np.cumsum(np.bincount(place, np.concatenate([amount, -amount[is_end]]), len(seconds)))
    highest = np.full(size, -np.inf)
    np.maximum.at(highest, seconds // MINUTE_S, levels)
    # A minute begins with the level after the last change at or before it.
    last = np.searchsorted(seconds, np.arange(size) * MINUTE_S, side="right") - 1
    carried = np.where(last >= 0, levels[np.maximum(last, 0)], 0.0)
    return np.asarray(np.maximum(highest, carried))
