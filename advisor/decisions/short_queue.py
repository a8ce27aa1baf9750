"""Which jobs of a short queue run until the next decision: every choice is tried, and the rest is planned. Pure.

A price says little where a handful of jobs compete: what counts is who runs beside whom, and when a gang's GPUs are
free together. So each choice for the time until the next decision is followed by the best list schedule of what is
left: jobs in some order, each on one type, where its gang can start first. The cost of a schedule is the mean
completion time plus a share of the makespan. Branch and bound finds the least cost, or the least within MOST_STEPS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WAITS = -1
"""Place of a job that gets no GPUs now."""
MOST_STEPS = 4000
"""Of the search. A count, not a time: the result must not depend on how busy the machine is."""
_SAME = 1 - 1e-9
"""Costs that differ less are equal: the first one counts."""

Choice = tuple[int, ...]
"""The type of each job until the next decision, or WAITS."""
_Free = tuple[tuple[float, ...], ...]
"""By type, when each of its GPUs is free, the first one first."""


@dataclass(frozen=True)
class ShortQueue:
    """Jobs and types by number; times in any one unit, from now.

    run_s: what is left of each job on each type, infinite where it cannot run. placed: type that a job runs on, or
    WAITS. keeps: whether a job that runs keeps its GPUs to its end. weights: of the completion times. round_s: until
    the next decision; GPUs that jobs leave before it stay idle. stay: factor on the run time of a job that is moved.
    makespan_weight: of the makespan, where the weight of the mean completion time is 1.
    """

    run_s: Sequence[Sequence[float]]
    gpus: Sequence[int]
    capacity: Sequence[int]
    placed: Sequence[int]
    keeps: Sequence[bool]
    weights: Sequence[float]
    round_s: float
    stay: float
    makespan_weight: float

    def until_round(self, time_s: float) -> float:
        """The first later decision at this time or after it."""
        return max(math.ceil(time_s / self.round_s - 1e-9), 1) * self.round_s


@dataclass(frozen=True)
class _Rest:
    """What is left to plan after a choice. cost: of the jobs that end; last_s: the latest of their ends.

    run_s: (jobs, types) of the jobs that are left, by number of the job.
    """

    choice: Choice
    cost: float
    last_s: float
    run_s: dict[int, list[float]]
    free: _Free


def best_choice(queue: ShortQueue) -> Choice | None:
    """The choice of the best schedule found; None if there is none."""
    search = _Search(queue)
    rests = [_after(queue, choice) for choice in choices(queue)]
    bounds = [search.bound(rest.cost, rest.last_s, _first_ends(queue, rest.run_s, rest.free)) for rest in rests]
    found = None
    for number in sorted(range(len(rests)), key=lambda number: (bounds[number], number)):
        if bounds[number] < search.least * _SAME and search.improves(rests[number]):
            found = rests[number].choice
    return found


def choices(queue: ShortQueue) -> Iterator[Choice]:
    """All choices within the capacity. Where jobs can be moved later, no job waits beside GPUs that it could use."""
    may_idle = any(keeps and kind == WAITS for keeps, kind in zip(queue.keeps, queue.placed, strict=True))
    for choice, free in _choices(queue, 0, _not_kept(queue)):
        if may_idle or not any(
            kind == WAITS and queue.gpus[job] <= most and queue.run_s[job][other] < math.inf
            for job, kind in enumerate(choice)
            for other, most in enumerate(free)
        ):
            yield choice


def _not_kept(queue: ShortQueue) -> list[int]:
    """GPUs by type that no job keeps."""
    free = list(queue.capacity)
    for keeps, kind, gpus in zip(queue.keeps, queue.placed, queue.gpus, strict=True):
        if keeps and kind != WAITS:
            free[kind] = max(free[kind] - gpus, 0)
    return free


def _choices(queue: ShortQueue, job: int, free: list[int]) -> Iterator[tuple[Choice, list[int]]]:
    if job == len(queue.gpus):
        yield (), free
        return
    own, gpus = queue.placed[job], queue.gpus[job]
    if queue.keeps[job] and own != WAITS:
        for later, unused in _choices(queue, job + 1, free):
            yield (own, *later), unused
        return
    for kind, run_s in enumerate(queue.run_s[job]):
        if run_s < math.inf and gpus <= free[kind]:
            left = [count - gpus if kind == other else count for other, count in enumerate(free)]
            for later, unused in _choices(queue, job + 1, left):
                yield (kind, *later), unused
    for later, unused in _choices(queue, job + 1, free):
        yield (WAITS, *later), unused


def _after(queue: ShortQueue, choice: Choice) -> _Rest:
    cost, last_s, left = 0.0, 0.0, dict[int, list[float]]()
    free = [[queue.round_s] * count for count in queue.capacity]
    for job, kind in enumerate(choice):
        if kind == WAITS:
            left[job] = list(queue.run_s[job])
            continue
        run_s = queue.run_s[job][kind] * (queue.stay if queue.placed[job] not in (WAITS, kind) else 1.0)
        if queue.keeps[job] or run_s <= queue.round_s * (1 + 1e-9):
            cost, last_s = cost + queue.weights[job] * run_s, max(last_s, run_s)
            held = min(queue.gpus[job], len(free[kind]))
            free[kind] = sorted(free[kind][held:] + [queue.until_round(run_s)] * held)
        else:
            left[job] = [each_s * (1 - queue.round_s / run_s) for each_s in queue.run_s[job]]
    return _Rest(choice, cost, last_s, left, tuple(map(tuple, free)))


def _first_ends(queue: ShortQueue, run_s: dict[int, list[float]], free: _Free) -> dict[int, list[float]]:
    """By job and type, the end of a job that starts as soon as its gang's GPUs are free."""
    return {
        job: [
            free[kind][queue.gpus[job] - 1] + each_s if each_s < math.inf else math.inf
            for kind, each_s in enumerate(own)
        ]
        for job, own in run_s.items()
    }


