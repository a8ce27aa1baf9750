"""Gavel-like policies: shares by hand, and rounds that follow them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from placement_rounds import random_problem, view_of

from simulator.policies.types.comparison import makespan_bound_s
from simulator.policies.types.rounds import (
    SharedRounds,
    duration_gains,
    max_min_shares,
    plain_gains,
    simulate_rounds,
    throughput_gains,
)


def test_two_alike_jobs_share_one_gpu() -> None:
    view = view_of([1, 1], [[2.0], [5.0]], [1])
    assert max_min_shares(throughput_gains(view), view.gpus, view.capacity).tolist() == [[0.5], [0.5]]


def test_each_job_gets_the_type_on_which_it_gains() -> None:
    """Job 0 is 4 times as fast on type 0 and job 1 on type 1: both gain 4 / 2.5 of an equal share."""
    view = view_of([1, 1], [[4.0, 1.0], [1.0, 4.0]], [1, 1])
    gains = throughput_gains(view)
    assert gains.tolist() == [[1.6, 0.4], [0.4, 1.6]]
    assert max_min_shares(gains, view.gpus, view.capacity).tolist() == pytest.approx(np.eye(2))


def test_a_gang_gets_no_more_gpu_time_than_a_single_job() -> None:
    view = view_of([1, 2], [[1.0], [1.0]], [2])
    shares = max_min_shares(plain_gains(view), view.gpus, view.capacity)
    # share x GPUs are equal, and 1 x + 2 y <= 2 with x = 2 y: both get one GPU's time.
    assert shares[:, 0].tolist() == pytest.approx([1.0, 0.5])


def test_no_share_of_a_type_that_a_job_cannot_run_on_or_that_is_too_small() -> None:
    view = view_of([1, 4], [[0.0, 1.0], [1.0, 1.0]], [3, 4])
    shares = max_min_shares(throughput_gains(view), view.gpus, view.capacity)
    assert shares[0, 0] == shares[1, 0] == 0
    assert (shares[:, 1] > 0).all()


def test_nothing_to_share() -> None:
    assert max_min_shares(np.zeros((1, 2)), np.array([1]), np.array([1, 1])).tolist() == [[0.0, 0.0]]


def test_rounds_follow_the_shares() -> None:
    policy = SharedRounds(plain_gains)
    runs = np.zeros(3)
    for _ in range(30):
        runs += policy.place(view_of([1, 1, 1], [[1.0], [2.0], [4.0]], [1])).rate > 0
    assert runs.tolist() == [10, 10, 10]


def test_the_least_total_duration_is_near_its_bound_and_plain_fairness_is_not() -> None:
    problem = random_problem(np.random.default_rng(5), 60)
    problem = dataclasses.replace(problem, work=problem.work * 10)
    bound = makespan_bound_s(problem)
    ratios = {
        gains: float(simulate_rounds(problem, SharedRounds(gains), move_s=0.0).end_s.max()) / bound
        for gains in (duration_gains, plain_gains)
    }
    assert 1 <= ratios[duration_gains] < 1.2 < ratios[plain_gains]
