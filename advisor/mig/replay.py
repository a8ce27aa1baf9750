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


class PoolJob(NamedTuple):
    """A job of one instance. size: place of the smallest size that holds it. runs_s: seconds on each size."""

    submit_s: float
    size: int
    runs_s: tuple[float, ...]


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
