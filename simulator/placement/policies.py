"""Policies that place jobs on GPU types: what almanac uses, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.decisions.placement import (
    WAITS,
    Floats,
    Ints,
    PlacementRules,
    PlacementView,
    decide_placement,
)
from simulator.placement.rounds import RoundAllocation, RoundView, on_one_type


@dataclass(frozen=True)
class PricedSrpt:
    """advisor.decisions.placement, as live."""

    rules: PlacementRules = PlacementRules()

    def place(self, view: RoundView) -> RoundAllocation:
        """See decide_placement."""
        seen = PlacementView(view.gpus, view.left, view.rates, view.placed, view.capacity, view.waited_s)
        return on_one_type(view, decide_placement(seen, self.rules).types)


class Fifo:
    """First in, first out: the first job that fits on no type blocks the rest. It takes its fastest free type."""

    def place(self, view: RoundView) -> RoundAllocation:
        """Running jobs stay."""
        types, free = _kept(view)
        for row in _by_submission(view, types):
            kinds = [kind for kind in np.argsort(-view.rates[row], kind="stable") if view.rates[row, kind] > 0]
            fitting = [kind for kind in kinds if view.gpus[row] <= free[kind]]
            if not fitting:
                break
            types[row] = fitting[0]
            free[fitting[0]] -= view.gpus[row]
        return on_one_type(view, types)


class FastestType:
    """Everyone asks for their own fastest type: strict first in, first out in each type's queue."""

    def place(self, view: RoundView) -> RoundAllocation:
        """Running jobs stay."""
        return _queues(view, view.rates.argmax(axis=1))


class GreedyPairs:
    """Pairs of job and type, the least remaining GPU-time first, until nothing fits; jobs are moved freely."""

    def place(self, view: RoundView) -> RoundAllocation:
        """Every round from scratch."""
        with np.errstate(divide="ignore"):
            cost = np.where(view.rates > 0, (view.gpus * view.left)[:, None] / view.rates, np.inf)
        types, free = np.full(len(view.gpus), WAITS, dtype=np.int64), view.capacity.copy()
        for pair in np.argsort(cost, axis=None, kind="stable"):
            row, kind = divmod(int(pair), cost.shape[1])
            if np.isfinite(cost[row, kind]) and types[row] == WAITS and view.gpus[row] <= free[kind]:
                types[row] = kind
                free[kind] -= view.gpus[row]
        return on_one_type(view, types)


class MaxMinFairness:
    """Max-min fairness on normalized throughputs, in the way of Gavel's max_min_fairness_perf (a stand-in for it).

    A linear program gives each job the share of time on each type that maximizes the least normalized throughput.
    Rounds then follow Gavel's priorities: share over rounds received, the highest first.
    """

    def __init__(self) -> None:
        self._had: dict[int, Floats] = {}
        self._shares: dict[int, Floats] = {}
        self._active: frozenset[int] = frozenset()

    def place(self, view: RoundView) -> RoundAllocation:
        """Solve again whenever the set of jobs changes."""
        active = frozenset(view.jobs.tolist())
        if active != self._active:
            solved = max_min_shares(view.gpus, view.rates, view.capacity)
            self._shares = dict(zip(view.jobs.tolist(), solved, strict=True))
            self._had = {job: self._had.get(job, np.zeros(len(view.capacity))) for job in active}
            self._active = active
        shares = np.array([self._shares[job] for job in view.jobs.tolist()])
        had = np.array([self._had[job] for job in view.jobs.tolist()])
        total = np.maximum(had.sum(axis=0), 1.0)
        priority = np.where((shares > 1e-6) & (view.rates > 0), shares / np.maximum(had / total, 1e-9), 0.0)
        types, free = np.full(len(view.gpus), WAITS, dtype=np.int64), view.capacity.copy()
        tied = view.rates / np.maximum(view.rates.max(axis=1), 1e-12)[:, None]
        for pair in np.lexsort((-tied.ravel(), -priority.ravel())):
            row, kind = divmod(int(pair), len(view.capacity))
            if view.rates[row, kind] > 0 and types[row] == WAITS and view.gpus[row] <= free[kind]:
                types[row] = kind
                free[kind] -= view.gpus[row]
        for row in np.flatnonzero(types != WAITS):
            self._had[int(view.jobs[row])][types[row]] += 1
        return on_one_type(view, types)


def max_min_shares(gpus: Ints, rates: Floats, capacity: Ints) -> Floats:
    """(jobs, types) shares of time that maximize the least normalized throughput per GPU (Gavel, equation of 4.1).

    Throughput is normalized by that of an equal share of every type, as Gavel does.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = rates.shape
    equal = rates @ (capacity / max(int(capacity.sum()), 1))
    job, kind = np.nonzero(rates > 0)
    number, last = np.arange(len(job)), len(job)
    gain = rates[job, kind] / np.maximum(equal[job], 1e-12) * gpus[job]
    least = sparse.csr_matrix(
        (np.concatenate([-gain, np.ones(jobs)]), (np.concatenate([job, np.arange(jobs)]), np.concatenate([number, np.full(jobs, last)]))),
        shape=(jobs, last + 1),
    )  # fmt: skip
    once = sparse.csr_matrix((np.ones(last), (job, number)), shape=(jobs, last + 1))
    room = sparse.csr_matrix((gpus[job].astype(float), (kind, number)), shape=(types, last + 1))
    found = linprog(
        -np.eye(1, last + 1, last)[0], A_ub=sparse.vstack([least, once, room]),
        b_ub=np.concatenate([np.zeros(jobs), np.ones(jobs), capacity]), method="highs",
    )  # fmt: skip
    shares = np.zeros((jobs, types))
    if found.x is not None:
        shares[job, kind] = found.x[:last]
    return shares


def _kept(view: RoundView) -> tuple[Ints, Ints]:
    """Running jobs where they are, and what is left of the GPUs."""
    types = view.placed.copy()
    runs = types != WAITS
    used = np.bincount(types[runs], weights=view.gpus[runs], minlength=len(view.capacity)).astype(np.int64)
    return types, view.capacity - used


def _by_submission(view: RoundView, types: Ints) -> Ints:
    waiting = np.flatnonzero(types == WAITS)
    order: Ints = waiting[np.argsort(-view.since_s[waiting], kind="stable")]
    return order


def _queues(view: RoundView, wanted: Ints) -> RoundAllocation:
    """One strict queue for each type. wanted: (rows,) type that each job asked for."""
    types, free = _kept(view)
    blocked = np.zeros(len(view.capacity), dtype=bool)
    for row in _by_submission(view, types):
        kind = int(wanted[row])
        blocked[kind] |= view.gpus[row] > free[kind]
        if not blocked[kind]:
            types[row] = kind
            free[kind] -= view.gpus[row]
    return on_one_type(view, types)
