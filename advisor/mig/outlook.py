"""Estimate the waits of the coming day under given layouts, from a site's present state. Pure.

Days that may come are drawn from the recent past, as lists of jobs. A quick simulation replays each on pools of
instances: instances of one size are alike, so that a pool is a number. Each size has one queue, first come, first
served. With raises, an instance that nobody of its size waits for takes the job of a smaller size that waits longest.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import add
from typing import NamedTuple

from advisor.mig.search import Layouts, NodeCounts
from advisor.mig.states import Counts
from almanac.units import DAY_S, HOUR_S


class PoolJob(NamedTuple):
    """A job of one instance. size: place of the smallest size that holds it. runs_s: seconds on each size."""

    submit_s: float
    size: int
    runs_s: tuple[float, ...]


def homes_of(counts: Sequence[int]) -> list[int | None]:
    """Return, for each size, the smallest one in service that holds its jobs; None if there is no such size."""
    homes: list[int | None] = [None] * len(counts)
    home = None
    for size in reversed(range(len(counts))):
        home = size if counts[size] > 0 else home
        homes[size] = home
    return homes


def total_wait_s(
    counts: Sequence[int],
    jobs: Iterable[PoolJob],
    *,
    raises: bool,
    limit_s: float = math.inf,
    busy: Sequence[tuple[float, int]] = (),
) -> float:
    """The sum of the jobs' waits in seconds; infinite above limit_s, or if no instance holds some job.

    counts: instances by size. jobs: by submit time. busy: time and size of the instances that are free later only. One
    loop without calls, because a plan runs it thousands of times.
    """
    homes = homes_of(counts)
    idle = list(counts)
    for _, size in busy:
        idle[size] -= 1
    queues: list[deque[PoolJob]] = [deque() for _ in counts]
    ends = list(busy)
    heapify(ends)
    wait_s = 0.0
    last = len(idle)
    pending = 0
    for job in jobs:
        submit_s = job[0]
        while ends and ends[0][0] <= submit_s:
            now_s, size = heappop(ends)
            if not pending:
                idle[size] += 1
                continue
            queue = queues[size]
            if not queue and raises:
                queue = _longest_waiting(queues, size)
            if queue:
                begun = queue.popleft()
                pending -= 1
                wait_s += now_s - begun[0]
                heappush(ends, (now_s + begun[2][size], size))
            else:
                idle[size] += 1
        home = homes[job[1]]
        if home is None or wait_s > limit_s:
            return math.inf
        for size in range(home, last if raises else home + 1):
            if idle[size] > 0:
                idle[size] -= 1
                heappush(ends, (submit_s + job[2][size], size))
                break
        else:
            queues[home].append(job)
            pending += 1
    while pending and wait_s <= limit_s:
        now_s, size = heappop(ends)
        queue = queues[size]
        if not queue and raises:
            queue = _longest_waiting(queues, size)
        if queue:
            begun = queue.popleft()
            pending -= 1
            wait_s += now_s - begun[0]
            heappush(ends, (now_s + begun[2][size], size))
    return wait_s if wait_s <= limit_s else math.inf


def _longest_waiting(queues: list[deque[PoolJob]], size: int) -> deque[PoolJob]:
    """The queue of a smaller size whose first job was submitted first; the size's own where all are empty."""
    found = queues[size]
    first_s = math.inf
    for queue in queues[:size]:
        if queue and queue[0][0] < first_s:
            found, first_s = queue, queue[0][0]
    return found


MIX_S = HOUR_S
"""Submit times are moved by up to this much, so that a layout is not fitted to one coincidence of arrivals."""
FIRST_S = 4 * HOUR_S
"""Span of the past that stands for the whole day to come, before a day is known."""


def futures(
    past: Sequence[PoolJob], now_s: float, window_s: float, days: int, number: int, rng: random.Random
) -> list[list[PoolJob]]:
    """Jobs of so many days from now_s on, each by submit time. The same arguments and state of rng give the same jobs.

    past: by submit time. The number of arrivals is a Poisson one; each is a job of the window near its own hour of the
    day. The window is whole days once a day is known, so that each hour counts alike; before, it is the last FIRST_S at
    any hour. Jobs are dealt like cards: none is drawn a second time before all have been drawn.
    """
    if not past:
        return [[] for _ in range(number)]
    known_s = max(now_s - past[0].submit_s, HOUR_S)
    whole = math.floor((min(known_s, window_s) + HOUR_S) / DAY_S)
    span_s = whole * DAY_S if whole else min(known_s, FIRST_S)
    recent = [job for job in past if job.submit_s >= now_s - span_s]
    mean = len(recent) * days * DAY_S / span_s
    deck: list[PoolJob] = []
    found = []
    for _ in range(number):
        jobs = []
        for _ in range(max(0, round(rng.gauss(mean, math.sqrt(mean))))):
            if not deck:
                deck = recent[:]
                rng.shuffle(deck)
            job = deck.pop()
            moved_s = job.submit_s - now_s + rng.uniform(-MIX_S, MIX_S) if whole else rng.uniform(0, DAY_S)
            jobs.append(job._replace(submit_s=now_s + moved_s % DAY_S + rng.randrange(days) * DAY_S))
        found.append(sorted(jobs))
    return found


RACE = 0.03
"""A layout is given up once it waits longer than the best one so far did, by this part of the whole wait."""


@dataclass(frozen=True)
class RunningSlice:
    """A running job. place: of its node. size: of its instance. left_s: seconds that it may run on, equally likely."""

    place: int
    size: int
    left_s: tuple[float, ...]


@dataclass(frozen=True)
class MigClusterState:
    """The state at now_s, and the past that the future is drawn from.

    layouts: what each node has, or is drained for. is_drained: by node. waiting: jobs that may be any of these runs, by
    job, first to start first. past: by submit time.
    """

    now_s: float
    layouts: Layouts
    is_drained: tuple[bool, ...]
    running: tuple[RunningSlice, ...]
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

    site: MigClusterState
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
