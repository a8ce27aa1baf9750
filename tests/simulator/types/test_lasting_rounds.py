"""Rounds that repeat an allocation give the same schedule as rounds that ask the policy each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from placement_rounds import random_problem

from advisor.types.placement import NEVER_MOVE, PlacementRules
from simulator.policies.types.hadar import Hadar, HadarForked
from simulator.policies.types.rounds import (
    GreedyPairs,
    PricedSrpt,
    RoundAllocation,
    RoundPolicy,
    RoundView,
    SharedRounds,
    TypedFifo,
    plain_gains,
    simulate_rounds,
)
from simulator.traces.gavel import believed_work

LASTING: dict[str, Callable[[], RoundPolicy]] = {
    "fifo": TypedFifo,
    "greedy-pairs": GreedyPairs,
    "hadar": Hadar,
    "priced-srpt": PricedSrpt,
    "priced-srpt-stay": lambda: PricedSrpt(NEVER_MOVE),
}
CHANGING: dict[str, Callable[[], RoundPolicy]] = {
    "max-min": lambda: SharedRounds(plain_gains),
    "hadar-moves": lambda: Hadar(False),
    "hadare": HadarForked,
}


class EveryRound:
    """Asks the policy in each round."""

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy

    def place(self, view: RoundView) -> RoundAllocation:
        return replace(self._policy.place(view), lasts_s=0.0)


@pytest.mark.parametrize("name", LASTING)
def test_repeating_an_allocation_changes_no_start_end_or_move(name: str) -> None:
    asked = repeated = 0
    for seed in range(6):
        problem = random_problem(np.random.default_rng([seed, 31]), 12, [0.0, 5_000.0, 60_000.0][seed % 3])
        known = believed_work(problem, float(seed % 2), seed)
        each = simulate_rounds(problem, EveryRound(LASTING[name]()), 120.0, known_work=known)
        found = simulate_rounds(problem, LASTING[name](), 120.0, known_work=known)
        for field in ("start_s", "end_s", "moves"):
            assert getattr(found, field).tolist() == getattr(each, field).tolist(), (seed, field)
        asked, repeated = asked + len(each.decision_s), repeated + len(each.decision_s) - len(found.decision_s)
    assert repeated > 0.2 * asked


@pytest.mark.parametrize("name", CHANGING)
def test_policies_whose_choice_changes_with_time_are_asked_each_round(name: str) -> None:
    problem = random_problem(np.random.default_rng(32), 10, 20_000.0)
    each = simulate_rounds(problem, EveryRound(CHANGING[name]()), 60.0)
    assert len(simulate_rounds(problem, CHANGING[name](), 60.0).decision_s) == len(each.decision_s)


def test_priced_srpt_decides_less_often_while_jobs_have_days_left() -> None:
    """The two schedules differ, but not in how good they are."""
    problem = random_problem(np.random.default_rng(33), 9)
    days = replace(problem, work=problem.work * 400)
    policy = PricedSrpt(PlacementRules(short_queue=0))
    each, found = simulate_rounds(days, EveryRound(policy), 3600.0), simulate_rounds(days, policy, 3600.0)
    assert len(found.decision_s) < 0.7 * len(each.decision_s)
    assert found.end_s.mean() == pytest.approx(each.end_s.mean(), rel=0.02)
