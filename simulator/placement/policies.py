"""Policies that place jobs on GPU types: what almanac uses, and the simplest ones that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from advisor.decisions.placement import (
    WAITS,
    Ints,
    PlacementRules,
    PlacementView,
    decide_placement,
)
from simulator.placement.rounds import RoundAllocation, RoundView, lasts_if_fastest, lasts_if_full, on_one_type

_STEADY = 0.02
"""Of the median time left of the jobs. Without an arrival or an end, the next decision comes after so long; in the
next round of 360 s where half of the jobs end within 5 h."""


@dataclass(frozen=True)
class PricedSrpt:
    """advisor.decisions.placement, as live. Jobs that have days left are not decided on in each round."""

    rules: PlacementRules = field(default_factory=PlacementRules)

    def place(self, view: RoundView) -> RoundAllocation:
        """See decide_placement."""
        seen = PlacementView(
            view.gpus, view.left, view.rates, view.placed, view.capacity, view.waited_s, round_s=view.round_s
        )
        found = on_one_type(view, decide_placement(seen, self.rules).types)
        if not self.rules.move_all:
            return lasts_if_full(view, found)
        with np.errstate(divide="ignore"):
            steady_s = _STEADY * float(np.median(view.left / view.rates.max(axis=1)))
        found = lasts_if_fastest(view, found)
        return replace(found, lasts_s=max(found.lasts_s, steady_s))


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
        return replace(on_one_type(view, types), lasts_s=np.inf)


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
        return lasts_if_fastest(view, on_one_type(view, types))


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
    return replace(on_one_type(view, types), lasts_s=np.inf)