@dataclass
class _Search:
    """Branch and bound over list schedules. least: the least cost so far."""

    queue: ShortQueue
    least: float = math.inf
    steps: int = 0
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.share = self.queue.makespan_weight * len(self.queue.gpus)

    def bound(self, cost: float, last_s: float, ends: dict[int, list[float]]) -> float:
        """No schedule that goes on from here costs less: each job ends at its first end at best."""
        first = {job: min(each) for job, each in ends.items()}
        total = sum(self.queue.weights[job] * end_s for job, end_s in first.items())
        return cost + total + self.share * max(last_s, max(first.values(), default=0.0))

    def improves(self, rest: _Rest) -> bool:
        """Whether a list schedule of the rest costs less than all before."""
        before = self.least
        self._extend(rest.cost, rest.last_s, rest.run_s, rest.free, (0.0, -1))
        return self.least < before

    def _extend(
        self, cost: float, last_s: float, left: dict[int, list[float]], free: _Free, latest: tuple[float, int]
    ) -> None:
        """Add each job that is left, in the order of starts (latest: the start and number of the job before)."""
        if not left:
            self.least = min(self.least, cost + self.share * last_s)
            return
        if self.steps >= MOST_STEPS:
            return
        self.steps += 1
        for bound, job, kind, start_s in self._next(cost, last_s, left, free, latest):
            if bound >= self.least * _SAME:
                break
            run_s, held = left[job][kind], self.queue.gpus[job]
            end_s = start_s + run_s
            own = sorted(free[kind][held:] + (start_s + self.queue.until_round(run_s),) * held)
            self._extend(
                cost + self.queue.weights[job] * end_s,
                max(last_s, end_s),
                {other: each for other, each in left.items() if other != job},
                (*free[:kind], tuple(own), *free[kind + 1 :]),
                (start_s, job),
            )

    def _next(
        self, cost: float, last_s: float, left: dict[int, list[float]], free: _Free, latest: tuple[float, int]
    ) -> list[tuple[float, int, int, float]]:
        """(bound, job, type, start) of the jobs that can be added, least bound first."""
        ends = _first_ends(self.queue, left, free)
        first = {job: min(each) for job, each in ends.items()}
        total = cost + sum(self.queue.weights[job] * end_s for job, end_s in first.items())
        least_last_s = max(last_s, *first.values())
        found = []
        for job, each in ends.items():
            for kind, end_s in enumerate(each):
                if end_s == math.inf:
                    continue
                start_s = free[kind][self.queue.gpus[job] - 1]
                if (start_s, job) < latest:
                    continue
                bound = total + self.queue.weights[job] * (end_s - first[job]) + self.share * max(least_last_s, end_s)
                found.append((bound, job, kind, start_s))
        return sorted(found)
