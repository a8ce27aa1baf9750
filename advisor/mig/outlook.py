"""What the coming day costs a site with these or those layouts, from the state that it is in. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add

from advisor.mig.forecast import futures
from advisor.mig.layout_search import Layouts, NodeCounts
from advisor.mig.replay import PoolJob, total_wait_s
from advisor.mig.sizes import Counts

RACE = 0.03
"""A layout is given up once it waits longer than the best one so far did, by this part of the whole wait."""


@dataclass(frozen=True)
class Running:
    """A running job. place: of its node. size: of its instance. left_s: seconds that it may run on, equally likely."""

    place: int
    size: int
    left_s: tuple[float, ...]


@dataclass(frozen=True)
class Site:
    """The state at now_s, and the past that the future is drawn from.

    layouts: what each node has, or is drained for. is_drained: by node. waiting: jobs that may be any of these runs, by
    job, first to start first. past: by submit time.
    """

    now_s: float
    layouts: Layouts
    is_drained: tuple[bool, ...]
    running: tuple[Running, ...]
    waiting: tuple[tuple[PoolJob, ...], ...]
    past: tuple[PoolJob, ...]
    window_s: float
    change_s: float
    raises: bool
    needed: frozenset[int]

    def with_layouts(self, places: Sequence[int], layouts: Layouts) -> Layouts:
        """The layouts of all nodes, with others at these places."""
        then = list(self.layouts)
        for place, layout in zip(places, layouts, strict=True):
            then[place] = layout
        return tuple(then)


@dataclass(frozen=True)
class _Day:
    """One day that may come. busy: instances of each node that are not idle now. free_s: when each node is idle."""

    jobs: list[PoolJob]
    busy: list[list[tuple[float, int]]]
    free_s: list[float]


@dataclass
class Outlook:
    """Days that may come, and what they cost. seed: another one gives other days."""

    site: Site
    days: int
    number: int
    seed: int
    jobs: int = 0
    _shares: list[float] = field(default_factory=list)
    _days: list[_Day] = field(default_factory=list)
    _totals: list[Counts] = field(default_factory=list)

    def __post_init__(self) -> None:
        site, rng = self.site, random.Random(self.seed)
        self._totals = [_total(layout) for layout in site.layouts]
        for jobs in futures(site.past, site.now_s, site.window_s, self.days, self.number, rng):
            waiting = [rng.choice(runs)._replace(submit_s=site.now_s) for runs in site.waiting]
            self._days.append(self._day(waiting + jobs, rng))
            self.jobs += len(waiting) + len(jobs)

    def _day(self, jobs: list[PoolJob], rng: random.Random) -> _Day:
        site = self.site
        busy: list[list[tuple[float, int]]] = [[] for _ in site.layouts]
        free_s = [site.now_s] * len(site.layouts)
        left = [list(total) for total in self._totals]
        for each in site.running:
            end_s = site.now_s + rng.choice(each.left_s)
            free_s[each.place] = max(free_s[each.place], end_s)
            if not site.is_drained[each.place] and left[each.place][each.size]:
                left[each.place][each.size] -= 1
                busy[each.place].append((end_s, each.size))
        for place, is_drained in enumerate(site.is_drained):
            if is_drained:
                busy[place] = self._out(free_s[place], self._totals[place])
        return _Day(jobs, busy, free_s)

    def _out(self, free_s: float, total: Counts) -> list[tuple[float, int]]:
        """All instances of a node that changes as soon as it is idle."""
        back_s = free_s + self.site.change_s
        return [(back_s, size) for size, count in enumerate(total) for _ in range(count)]

    def wait_s(self, layouts: Layouts, limit_s: float = math.inf) -> float:
        """Mean wait per job with these layouts; infinite above limit_s, or if a needed size vanishes."""
        site = self.site
        totals = [_total(layout) for layout in layouts]
        counts = tuple(map(sum, zip(*totals, strict=True)))
        if any(counts[size] <= 0 for size in site.needed):
            return math.inf
        changed = [place for place, (new, old) in enumerate(zip(layouts, site.layouts, strict=True)) if new != old]
        jobs = max(1, self.jobs)
        left_s = limit_s * jobs
        wait_s = 0.0
        sums = []
        for day, share in zip(self._days, self._shares or [1.0] * len(self._days), strict=True):
            own = day.busy
            if changed:
                own = own[:]
                for place in changed:
                    own[place] = self._out(day.free_s[place], totals[place])
            busy = [each for node in own for each in node]
            limit = left_s * share
            wait_s += total_wait_s(counts, day.jobs, raises=site.raises, limit_s=limit - wait_s, busy=busy)
            if wait_s > limit:
                return math.inf
            sums.append(wait_s)
        if wait_s > 0:
            self._shares = [min(1.0, RACE + each / wait_s) for each in sums[:-1]] + [1.0]
        return wait_s / jobs

    def busy_instances(self, homes: Sequence[int | None]) -> list[float]:
        """Seconds of each size that the jobs keep busy."""
        busy = [0.0] * len(homes)
        for day in self._days:
            for job in day.jobs:
                size = homes[job.size] or 0
                busy[size] += job.runs_s[size]
        return busy


def _total(layout: NodeCounts) -> Counts:
    counts = layout[0]
    for gpu in layout[1:]:
        counts = tuple(map(add, counts, gpu))
    return counts
