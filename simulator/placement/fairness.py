"""Gavel's policies, rebuilt: linear programs give each job shares of time on each GPU type, and rounds follow them.

Source: Gavel (OSDI 2020), sections 4.1 and 5, and the rounds of its public scheduler: a job's priority on a type is its
share over the part of the type's time that it received since the last solution; types are filled one after the other.
It stands in for Gavel: solvers differ in which of many best solutions they return, so that figures differ by some
percent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.decisions.placement import WAITS, Floats, Ints
from simulator.placement.rounds import RoundAllocation, RoundView, on_one_type

Gains = Callable[[RoundView], Floats]
"""(rows, types) what a policy makes fair: a job's gain of all its time on a type."""


def plain_gains(view: RoundView) -> Floats:
    """Time alone, whatever the type: max-min fairness that knows nothing of speeds (Gavel's max_min_fairness)."""
    gains: Floats = np.where(view.rates > 0, view.gpus[:, None], 0).astype(float)
    return gains


def throughput_gains(view: RoundView) -> Floats:
    """Throughput over that of equal shares of all types (Gavel's max_min_fairness_perf)."""
    equal = view.rates @ (view.capacity / max(int(view.capacity.sum()), 1))
    gains: Floats = view.rates / np.maximum(equal, 1e-12)[:, None] * view.gpus[:, None]
    return gains


def duration_gains(view: RoundView) -> Floats:
    """Part of the remaining work: the least gain is then 1 / makespan (Gavel's min_total_duration_perf)."""
    gains: Floats = view.rates / np.maximum(view.left, 1e-12)[:, None]
    return gains


class SharedRounds:
    """Follows shares of time in rounds, as Gavel's scheduler does. Solves whenever the set of jobs changes."""

    def __init__(self, gains: Gains) -> None:
        self._gains = gains
        self._shares: dict[int, Floats] = {}
        self._had: dict[int, Floats] = {}

    def place(self, view: RoundView) -> RoundAllocation:
        """Every round from scratch."""
        numbers = view.jobs.tolist()
        if self._shares.keys() != set(numbers):
            found = max_min_shares(self._gains(view), view.gpus, view.capacity)
            self._shares = dict(zip(numbers, found, strict=True))
            # Gavel counts half a round for every job after each solution.
            self._had = {job: np.full(len(view.capacity), 0.5) for job in numbers}
        shares = np.array([self._shares[job] for job in numbers])
        had = np.array([self._had[job] for job in numbers])
        types = _fill(view, shares, had)
        for row in np.flatnonzero(types != WAITS):
            self._had[numbers[row]][types[row]] += 1
        return on_one_type(view, types)


def max_min_shares(gains: Floats, gpus: Ints, capacity: Ints) -> Floats:
    """(jobs, types) shares of time that maximize the least sum of share x gain; no job has more than all its time.

    Gangs larger than a type get no share of it.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = gains.shape
    job, kind = np.nonzero((gains > 0) & (gpus[:, None] <= capacity[None, :]))
    shares = np.zeros((jobs, types))
    if not len(job):
        return shares
    known, row = np.unique(job, return_inverse=True)
    number, last = np.arange(len(job)), len(job)
    scale = gains[job, kind].max()
    least = sparse.csr_matrix(
        (
            np.concatenate([-gains[job, kind] / scale, np.ones(len(known))]),
            (np.concatenate([row, np.arange(len(known))]), np.concatenate([number, np.full(len(known), last)])),
        ),
        shape=(len(known), last + 1),
    )
    once = sparse.csr_matrix((np.ones(last), (row, number)), shape=(len(known), last + 1))
    room = sparse.csr_matrix((gpus[job].astype(float), (kind, number)), shape=(types, last + 1))
    found: Any = linprog(
        -np.eye(1, last + 1, last)[0], A_ub=sparse.vstack([least, once, room]),
        b_ub=np.concatenate([np.zeros(len(known)), np.ones(len(known)), capacity]), method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise ValueError(f"the linear program of the shares failed: {found.message}")
    shares[job, kind] = found.x[:last]
    return shares


def _fill(view: RoundView, shares: Floats, had: Floats) -> Ints:
    """Types in the order of their columns; in each the highest priority first, then the larger share."""
    priority = np.where((shares > 1e-9) & (view.rates > 0), shares / (had / had.sum(axis=0)), 0.0)
    types, free = np.full(len(view.gpus), WAITS, dtype=np.int64), view.capacity.copy()
    for kind in range(len(free)):
        for row in np.lexsort((-shares[:, kind], -priority[:, kind])):
            if priority[row, kind] > 0 and types[row] == WAITS and view.gpus[row] <= free[kind]:
                types[row] = kind
                free[kind] -= view.gpus[row]
    return types
