"""What holds for every policy: all jobs end, none beats the bounds, and a wrong belief changes no job's speed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from placement_rounds import random_problem

from simulator.placement.comparison import (
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
    assert np.isfinite([score.makespan_s, score.mean_jct_s, score.longest_first_wait_s]).all()
    if name not in ONE_PLACE_EXCEPT:
        bounds = find_bounds(problem)
        assert score.makespan_s >= bounds.makespan_s * (1 - 1e-6)
        assert score.mean_jct_s >= bounds.mean_jct_s * (1 - 1e-6)


@pytest.mark.parametrize("name", ["advice", "fifo", "hadar-moves", "hadare", "min-makespan", "priced-srpt-stay"])
def test_wrong_run_times_end_too(name: str) -> None:
    problem = random_problem(np.random.default_rng(11), 20, 10_000)
    exact, wrong = (run_policy(problem, name, PlacementOptions(error=error)) for error in (0.0, 1.5))
    assert wrong.mean_jct_s >= 0.5 * exact.mean_jct_s


@pytest.mark.parametrize("name", ["fifo", "fastest-type", "advice", "recent-waits", "hadar", "priced-srpt-stay"])
def test_policies_that_never_move_never_move(name: str) -> None:
    problem = random_problem(np.random.default_rng(12), 40, 10_000)
    assert run_policy(problem, name, PlacementOptions()).moves == 0


@pytest.mark.parametrize("name", ["priced-srpt", "fifo", "advice"])
def test_time_is_scaled_like_the_work(name: str) -> None:
    problem = random_problem(np.random.default_rng(13), 15, 10_000)
    slow = dataclasses.replace(problem, submit_s=problem.submit_s * 4, rates=problem.rates / 4)
    options = PlacementOptions()
    first = run_policy(problem, name, options)
    second = run_policy(slow, name, dataclasses.replace(options, round_s=options.round_s * 4, move_s=40.0))
    if name == "advice":  # a snapshot is at most 10 minutes old, whatever the jobs' times
        assert second.mean_jct_s / 4 == pytest.approx(first.mean_jct_s, rel=0.3)
    else:
        assert second.mean_jct_s / 4 == pytest.approx(first.mean_jct_s, rel=1e-6)
