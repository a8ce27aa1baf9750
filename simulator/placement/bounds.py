"""Lower bounds on the makespan and the mean job completion time: no schedule beats them."""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.decisions.placement import price
from simulator.placement.problem import PlacementProblem


def makespan_bound_s(problem: PlacementProblem) -> float:
    """From the first submission: the fluid linear program, and for each time the work submitted from then on."""
    first = float(problem.submit_s.min())
    bounds = []
    for begin in _release_times(problem):
        late = problem.submit_s >= begin
        least, _ = price(problem.gpus[late], problem.work[late], problem.rates[late], problem.capacity)
        bounds.append(begin - first + least)
    return max(bounds)


def _release_times(problem: PlacementProblem, most: int = 12) -> list[float]:
    times = np.unique(problem.submit_s)
    return times[np.unique(np.linspace(0, len(times) - 1, most).astype(int))].tolist()


def mean_jct_bound_s(problem: PlacementProblem, intervals: int = 60, growth: float = 1.08) -> float:
    """A time-indexed linear program in intervals that grow.

    Every job gets a share of its work in each interval on each type. With x the share of a job's work in an interval,
    the mean of the job's work, at the interval's begin, plus half of its least run time, is no later than its end. The
    exact statement is in the code: completion >= sum of x * begin + best_s / 2 where a job works at most at its best
    speed (mean busy time; Goemans and others 2002).
    """
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = problem.rates.shape
    edges = _edges(problem, intervals, growth)
    lengths = np.diff(edges)
    share = problem.rates / problem.work[:, None]
    job, kind, step = (
        axis.ravel() for axis in np.meshgrid(np.arange(jobs), np.arange(types), np.arange(len(lengths)), indexing="ij")
    )
    # Work in an interval before a job's submission is impossible; the interval of the submission counts in full.
    possible = (share[job, kind] > 0) & (edges[step + 1] > problem.submit_s[job] - problem.submit_s.min())
    job, kind, step = job[possible], kind[possible], step[possible]
    number, count = np.arange(len(job)), len(lengths)
    rate = share[job, kind]
    begin = np.maximum(edges[step], problem.submit_s[job] - problem.submit_s.min())
    done = sparse.csr_matrix((rate, (job, number)), shape=(jobs, len(job)))
    busy = sparse.csr_matrix((problem.gpus[job].astype(float), (kind * count + step, number)))
    once = sparse.csr_matrix((np.ones(len(job)), (job * count + step, number)), shape=(jobs * count, len(job)))
    room = np.concatenate([np.outer(problem.capacity, lengths).ravel(), np.tile(lengths, jobs)])
    # A second of work in an interval lies on average after its begin by half the time that the work takes.
    found: Any = linprog(
        rate * begin, A_ub=sparse.vstack([_padded(busy, types * count, len(job)), once]), b_ub=room, A_eq=done,
        b_eq=np.ones(jobs), method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise ValueError(f"the linear program of the bound failed: {found.message}")
    released = problem.submit_s - problem.submit_s.min()
    least = problem.best_s / 2
    return float((found.fun + least.sum() - released.sum()) / jobs)


def _padded(matrix: Any, rows: int, columns: int) -> Any:
    matrix.resize((rows, columns))
    return matrix


def _edges(problem: PlacementProblem, intervals: int, growth: float) -> np.ndarray[Any, Any]:
    """From 0 to a time by which everything can be done."""
    span = float(np.ptp(problem.submit_s)) + 1.6 * makespan_bound_s(problem) + 1.0
    steps = growth ** np.arange(intervals)
    return np.concatenate([[0.0], np.cumsum(steps) / steps.sum() * span])
