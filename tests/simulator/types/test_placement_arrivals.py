"""Poisson arrivals of a set load, and errors of run times."""

from __future__ import annotations

import numpy as np
import pytest
from placement_rounds import random_problem

from advisor.types.placement import price
from simulator.traces.gavel import believed_work, poisson_arrivals


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_the_load_is_the_work_over_what_the_fluid_program_can_serve(load: float) -> None:
    drawn = poisson_arrivals(random_problem(np.random.default_rng(9), 50), load, 2000, seed=3)
    makespan_s, _ = price(drawn.gpus, drawn.work, drawn.rates, drawn.capacity)
    assert makespan_s / drawn.submit_s[-1] == pytest.approx(load, rel=0.1)
    gaps = np.diff(drawn.submit_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.1)  # exponential


def test_jobs_are_those_of_the_pool() -> None:
    pool = random_problem(np.random.default_rng(9), 50)
    drawn = poisson_arrivals(pool, 0.7, 300, seed=3)
    known = {(gpus, work, *rates) for gpus, work, rates in zip(pool.gpus, pool.work, pool.rates.tolist(), strict=True)}
    assert {(g, w, *r) for g, w, r in zip(drawn.gpus, drawn.work, drawn.rates.tolist(), strict=True)} <= known
    assert len(drawn.kinds) == len(drawn) == 300


def test_a_seed_gives_the_same_jobs_and_another_one_others() -> None:
    pool = random_problem(np.random.default_rng(9), 50)
    first, again, other = (poisson_arrivals(pool, 0.7, 100, seed).submit_s.tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("load", "jobs"), [(0.0, 10), (-1.0, 10), (float("inf"), 10), (float("nan"), 10), (0.5, 0)])
def test_impossible_loads_are_refused(load: float, jobs: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        poisson_arrivals(random_problem(np.random.default_rng(9), 5), load, jobs, seed=1)


def test_errors_are_lognormal_with_median_1() -> None:
    problem = random_problem(np.random.default_rng(9), 4000)
    believed = believed_work(problem, 0.5, seed=1)
    assert believed is not None
    error = np.log(believed / problem.work)
    assert error.mean() == pytest.approx(0.0, abs=0.03)
    assert error.std() == pytest.approx(0.5, abs=0.03)
    assert believed_work(problem, 0.0, seed=1) is None
