"""The best layout in hindsight: the same for the whole trace, chosen with the trace's own jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, sub

from advisor.mig.replay import PoolJob, homes_of, total_wait_s
from advisor.mig.sizes import Counts, Sizes


@dataclass(frozen=True)
class StaticLayout:
    """A layout for each GPU (instances by size), and the mean wait of the trace on it."""

    gpus: tuple[Counts, ...]
    wait_s: float


def best_static(jobs: Sequence[PoolJob], sizes: Sizes, gpus: int) -> StaticLayout:
    """The best of all static layouts without raises; exact.

    Without raises a job waits for its own size only, so that sizes do not affect each other once it is known which of
    them exist. The least wait over all numbers of instances that the GPUs can have is then a sum over sizes.
    """
    curves = _Curves(jobs, len(sizes.shapes))
    wait_s, counts = math.inf, (0,) * (len(sizes.shapes) - 1) + (gpus,)
    for each in reachable_counts(sizes, gpus)[-1]:
        found = curves.wait_s(each, wait_s)
        if found < wait_s:
            wait_s, counts = found, each
    return StaticLayout(_gpus_of(sizes, counts, gpus), wait_s / max(1, len(jobs)))


@cache
def reachable_counts(sizes: Sizes, gpus: int) -> tuple[frozenset[Counts], ...]:
    """All numbers of instances that 0, 1, ... GPUs can have, each with nothing to add."""
    found = [frozenset([(0,) * len(sizes.shapes)])]
    for _ in range(gpus):
        found.append(frozenset(tuple(map(add, counts, layout)) for counts in found[-1] for layout in sizes.layouts))
    return tuple(found)


def _gpus_of(sizes: Sizes, counts: Counts, gpus: int) -> tuple[Counts, ...]:
    """A layout for each GPU with these instances together."""
    chosen: list[Counts] = []
    for level in reversed(reachable_counts(sizes, gpus)[:-1]):
        layout = next(each for each in sizes.layouts if tuple(map(sub, counts, each)) in level)
        counts = tuple(map(sub, counts, layout))
        chosen.append(layout)
    return tuple(chosen)


def best_static_with_raises(
    jobs: Sequence[PoolJob], sizes: Sizes, gpus: int, starts: Sequence[Sequence[Counts]]
) -> StaticLayout:
    """The best static layout with raises that a local search finds, from several starts.

    A step gives one GPU another layout; the search ends where no step helps.
    """
    tried: dict[Counts, float] = {}
    best: tuple[float, tuple[Counts, ...]] = (math.inf, ())
    for start in starts:
        found = _descend(jobs, sizes, tuple(start), tried)
        best = min(best, found)
    return StaticLayout(best[1], best[0] / max(1, len(jobs)))


def _descend(
    jobs: Sequence[PoolJob], sizes: Sizes, gpus: tuple[Counts, ...], tried: dict[Counts, float]
) -> tuple[float, tuple[Counts, ...]]:
    now = _tried(jobs, gpus, tried, math.inf)
    while True:
        steps = []
        for old in sorted(set(gpus)):
            place = gpus.index(old)
            for new in sizes.layouts:
                changed = (*gpus[:place], new, *gpus[place + 1 :])
                steps.append((_tried(jobs, changed, tried, now), changed))
        wait_s, changed = min(steps)
        if wait_s >= now:
            return now, gpus
        now, gpus = wait_s, changed


def _tried(jobs: Sequence[PoolJob], gpus: Sequence[Counts], tried: dict[Counts, float], limit_s: float) -> float:
    counts = tuple(map(sum, zip(*gpus, strict=True)))
    if counts not in tried:
        tried[counts] = total_wait_s(counts, jobs, raises=True, limit_s=limit_s)
    return tried[counts]


class _Curves:
    """The wait of each size's jobs by number of instances, computed where it is asked for."""

    def __init__(self, jobs: Sequence[PoolJob], sizes: int) -> None:
        self._jobs = jobs
        self._sizes = sizes
        self._present = {job.size for job in jobs}
        self._found: dict[tuple[int, int, int], float] = {}

    def wait_s(self, counts: Counts, limit_s: float) -> float:
        members = [0] * self._sizes
        for size, home in enumerate(homes_of(counts)):
            if size in self._present and home is None:
                return math.inf
            members[home or 0] |= 1 << size
        total = 0.0
        for size in reversed(range(self._sizes)):
            if counts[size]:
                total += self._of(size, counts[size], members[size])
                if total >= limit_s:
                    return math.inf
        return total

    def _of(self, size: int, count: int, members: int) -> float:
        key = (size, count, members)
        if key not in self._found:
            jobs = [job for job in self._jobs if members >> job.size & 1]
            counts = [count if each == size else 0 for each in range(self._sizes)]
            self._found[key] = total_wait_s(counts, jobs, raises=False)
        return self._found[key]
