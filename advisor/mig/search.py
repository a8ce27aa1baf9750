"""Search the layouts that serve the expected jobs best: a local search over the nodes of one model. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from advisor.mig.states import Counts, Sizes

NodeCounts = tuple[Counts, ...]
"""Instances of each size, by GPU, sorted."""
Layouts = tuple[NodeCounts, ...]
"""The layout of each node that may change."""


@dataclass(frozen=True)
class LayoutSearch:
    """Greedy descent: each step gives one node the layout that saves most.

    present: the nodes that may change, those that should change first in front. is_free: whether each is idle. cost:
    expected wait with these layouts, infinite above its second argument, or where they may not be. least_gain: seconds
    that each changed node must save, by expected wait. most_busy: nodes that may change of those that are not idle.
    """

    sizes: Sizes
    present: Layouts
    is_free: Sequence[bool]
    cost: Callable[[Layouts, float], float]
    least_gain: Callable[[float], float]
    most_nodes: int
    most_busy: int

    def run(self, starts: Sequence[Sequence[NodeCounts]] = ()) -> tuple[float, float, Layouts]:
        """The wait with the present layouts, the wait with the layouts found, and these.

        starts: layouts of all nodes to begin further descents at.
        """
        start_s = self.cost(self.present, math.inf)
        best_s, best = self._descend(self.present, start_s)
        for start in starts:
            planned = self._matched(start)
            if not self._may_be(planned):
                continue
            found_s, found = self._reverted(*self._descend(planned, self.cost(planned, math.inf)))
            more = self._changed(found) - self._changed(best)
            if best_s - found_s > max(0.0, more * self.least_gain(found_s)):
                best_s, best = found_s, found
        return start_s, best_s, best

    def _descend(self, planned: Layouts, now_s: float) -> tuple[float, Layouts]:
        while (found := self._best(planned, now_s)) is not None:
            now_s, planned = found
        return now_s, planned

    def _best(self, planned: Layouts, now_s: float) -> tuple[float, Layouts] | None:
        best = None
        worth_s = math.inf
        for place in self._kinds(planned):
            is_fresh = planned[place] == self.present[place]
            limit_s = min(worth_s, now_s - (self.least_gain(now_s) if is_fresh else now_s * 0.001))
            for new in candidates(self.sizes, planned[place]):
                changed = (*planned[:place], new, *planned[place + 1 :])
                if is_fresh and not self._may_be(changed):
                    break
                wait_s = self.cost(changed, limit_s)
                if wait_s < limit_s:
                    worth_s = limit_s = wait_s
                    best = (wait_s, changed)
        return best

    def _kinds(self, planned: Layouts) -> list[int]:
        """The first node of each present and planned layout."""
        first: dict[tuple[NodeCounts, NodeCounts], int] = {}
        for place, kind in enumerate(zip(self.present, planned, strict=True)):
            first.setdefault(kind, place)
        return sorted(first.values())

    def _reverted(self, now_s: float, planned: Layouts) -> tuple[float, Layouts]:
        """Without the changes that do not pay for themselves."""
        for place in reversed(range(len(planned))):
            if planned[place] != self.present[place]:
                trial = (*planned[:place], self.present[place], *planned[place + 1 :])
                limit_s = now_s + self.least_gain(now_s)
                wait_s = self.cost(trial, limit_s)
                if wait_s < limit_s:
                    now_s, planned = wait_s, trial
        return now_s, planned

    def _matched(self, wanted: Sequence[NodeCounts]) -> Layouts:
        """Nodes that have a wanted layout keep it, the last ones first; the others get the rest, in order."""
        left = list(wanted)
        kept: dict[int, NodeCounts] = {}
        for place in reversed(range(len(self.present))):
            if self.present[place] in left:
                left.remove(self.present[place])
                kept[place] = self.present[place]
        return tuple(
            kept[place] if place in kept else left.pop(0) if left else layout
            for place, layout in enumerate(self.present)
        )

    def _may_be(self, planned: Layouts) -> bool:
        busy = sum(new != old and not free for new, old, free in zip(planned, self.present, self.is_free, strict=True))
        return busy <= self.most_busy and self._changed(planned) <= self.most_nodes

    def _changed(self, planned: Layouts) -> int:
        return sum(new != old for new, old in zip(planned, self.present, strict=True))


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
