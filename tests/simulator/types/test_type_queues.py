"""Strict queues by type: starts by hand, predicted waits, and what jobs choose."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from placement_rounds import random_problem

from simulator.policies.types.chosen_type import (
    AdvisedType,
    RecentWaits,
    TypeQueue,
    TypeSubmission,
    fastest_type,
    least_end,
    simulate_queues,
)
from simulator.policies.types.rounds import TypedFifo, simulate_rounds
from simulator.traces.gavel import PlacementProblem, poisson_arrivals


def queue_of(capacity: int, *jobs: tuple[float, int, float]) -> TypeQueue:
    """jobs: submission, GPUs, and run time, known exactly."""
    queue = TypeQueue(capacity)
    for submit_s, gpus, run_s in jobs:
        queue.add(submit_s, gpus, run_s, run_s)
    return queue


def test_no_job_starts_before_an_earlier_one() -> None:
    """2 GPUs: the gang of 2 waits for the second job, and the single job waits for the gang."""
    queue = queue_of(2, (0, 1, 100), (0, 1, 300), (10, 2, 50), (20, 1, 5))
    assert [job.start_s for job in queue.jobs] == [0, 0, 300, 350]


def test_the_predicted_wait_is_the_real_one_where_run_times_are_known() -> None:
    queue = queue_of(2, (0, 1, 100), (0, 1, 300), (10, 2, 50))
    assert queue.predicted_wait_s(60, 1, []) == 350 - 60
    assert queue.predicted_wait_s(320, 1, []) == 350 - 320
    assert queue.predicted_wait_s(400, 2, []) == 0
    # A job of 2 GPUs for 1,000 s was sent here since.
    assert queue.predicted_wait_s(60, 1, [(2, 1000.0)]) == 1350 - 60


def test_a_job_that_outran_its_prediction_is_thought_to_need_a_tenth_more() -> None:
    queue = TypeQueue(1)
    queue.add(0, 1, 5000.0, 100.0)
    assert queue.predicted_wait_s(3000, 1, []) == 10
    assert queue.predicted_wait_s(40, 1, []) == 60


def test_a_snapshot_does_not_show_later_jobs() -> None:
    queue = queue_of(1, (0, 1, 100), (50, 1, 100))
    assert queue.predicted_wait_s(50, 1, []) == 50
    assert queue.predicted_wait_s(51, 1, []) == 149


def test_jobs_of_the_time_of_the_snapshot_are_counted_once() -> None:
    """30 jobs at time 0 on two alike GPUs: 15 each."""
    jobs = 30
    problem = PlacementProblem(
        types=("a", "b"),
        capacity=np.array([1, 1]),
        submit_s=np.zeros(jobs),
        gpus=np.ones(jobs, dtype=np.int64),
        work=np.full(jobs, 60.0),
        rates=np.ones((jobs, 2)),
    )
    assert simulate_queues(problem, AdvisedType()).end_s.max() == 15 * 60


def burst(jobs: int) -> PlacementProblem:
    """Jobs of 1,000 s on type 0 and 1,500 s on type 1, of one GPU each, all within the same minute."""
    return PlacementProblem(
        types=("fast", "slow"),
        capacity=np.array([1, 1]),
        submit_s=np.arange(jobs) * 1.0,
        gpus=np.ones(jobs, dtype=np.int64),
        work=np.full(jobs, 3000.0),
        rates=np.tile([3.0, 2.0], (jobs, 1)),
    )


def test_advice_since_the_snapshot_counts_as_queued() -> None:
    """Ends on fast: 1,000, 2,000, 3,000; on slow 1,500, 3,000: the third job is better off on fast.

    The fourth ends at the same time on both, and starts first on slow.
    """
    record = simulate_queues(burst(4), AdvisedType())
    run_s = record.end_s - record.start_s
    assert run_s.tolist() == [1000, 1500, 1000, 1500]


def test_the_median_of_recent_waits_sends_everybody_to_the_same_type() -> None:
    record = simulate_queues(burst(4), RecentWaits())
    assert (record.end_s - record.start_s).tolist() == [1000] * 4


def test_a_job_never_chooses_a_type_that_cannot_run_it() -> None:
    for chooser in (AdvisedType(), RecentWaits(), fastest_type):
        assert chooser([TypeQueue(1), queue_of(1, (0, 1, 1e6))], TypeSubmission(10.0, 1, np.array([np.inf, 60.0]))) == 1


def test_a_queue_at_rounds_is_the_same_as_first_in_first_out_in_rounds() -> None:
    problem = random_problem(np.random.default_rng(6), 40, spread_s=20_000)
    problem = dataclasses.replace(
        problem, types=problem.types[:1], capacity=problem.capacity[:1], rates=problem.rates.max(axis=1)[:, None]
    )
    problem = dataclasses.replace(problem, submit_s=problem.submit_s - problem.submit_s[0])
    queues = simulate_queues(problem, fastest_type, start_every_s=360.0)
    rounds = simulate_rounds(problem, TypedFifo())
    assert queues.start_s == pytest.approx(rounds.start_s)
    assert queues.end_s == pytest.approx(rounds.end_s)


def test_followed_advice_is_better_than_the_fastest_type_and_recent_waits() -> None:
    pool = random_problem(np.random.default_rng(7), 60)
    problem = poisson_arrivals(pool, 0.8, 300, seed=1)
    jct_s = {
        name: float((simulate_queues(problem, chooser).end_s - problem.submit_s).mean())
        for name, chooser in (
            ("advice", AdvisedType()),
            ("half", AdvisedType(follow=0.5)),
            ("recent", RecentWaits()),
            ("fastest", fastest_type),
        )
    }
    assert jct_s["advice"] < jct_s["half"] < jct_s["fastest"]
    assert jct_s["advice"] < jct_s["recent"]


def test_no_job_is_moved_and_each_runs_once() -> None:
    problem = random_problem(np.random.default_rng(8), 30, spread_s=5_000)
    record = simulate_queues(problem, AdvisedType(), known_work=problem.work * 3)
    run_s = record.end_s - record.start_s
    assert (np.abs(run_s[:, None] * problem.rates - problem.work[:, None]).min(axis=1) < 1e-6 * problem.work).all()
    assert (record.start_s >= problem.submit_s).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9) | st.just(math.inf)), min_size=1, max_size=4))
def test_advice_is_the_least_wait_plus_run_time(types: list[tuple[float, float]]) -> None:
    ends = [wait_s + run_s for wait_s, run_s in types]
    assume(min(ends) < math.inf)
    waits_s, run_s = zip(*types, strict=True)
    assert ends[least_end(waits_s, run_s)] == min(ends)
