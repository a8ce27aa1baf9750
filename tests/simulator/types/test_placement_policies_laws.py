"""Laws of every policy: all jobs end, none beats the bounds, and a wrong belief changes no job's speed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from placement_rounds import random_problem

from simulator.policies.types.comparison import (
    ONE_PLACE_EXCEPT,
    POLICIES,
    PlacementOptions,
    find_bounds,
    run_policy,
)


@pytest.mark.parametrize("spread_s", [0.0, 20_000.0])
@pytest.mark.parametrize("name", POLICIES)
def test_all_jobs_end_and_no_schedule_beats_the_bounds(name: str, spread_s: float) -> None:
    problem = random_problem(np.random.default_rng(10), 15, spread_s)
    score = run_policy(problem, name, PlacementOptions(move_s=0.0))
    assert score.jobs.is_known.all() and (score.jobs.delay_s >= -1e-6).all()
    assert 0 < score.utilization <= 1 + 1e-9
    if name not in ONE_PLACE_EXCEPT:
        bounds = find_bounds(problem)
        assert score.makespan_s >= bounds.makespan_s * (1 - 1e-6)
        assert score.jobs.jct_s.mean() >= bounds.mean_jct_s * (1 - 1e-6)


@pytest.mark.parametrize("name", ["advice", "fifo", "hadar-moves", "hadare", "min-makespan", "priced-srpt-stay"])
def test_wrong_run_times_end_too(name: str) -> None:
    problem = random_problem(np.random.default_rng(11), 20, 10_000)
    exact, wrong = (run_policy(problem, name, PlacementOptions(error=error)) for error in (0.0, 1.5))
    assert wrong.jobs.jct_s.mean() >= 0.5 * exact.jobs.jct_s.mean()


@pytest.mark.parametrize("name", ["fifo", "fastest-type", "advice", "recent-waits", "hadar", "priced-srpt-stay"])
def test_policies_that_never_move_never_move(name: str) -> None:
    problem = random_problem(np.random.default_rng(12), 40, 10_000)
    assert run_policy(problem, name, PlacementOptions()).interruptions == 0


@pytest.mark.parametrize("name", ["priced-srpt", "fifo", "advice"])
def test_time_is_scaled_like_the_work(name: str) -> None:
    problem = random_problem(np.random.default_rng(13), 15, 10_000)
    slow = dataclasses.replace(problem, submit_s=problem.submit_s * 4, rates=problem.rates / 4)
    options = PlacementOptions()
    first = run_policy(problem, name, options)
    second = run_policy(slow, name, dataclasses.replace(options, round_s=options.round_s * 4, move_s=40.0))
    if name == "advice":  # a snapshot is at most 10 minutes old, whatever the jobs' times
        assert second.jobs.jct_s.mean() / 4 == pytest.approx(first.jobs.jct_s.mean(), rel=0.3)
    else:
        assert second.jobs.jct_s.mean() / 4 == pytest.approx(first.jobs.jct_s.mean(), rel=1e-6)
