"""Which layouts would have served the expected jobs best: a local search over nodes of one model. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

from advisor.mig.sizes import Counts, Sizes

NodeCounts = tuple[Counts, ...]
"""Instances of each size, by GPU, sorted."""


@dataclass(frozen=True)
class Step:
    """Nodes that get other layouts. wait_s: the expected wait with this and all steps before."""

    old: NodeCounts
    new: NodeCounts
    nodes: int
    wait_s: float


@dataclass
class LayoutSearch:
    """Greedy descent from the present layouts: each step gives the nodes of one kind the layout that saves most.

    fixed: instances of nodes that cannot change. groups: number of nodes that can change, by layout. needed: sizes that
    must stay. cost: expected wait of instances by size, infinite above its second argument. at_once: nodes per step.
    """

    sizes: Sizes
    fixed: Counts
    groups: dict[NodeCounts, int]
    needed: frozenset[int]
    cost: Callable[[Counts, float], float]
    least_gain: Callable[[float], float]
    most_nodes: int
    at_once: int = 1
    _planned: dict[tuple[NodeCounts, NodeCounts], int] = field(default_factory=dict)

    def run(self) -> tuple[float, list[Step]]:
        """The wait with the present layouts, and the changes: at most most_nodes nodes, each once."""
        self._planned = {(layout, layout): count for layout, count in self.groups.items()}
        counts = self.fixed
        for layout, count in self.groups.items():
            counts = _plus(counts, layout, count)
        start_s = now_s = self.cost(counts, math.inf)
        while (found := self._best(counts, now_s)) is not None:
            now_s, counts, kind, new, number = found
            self._planned[kind] -= number
            self._planned[kind[0], new] = self._planned.get((kind[0], new), 0) + number
        steps = [
            Step(old, new, count, now_s) for (old, new), count in sorted(self._planned.items()) if count and old != new
        ]
        return start_s, steps

    def _best(
        self, counts: Counts, now_s: float
    ) -> tuple[float, Counts, tuple[NodeCounts, NodeCounts], NodeCounts, int] | None:
        touched = sum(count for (old, new), count in self._planned.items() if old != new)
        best = None
        worth_s = math.inf
        for kind, count in sorted(self._planned.items()):
            old, planned = kind
            number = min(self.at_once, count)
            is_fresh = old == planned
            if not number or (is_fresh and touched + number > self.most_nodes):
                continue
            limit_s = min(worth_s, now_s - (self.least_gain(now_s) if is_fresh else now_s * 0.001))
            for new in candidates(self.sizes, planned):
                changed = _plus(_plus(counts, planned, -number), new, number)
                if any(changed[size] <= 0 for size in self.needed):
                    continue
                wait_s = self.cost(changed, limit_s)
                if wait_s < limit_s:
                    worth_s = limit_s = wait_s
                    best = (wait_s, changed, kind, new, number)
        return best


def candidates(sizes: Sizes, layout: NodeCounts) -> Iterator[NodeCounts]:
    """Other layouts of a node: one GPU changed, or all GPUs alike."""
    seen = {layout}
    for place in dict(zip(layout, range(len(layout)), strict=True)).values():
        for new in sizes.layouts:
            found = tuple(sorted((*layout[:place], new, *layout[place + 1 :])))
            if found not in seen:
                seen.add(found)
                yield found
    for new in sizes.layouts:
        found = (new,) * len(layout)
        if found not in seen:
            seen.add(found)
            yield found


def _plus(counts: Counts, layout: Sequence[Counts], number: int) -> Counts:
    for gpu in layout:
        counts = tuple(map(add, counts, (each * number for each in gpu)))
    return counts
