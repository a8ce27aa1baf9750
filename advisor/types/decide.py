"""Choose the GPU type to ask for now, and the jobs of a short queue that run until the next decision. Pure.

The type is the one whose wait and run time together end first.

The intervals of both ends must not overlap, and the gain must be at least GpuTypeRules.min_gain of the time until the
end. They are intervals of the usual run times: what makes one run longer than another one, such as its data, makes it
longer on every type. The time limit is compared with a single run. Waits older than GpuTypeRules.max_age_s are not
used: then there is no advice.

A price tells little if a handful of jobs compete: what counts is which jobs run together, and when a gang's GPUs are
free together. So each choice of a short queue is tried, and the rest planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from almanac.submit_config import MAX_WAIT_AGE_S, MIN_TYPE_GAIN
from almanac.units import format_duration

MEASURED = "own runs"


@dataclass(frozen=True)
class TypeWait:
    """The wait of a job that is submitted now, seconds, and its interval. as_of_s: time of the snapshot."""

    gpu_type: str
    wait_s: float
    low_s: float
    high_s: float
    as_of_s: int


@dataclass(frozen=True)
class TypeRunTime:
    """The usual (median) run time on a GPU type, seconds, with its interval. longest_s: that few single runs exceed.

    runs: completed runs on the type. source: "own runs", "own rates", "other families", or "specifications".
    """

    gpu_type: str
    run_s: float
    low_s: float
    high_s: float
    longest_s: float
    runs: int
    source: str


@dataclass(frozen=True)
class GpuTypeRules:
    """Limits of advice on GPU types, and its time.

    now_s: unix seconds. min_gain: least gain, as a share of the time until the job ends. max_age_s: age above which an
    expected wait no longer counts, seconds.
    """

    now_s: int
    min_gain: float = MIN_TYPE_GAIN
    max_age_s: int = MAX_WAIT_AGE_S


@dataclass(frozen=True)
class TypeEnd:
    """The end of a job on a type, seconds from now, with its interval."""

    gpu_type: str
    end_s: float
    low_s: float
    high_s: float
    time: TypeRunTime
    wait: TypeWait


@dataclass(frozen=True)
class TypeAdvice:
    """Advice to ask for another GPU type.

    best: the type to ask for. others: types that end about as soon, the first end first. asked: the type that these are
    compared with. gain_s: how much sooner the best one ends, seconds.
    """

    best: TypeEnd
    asked: TypeEnd
    gain_s: float
    others: tuple[TypeEnd, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The types that are about as good, the best first."""
        return (self.best.gpu_type, *(each.gpu_type for each in self.others))

    def text(self, told: Sequence[TypeWait] = ()) -> str:
        """Run times, and the type that ends first. told: waits that may be told; with those of both types that agree
        with the choice, also the waits and the gain by them.
        """
        first, second = self.best, self.asked
        runs, waits_s = f"Your runs take {_run(first)}, {_run(second)}.", {wait.gpu_type: wait.wait_s for wait in told}
        if first.gpu_type in waits_s and second.gpu_type in waits_s:
            own_s, other_s = waits_s[first.gpu_type], waits_s[second.gpu_type]
            gain_s = other_s + second.time.run_s - own_s - first.time.run_s
            if gain_s > 0:
                waits = f"Wait now: {_short(own_s)} and {_short(other_s)}."
                return f"{runs} {waits} {first.gpu_type} ends {_short(gain_s)} earlier."
        return f"{runs} By the queue now, {first.gpu_type} should end first."


def _run(end: TypeEnd) -> str:
    time = end.time
    about = "" if time.source == MEASURED else "about "
    runs = f" ({time.runs} {'run' if time.runs == 1 else 'runs'})" if time.runs else f" (from {time.source})"
    return f"{about}{_short(time.run_s)} on {end.gpu_type}{runs}"


def _short(seconds: float) -> str:
    return format_duration(round(seconds)) if seconds >= 1 else "none"


def ends_of(times: Sequence[TypeRunTime], waits: Sequence[TypeWait], rules: GpuTypeRules) -> dict[str, TypeEnd]:
    """The ends by type, of types with a known run time and a young enough wait. A wait of the future is none."""
    fresh = {wait.gpu_type: wait for wait in waits if 0 <= rules.now_s - wait.as_of_s <= rules.max_age_s}
    return {
        time.gpu_type: TypeEnd(
            time.gpu_type,
            fresh[time.gpu_type].wait_s + time.run_s,
            fresh[time.gpu_type].low_s + time.low_s,
            fresh[time.gpu_type].high_s + time.high_s,
            time,
            fresh[time.gpu_type],
        )
        for time in times
        if time.gpu_type in fresh and math.isfinite(fresh[time.gpu_type].high_s + time.high_s)
    }


def decide_type(
    times: Sequence[TypeRunTime],
    waits: Sequence[TypeWait],
    asked: Sequence[str],
    rules: GpuTypeRules,
    limit_s: float | None = None,
) -> TypeAdvice | None:
    """The type that ends the job sooner than those asked for; None if not surely so.

    limit_s: the job's time limit, None if it names none. A type on which the job could reach it is not advised; none is
    if either is NaN (not known).

    asked: names of the types that the request accepts; empty: any. Slurm starts the job on the type that is free first,
    so that one is compared.
    """
    ends = ends_of(times, waits, rules)
    accepted = asked or [wait.gpu_type for wait in waits]
    own = [ends[name] for name in accepted if name in ends]
    if not own or len(own) != len(accepted):
        return None
    current = min(own, key=lambda end: (end.wait.wait_s, *_order(end)))
    better = sorted((end for end in ends.values() if _is_better(end, current, rules, limit_s)), key=_order)
    if not better:
        return None
    best = better[0]
    others = tuple(end for end in better[1:] if end.end_s <= best.end_s * (1 + rules.min_gain))
    return TypeAdvice(best, current, current.end_s - best.end_s, others)


def _order(end: TypeEnd) -> tuple[float, str]:
    return end.end_s, end.gpu_type


def _is_better(end: TypeEnd, current: TypeEnd, rules: GpuTypeRules, limit_s: float | None) -> bool:
    if limit_s is not None and not end.time.longest_s <= limit_s:
        return False
    gain_s = current.end_s - end.end_s
    return gain_s > 0 and gain_s >= rules.min_gain * current.end_s and end.high_s < current.low_s


WAITS = -1
"""Place of a job that gets no GPUs now."""
MOST_STEPS = 4000
"""Most steps of the search. A count, not a time: the result must not depend on how busy the machine is."""
_SAME = 1 - 1e-9
"""Costs that differ less are equal: the first one counts."""

Choice = tuple[int, ...]
"""The type of each job until the next decision, or WAITS."""
_Free = tuple[tuple[float, ...], ...]
"""By type, when each of its GPUs is free, the first one first."""


@dataclass(frozen=True)
class ShortQueue:
    """Jobs and types by number; times in any one unit, from now.

    run_s: time left of each job on each type, infinite if it cannot run there. placed: type that a job runs on, or
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
    """The rest to plan after a choice. cost: of the jobs that end; last_s: the latest of their ends.

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
    """Yield all choices within the capacity.

    If jobs can be moved later, no job waits while GPUs that it could use idle.
    """
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
        """Return True if a list schedule of the rest costs less than all before."""
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
