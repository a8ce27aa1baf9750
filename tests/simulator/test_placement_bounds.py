"""Rounds, bounds, and brute force of jobs on several GPU types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_core import best_schedules, random_instance
from profiles import examples

from advisor.types.placement import NEVER_MOVE, WAITS, PlacementRules
from simulator.policies.types.comparison import makespan_bound_s, mean_jct_bound_s
from simulator.policies.types.rounds import GreedyPairs, PricedSrpt, TypedFifo, on_one_type, simulate_rounds
from simulator.traces.gavel import PlacementProblem

POLICIES = (
    PricedSrpt(), PricedSrpt(NEVER_MOVE), PricedSrpt(PlacementRules(ageing=1.0)), TypedFifo(), GreedyPairs(),
)  # fmt: skip


def problem(gpus, work, rates, capacity, submit_s=None):
    submit = np.zeros(len(gpus)) if submit_s is None else np.array(submit_s, float)
    names = tuple(f"t{number}" for number in range(len(capacity)))
    return PlacementProblem(
        names, np.array(capacity), submit, np.array(gpus), np.array(work, float), np.array(rates, float)
    )


class Alternates:
    """One job on each type in turn."""

    def place(self, view):
        return on_one_type(view, np.array([round(view.now_s) // 10 % 2]))


class WaitsForever:
    def place(self, view):
        return on_one_type(view, np.full(len(view.gpus), WAITS))


def test_one_job_on_two_types_ends_inside_a_round():
    record = simulate_rounds(problem([1], [25], [[1, 2]], [1, 1]), PricedSrpt(), 10.0)
    assert record.end_s.tolist() == [12.5]
    assert record.moves.tolist() == [0]


def test_a_move_costs_its_time():
    record = simulate_rounds(problem([1], [25], [[1, 1]], [1, 1]), Alternates(), 10.0, move_s=2.0)
    assert record.end_s.tolist() == [29.0]  # 10 s, 8 s after a move, and 7 s after another one
    assert record.moves.tolist() == [2]


def test_work_that_fills_its_last_round_ends_with_it():
    record = simulate_rounds(problem([1], [0.3 * 3], [[0.09]], [1]), PricedSrpt(), 10.0)
    assert record.end_s == pytest.approx([10.0])


def test_a_policy_that_starts_nothing_or_too_much_is_an_error():
    with pytest.raises(ValueError, match="starts none"):
        simulate_rounds(problem([1], [1], [[1]], [1]), WaitsForever(), 10.0)
    with pytest.raises(ValueError, match="GPUs of"):
        simulate_rounds(problem([2], [1], [[1, 1]], [1, 1]), Alternates(), 10.0)


def test_bounds_of_one_job_are_its_run_time():
    alone = problem([1], [30], [[1, 3]], [1, 1])
    assert makespan_bound_s(alone) == pytest.approx(10.0)
    assert mean_jct_bound_s(alone, 100) == pytest.approx(10.0)


def test_bound_of_two_jobs_one_after_the_other():
    both = problem([1, 1], [10, 10], [[1], [1]], [1])
    assert makespan_bound_s(both) == pytest.approx(20.0)
    assert 14.8 < mean_jct_bound_s(both, 200) <= 15.0


def test_work_submitted_late_counts_from_its_submission():
    late = problem([1, 1], [10, 10], [[1], [1]], [1], [0, 100])
    assert makespan_bound_s(late) == pytest.approx(110.0)
    assert mean_jct_bound_s(late, 200) == pytest.approx(10.0)


def test_jobs_far_shorter_than_an_interval_need_their_run_time():
    apart = problem([1, 1], [10, 10], [[1, 2], [1, 2]], [1, 1], [0, 1e6])
    assert mean_jct_bound_s(apart, 10) == pytest.approx(5.0)


def test_bounds_refuse_a_job_that_runs_nowhere():
    with pytest.raises(ValueError, match="1 jobs run on no type"):
        mean_jct_bound_s(problem([1, 1], [1, 1], [[1], [0]], [1]))


def test_brute_force_of_three_jobs_by_hand():
    # 1 GPU of each type. Shortest first on the fast type: 1 + 2 there, and 4 on the slow one.
    best = best_schedules(problem([1, 1, 1], [1, 1, 2], [[1, 0.5]] * 3, [1, 1]), 1.0, 6)
    assert best.mean_jct_s == pytest.approx((1 + 2 + 3) / 3)
    assert best.makespan_s == pytest.approx(3.0)


def test_small_instances_against_brute_force_and_bounds():
    gaps, makespans = [], []
    for seed in range(100):
        small = random_instance(np.random.default_rng(seed), most_jobs=4)
        best = best_schedules(small, 1.0, 6)
        if not np.isfinite(best.mean_jct_s):
            continue
        assert makespan_bound_s(small) <= best.makespan_s * (1 + 1e-7)
        assert mean_jct_bound_s(small, 12) <= best.mean_jct_s * (1 + 1e-7)
        record = simulate_rounds(small, PricedSrpt(), 1.0, 0.0)
        gaps.append(record.end_s.mean() / best.mean_jct_s - 1)
        assert gaps[-1] >= -1e-9 or record.end_s.max() > 6
        assert record.end_s.max() >= best.makespan_s * (1 - 1e-9)
        soon = simulate_rounds(small, PricedSrpt(PlacementRules(makespan_weight=10.0)), 1.0, 0.0)
        makespans.append([each.end_s.max() / best.makespan_s - 1 for each in (record, soon)])
    assert len(gaps) >= 90
    assert np.mean(gaps) <= 0.02
    assert max(gaps) <= 0.25
    both, makespan_first = np.array(makespans).T
    assert both.mean() <= 0.05
    assert makespan_first.mean() <= 0.02
    assert makespan_first.max() <= 0.25


@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.booleans())
@examples(0.2)
def test_no_schedule_beats_the_bounds(seed, policy, arrive):
    rng = np.random.default_rng(seed)
    tried = random_instance(rng)
    if arrive:
        tried = replace(tried, submit_s=np.sort(rng.uniform(0, 4, len(tried))))
    record = simulate_rounds(tried, policy, 0.5, 0.1)
    first_s = tried.submit_s.min()
    assert makespan_bound_s(tried) <= (record.end_s.max() - first_s) * (1 + 1e-7)
    assert mean_jct_bound_s(tried, 30) <= np.mean(record.end_s - tried.submit_s) * (1 + 1e-7)


@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.sampled_from([0.25, 3600.0]))
@examples(0.1)
def test_scaling_time_scales_results(seed, policy, factor):
    small = random_instance(np.random.default_rng(seed))
    once = simulate_rounds(small, policy, 0.5, 0.1)
    slower = replace(small, rates=small.rates / factor)
    scaled = simulate_rounds(slower, policy, 0.5 * factor, 0.1 * factor)
    assert scaled.end_s == pytest.approx(once.end_s * factor)
    assert makespan_bound_s(slower) == pytest.approx(makespan_bound_s(small) * factor)
    assert mean_jct_bound_s(slower, 20) == pytest.approx(mean_jct_bound_s(small, 20) * factor)
