"""Policies of GPU types by name, their results, and lower bounds that no schedule beats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor.types.placement import NEVER_MOVE, Floats, Ints, price
from simulator.comparison import silent_solver, worker_pool
from simulator.outcomes import PolicyRun
from simulator.policies.types.chosen_type import AdvisedType, Chooser, RecentWaits, fastest_type, simulate_queues
from simulator.policies.types.hadar import Hadar, HadarForked
from simulator.policies.types.rounds import (
    GreedyPairs,
    PricedSrpt,
    RoundPolicy,
    SharedRounds,
    TypedFifo,
    duration_gains,
    plain_gains,
    simulate_rounds,
    throughput_gains,
)
from simulator.traces.gavel import PlacementProblem, believed_work


def makespan_bound_s(problem: PlacementProblem) -> float:
    """Return a lower bound of the makespan, seconds from the first submission.

    It is the highest of fluid linear programs, one for each submission time and the work submitted from then on. A
    schedule of makespan T gives seconds y[j,r] that satisfy the program of `price`, so its least T is no larger. Raises
    ValueError if a job can run on no type.
    """
    _check(problem)
    first = float(problem.submit_s.min())
    bounds = []
    for begin in _release_times(problem):
        late = problem.submit_s >= begin
        least, _ = price(problem.gpus[late], problem.work[late], problem.rates[late], problem.capacity)
        bounds.append(begin - first + least)
    return max(bounds)


def _check(problem: PlacementProblem) -> None:
    stuck = np.flatnonzero(problem.rates.max(axis=1) <= 0)
    if len(stuck):
        raise ValueError(f"{len(stuck)} jobs run on no type, the first of them job {stuck[0]}: leave them out")


def _release_times(problem: PlacementProblem, most: int = 12) -> list[float]:
    times = np.unique(problem.submit_s)
    return [float(time) for time in times[np.unique(np.linspace(0, len(times) - 1, most).astype(int))]]


def mean_jct_bound_s(problem: PlacementProblem, intervals: int = 144) -> float:
    """A linear program over intervals of time (the mean busy times of Goemans and others, 2002).

    Time starts at the first submission. Intervals i = 1..n of equal length d reach to the makespan bound; one more
    without end follows, so that every schedule fits. y[j,r,i] are seconds of job j on type r in interval i, b[j,r] its
    rate as a share of its work, a[j] its submission, s[i] an interval's begin. With m[j] = 1 / max over r of b[j,r]:

        min  mean over j of (sum over r, i of b y max(s[i], a[j])  +  m[j] / 2  -  a[j])
        sum over r, i of b y = 1                 each job j does its work
        sum over j of gpus y <= capacity d       each type r and interval i, but not the last
        sum over r of y <= d                     each job j and interval i, but not the last
        y = 0                                    where the interval ends before a[j]

    Every schedule, in rounds or not, with moves or without, gives such y. Let f(t) be the share of its work that j does
    per second. Work in interval i is done at max(s[i], a[j]) or later, so the sum is at most the mean busy time, the
    integral of t f(t). As f <= 1 / m up to the end C and its integral is 1, the integral of (C - t) f(t) is at least
    m / 2. So C is at least the mean busy time plus m / 2, and no job ends before the program says, on average.
    Jobs that are alike are one row, which changes no optimum: their mean is feasible if they are.

    Jobs that are much shorter than an interval, as in a trace of months, make this weak: the bound is at least the mean
    run time on the fastest types. More intervals make it tighter and slower. Raises ValueError where a job can run on
    no type, or the solver fails.
    """
    _check(problem)
    share, gpus, submit_s, count = _groups(problem)
    found = _least_busy_times(share, gpus, submit_s, count, problem.capacity, _edges(problem, intervals))
    busy_s = float((found + count @ (0.5 / share.max(axis=1) - submit_s)) / len(problem))
    return max(busy_s, float(problem.best_s.mean()))


def _groups(problem: PlacementProblem) -> tuple[Floats, Ints, Floats, Ints]:
    """share of the work per second, gpus, submission since the first one, and number of the jobs that are alike."""
    share = problem.rates / problem.work[:, None]
    since_s = problem.submit_s - problem.submit_s.min()
    alike = np.column_stack([problem.gpus, since_s, share])
    _, first, count = np.unique(alike, axis=0, return_index=True, return_counts=True)
    return share[first], problem.gpus[first], since_s[first], count


def _edges(problem: PlacementProblem, intervals: int) -> Floats:
    return np.linspace(0.0, makespan_bound_s(problem), intervals + 1)


def _least_busy_times(share: Floats, gpus: Ints, submit_s: Floats, count: Ints, capacity: Ints, edges: Floats) -> float:
    """The value of mean_jct_bound_s's sum over b y max(s, a), times the number of jobs."""
    from scipy import sparse
    from scipy.optimize import linprog

    steps, unit = len(edges) - 1, float(edges[1])
    jobs, types = share.shape
    job, kind, step = (
        axis.ravel() for axis in np.meshgrid(np.arange(jobs), np.arange(types), np.arange(steps + 1), indexing="ij")
    )
    possible = (share[job, kind] > 0) & (np.append(edges[1:], np.inf)[step] > submit_s[job])
    job, kind, step = job[possible], kind[possible], step[possible]
    number, rate = np.arange(len(job)), share[job, kind] * unit
    bounded = step < steps
    done = sparse.csr_matrix((rate, (job, number)), shape=(jobs, len(job)))
    busy = sparse.csr_matrix(
        (gpus[job[bounded]].astype(float), ((kind * steps + step)[bounded], number[bounded])),
        shape=(types * steps, len(job)),
    )
    once = sparse.csr_matrix(
        (np.ones(int(bounded.sum())), ((job * steps + step)[bounded], number[bounded])), shape=(jobs * steps, len(job))
    )
    room = np.concatenate([np.repeat(capacity.astype(float), steps), np.repeat(count.astype(float), steps)])
    found: Any = linprog(
        rate * np.maximum(edges[step], submit_s[job]) / unit, A_ub=sparse.vstack([busy, once]), b_ub=room, A_eq=done,
        b_eq=count.astype(float), method="highs-ipm",
    )  # fmt: skip
    if found.status != 0:
        raise ValueError(f"the linear program of the bound failed: {found.message}")
    return float(found.fun) * unit


