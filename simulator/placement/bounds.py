"""Lower bounds on the makespan and the mean job completion time: no schedule beats them."""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.decisions.placement import Floats, Ints, price
from simulator.placement.problem import PlacementProblem


def makespan_bound_s(problem: PlacementProblem) -> float:
    """From the first submission: the fluid linear program, and for each time the work submitted from then on.

    A schedule of makespan T gives seconds y[j,r] that satisfy the program of `price`, so its least T is no larger.
    Raises ValueError where a job can run on no type.
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
