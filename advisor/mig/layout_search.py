"""Which layouts would have served the expected jobs best: a local search over nodes of one model. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

from advisor.mig.sizes import Counts, Sizes

NodeCounts = tuple[Counts, ...]
"""Instances of each size, by GPU, sorted."""


_Planned = dict[tuple[NodeCounts, NodeCounts], int]
"""Number of nodes by present and planned layout."""


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
    _planned: _Planned = field(default_factory=dict)

    def run(self, starts: Sequence[Sequence[NodeCounts]] = ()) -> tuple[float, list[Step]]:
        """The wait with the present layouts, and the changes: at most most_nodes nodes, each once.

        starts: layouts for all nodes that can change, to begin the descent at beside the present ones.
        """
        present = {(layout, layout): count for layout, count in self.groups.items()}
        start_s = self.cost(self._total(present), math.inf)
        best = self._descend(present, start_s)
        for start in starts:
            planned = _matched(self.groups, start)
            found = self._reverted(*self._descend(planned, self.cost(self._total(planned), math.inf)))
            gained_s = best[0] - found[0]
            more = _changed(found[1]) - _changed(best[1])
            if gained_s > 0 and gained_s > more * self.least_gain(found[0]) and _changed(found[1]) <= self.most_nodes:
                best = found
        now_s, planned = best
        steps = [Step(old, new, count, now_s) for (old, new), count in sorted(planned.items()) if count and old != new]
        return start_s, steps

    def _descend(self, planned: dict[tuple[NodeCounts, NodeCounts], int], now_s: float) -> tuple[float, _Planned]:
        self._planned = planned
        counts = self._total(planned)
        while (found := self._best(counts, now_s)) is not None:
            now_s, counts, kind, new, number = found
            self._planned[kind] -= number
            self._planned[kind[0], new] = self._planned.get((kind[0], new), 0) + number
        return now_s, self._planned

    def _reverted(self, now_s: float, planned: _Planned) -> tuple[float, _Planned]:
        """Without the changes that do not pay for themselves."""
        for kind in sorted(kind for kind, count in planned.items() if count and kind[0] != kind[1]):
            while planned[kind]:
                number = min(self.at_once, planned[kind])
                trial = dict(planned)
                trial[kind] -= number
                trial[kind[0], kind[0]] = trial.get((kind[0], kind[0]), 0) + number
                counts = self._total(trial)
                limit_s = now_s + self.least_gain(now_s) * number
                if any(counts[size] <= 0 for size in self.needed) or (wait_s := self.cost(counts, limit_s)) >= limit_s:
                    break
                now_s, planned = wait_s, trial
        return now_s, planned

    def _total(self, planned: _Planned) -> Counts:
        counts = self.fixed
        for (_, new), count in planned.items():
            counts = _plus(counts, new, count)
        return counts

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


def proportional(sizes: Sizes, busy: Sequence[float], gpus: int) -> list[Counts]:
    """A layout for each GPU: instances in proportion to how many of each size are busy on average.

    The greatest factor on `busy` is taken that the GPUs can hold, filling GPU by GPU with the layout that covers most.
    """
    low, high, found = 0.0, 1.0, [sizes.layouts[-1]] * gpus
    while high < 1e6 and (more := _covered(sizes, [high * each for each in busy], gpus)) is not None:
        low, high, found = high, high * 2, more
    for _ in range(12):
        middle = (low + high) / 2
        more = _covered(sizes, [middle * each for each in busy], gpus)
        low, high, found = (low, middle, found) if more is None else (middle, high, more)
    return found


def _covered(sizes: Sizes, needed: Sequence[float], gpus: int) -> list[Counts] | None:
    """Layouts that hold at least so many instances of each size; None where these GPUs cannot."""
    left = [math.ceil(each - 1e-9) for each in needed]
    chosen = []
    for _ in range(gpus):
        best = max(
            sizes.layouts,
            key=lambda layout: sum(
                min(have, want) * slices for have, want, slices in zip(layout, left, sizes.compute, strict=True)
            ),
        )
        chosen.append(best)
        left = [max(0, want - have) for have, want in zip(best, left, strict=True)]
    return None if any(left) else chosen


def _matched(groups: dict[NodeCounts, int], wanted: Sequence[NodeCounts]) -> _Planned:
    """Nodes that have a wanted layout keep it; the others get those that are left, in order."""
    left: dict[NodeCounts, int] = {}
    for layout in wanted:
        left[layout] = left.get(layout, 0) + 1
    planned: _Planned = {}
    for layout, count in groups.items():
        kept = min(count, left.get(layout, 0))
        if kept:
            planned[layout, layout] = kept
            left[layout] -= kept
    rest = [layout for layout, count in sorted(left.items()) for _ in range(count)]
    for layout, count in sorted(groups.items()):
        for _ in range(count - planned.get((layout, layout), 0)):
            new = rest.pop(0) if rest else layout
            planned[layout, new] = planned.get((layout, new), 0) + 1
    return planned


def _changed(planned: _Planned) -> int:
    return sum(count for (old, new), count in planned.items() if old != new)


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