@dataclass(frozen=True)
class PlacementOptions:
    """Options of a simulation of placement.

    round_s: length of a round, seconds. move_s: time that a moved job loses, seconds. error: sigma of ln(predicted /
    true run time). gpus_per_node: size of HadarE's nodes. seed: of the random errors.
    """

    round_s: float = 360.0
    move_s: float = 10.0
    error: float = 0.0
    gpus_per_node: int = 4
    seed: int = 1


@dataclass(frozen=True)
class PlacementBounds:
    """Lower bounds that no schedule with each job in one place at a time beats.

    They come from fluid and time-indexed linear programs.
    """

    makespan_s: float
    mean_jct_s: float


Runner = Callable[[str, PlacementProblem, PlacementOptions, Floats | None], PolicyRun]


def _rounds(make: Callable[[PlacementOptions], RoundPolicy]) -> Runner:
    def run(name: str, problem: PlacementProblem, options: PlacementOptions, known: Floats | None) -> PolicyRun:
        found = simulate_rounds(problem, make(options), options.round_s, options.move_s, known, time.perf_counter)
        return found.outcome(name)

    return run


def _queues(make: Callable[[PlacementOptions], Chooser]) -> Runner:
    def run(name: str, problem: PlacementProblem, options: PlacementOptions, known: Floats | None) -> PolicyRun:
        found = simulate_queues(problem, make(options), known, options.round_s)
        return PolicyRun(name, found, int(problem.capacity.sum()), float(found.ran_s @ problem.gpus))

    return run


POLICIES: Mapping[str, tuple[str, Runner]] = {
    "fifo": ("one queue; each job takes its fastest free type", _rounds(lambda _: TypedFifo())),
    "fastest-type": ("all jobs ask for their own fastest type", _queues(lambda _: fastest_type)),
    "greedy-pairs": ("job and type of the least remaining GPU-time", _rounds(lambda _: GreedyPairs())),
    "max-min": ("Gavel-like fairness of time", _rounds(lambda _: SharedRounds(plain_gains))),
    "max-min-perf": ("Gavel-like fairness of throughput", _rounds(lambda _: SharedRounds(throughput_gains))),
    "min-makespan": ("Gavel-like least total duration", _rounds(lambda _: SharedRounds(duration_gains))),
    "hadar": (
        "Hadar's primal-dual, running jobs stay",
        _rounds(lambda given: Hadar(round_s=given.round_s, move_s=given.move_s)),
    ),
    "hadar-moves": (
        "Hadar's primal-dual, all jobs compete each round",
        _rounds(lambda given: Hadar(False, round_s=given.round_s, move_s=given.move_s)),
    ),
    "hadare": (
        "HadarE: copies of a job on several nodes at once",
        _rounds(lambda given: HadarForked(given.gpus_per_node, given.round_s)),
    ),
    "advice": ("no placing: jobs choose by wait plus run time", _queues(lambda given: AdvisedType(seed=given.seed))),
    "advice-half": (
        "the same, half of the jobs follow; the others take their fastest type",
        _queues(lambda given: AdvisedType(follow=0.5, seed=given.seed)),
    ),
    "recent-waits": ("no placing: jobs choose by the median of recent waits", _queues(lambda _: RecentWaits())),
    "priced-srpt": ("almanac's; jobs are moved", _rounds(lambda _: PricedSrpt())),
    "priced-srpt-stay": ("almanac's; no job is ever moved", _rounds(lambda _: PricedSrpt(NEVER_MOVE))),
}
"""Name to description and runner."""
BASE = "fifo"
ONE_PLACE_EXCEPT = ("hadare",)
"""Policies to which the bounds do not apply."""


def run_policy(problem: PlacementProblem, name: str, options: PlacementOptions) -> PolicyRun:
    """Simulate a policy of POLICIES."""
    return POLICIES[name][1](name, problem, options, believed_work(problem, options.error, options.seed))


def find_bounds(problem: PlacementProblem) -> PlacementBounds:
    """Return the lower bounds of makespan and mean JCT."""
    return PlacementBounds(makespan_bound_s(problem), mean_jct_bound_s(problem))


def run_placements(
    problem: PlacementProblem,
    names: Sequence[str],
    options: PlacementOptions,
    processes: int = 1,
    advance: Callable[[float, str], None] = lambda share, policy: None,
) -> tuple[list[PolicyRun], PlacementBounds]:
    """Runs in the order of the names, and the bounds. The result does not depend on the number of processes."""
    with worker_pool(processes) if processes > 1 else nullcontext() as pool, silent_solver():
        waiting = [pool.submit(run_policy, problem, name, options) for name in names] if pool else []
        bounds = pool.submit(find_bounds, problem) if pool else None
        runs = []
        for number, name in enumerate(names):
            advance(number / (len(names) + 1), name)
            runs.append(waiting[number].result() if pool else run_policy(problem, name, options))
        advance(len(names) / (len(names) + 1), "bounds")
        return runs, bounds.result() if bounds else find_bounds(problem)
