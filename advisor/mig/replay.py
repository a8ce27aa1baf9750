"""The waits of jobs on pools of instances of several sizes: a quick simulation that decisions can afford. Pure.

Instances of one size are alike, so that a pool is a number. Each size has one queue, first come, first served. With
raises, an instance that nobody of its size waits for takes the job of a smaller size that waits longest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from advisor.mig.sizes import Counts


class PoolJob(NamedTuple):
    """A job of one instance. size: place of the smallest size that holds it. runs_s: seconds on each size."""

    submit_s: float
    size: int
    runs_s: tuple[float, ...]


class Addition(NamedTuple):
    """Instances that come into service later."""

    time_s: float
    counts: Counts


def homes_of(counts: Sequence[int]) -> list[int | None]:
    """For each size the smallest one in service that holds its jobs; None where none does."""
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
    running: Iterable[tuple[float, int]] = (),
    additions: Sequence[Addition] = (),
    limit_s: float = math.inf,
) -> float:
    """The sum of the jobs' waits in seconds; infinite above limit_s, or if no instance ever holds some job.

    counts: instances in service, by size. jobs: by submit time. running: end and size of each job that runs at the
    start.
    """
    pools = _Pools(counts, raises, running, additions)
    for job in jobs:
        pools.advance(job.submit_s)
        pools.submit(job)
        if pools.wait_s > limit_s:
            return math.inf
    pools.advance(math.inf)
    return pools.wait_s if not any(pools.queues) and pools.wait_s <= limit_s else math.inf


class _Pools:
    def __init__(
        self,
        counts: Sequence[int],
        raises: bool,
        running: Iterable[tuple[float, int]],
        additions: Sequence[Addition],
    ) -> None:
        self.wait_s = 0.0
        self.queues: list[deque[PoolJob]] = [deque() for _ in counts]
        self._raises = raises
        self._counts = list(counts)
        self._idle = list(counts)
        self._homes = homes_of(counts)
        self._additions = additions
        self._events = [(end_s, size) for end_s, size in running]
        for _, size in self._events:
            self._idle[size] -= 1
        self._events += [(each.time_s, -1 - place) for place, each in enumerate(additions)]
        heapify(self._events)

    def submit(self, job: PoolJob) -> None:
        home = self._homes[job.size]
        if home is None:
            self.queues[job.size].append(job)
            return
        idle = self._idle
        sizes = range(home, len(idle)) if self._raises else (home,)
        for size in sizes:
            if idle[size] > 0:
                idle[size] -= 1
                heappush(self._events, (job.submit_s + job.runs_s[size], size))
                return
        self.queues[home].append(job)

    def advance(self, until_s: float) -> None:
        """Let every job end until then, and start the ones that waited for it."""
        events, idle = self._events, self._idle
        while events and events[0][0] <= until_s:
            now_s, size = heappop(events)
            if size < 0:
                self._add(self._additions[-1 - size].counts, now_s)
                continue
            idle[size] += 1
            if idle[size] > 0:
                self._serve(size, now_s)

    def _add(self, counts: Counts, now_s: float) -> None:
        self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        self._homes = homes_of(self._counts)
        for size, queue in enumerate(self.queues):
            home = self._homes[size]
            if queue and home is not None and home != size and not self._counts[size]:
                self.queues[home] = deque(sorted([*self.queues[home], *queue]))
                queue.clear()
        for size, count in enumerate(counts):
            self._idle[size] += count
            for _ in range(count):
                self._serve(size, now_s)

    def _serve(self, size: int, now_s: float) -> None:
        queue = self.queues[size]
        if not queue and self._raises:
            queue = min((each for each in self.queues[:size] if each), key=_first_submit, default=queue)
        if queue:
            job = queue.popleft()
            self.wait_s += now_s - job.submit_s
            self._idle[size] -= 1
            heappush(self._events, (now_s + job.runs_s[size], size))


def _first_submit(queue: deque[PoolJob]) -> float:
    return queue[0].submit_s
