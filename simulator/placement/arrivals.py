"""Jobs that arrive over time, drawn from the jobs of a trace, and run times that are known with an error."""

from __future__ import annotations

import dataclasses

import numpy as np

from advisor.decisions.placement import Floats, price
from simulator.placement.problem import PlacementProblem


def poisson_arrivals(pool: PlacementProblem, load: float, jobs: int, seed: int) -> PlacementProblem:
    """Jobs drawn from the pool with replacement, that arrive as a Poisson process.

    load: the arrival rate over the rate at which the GPUs could serve these jobs at best. The latter is the number of
    jobs over the least makespan of the fluid linear program, in which jobs can be split between types. Raises
    ValueError for a load or a number of jobs that is not positive.
    """
    if not (0 < load < float("inf") and jobs > 0):
        raise ValueError(f"a load of {load} and {jobs} jobs: both must be positive")
    generator = np.random.default_rng([seed, 21])
    drawn = generator.integers(len(pool), size=jobs)
    gpus, work, rates = pool.gpus[drawn], pool.work[drawn], pool.rates[drawn]
    makespan_s, _ = price(gpus, work, rates, pool.capacity)
    gaps = generator.exponential(makespan_s / jobs / load, size=jobs)
    return dataclasses.replace(
        pool,
        submit_s=np.concatenate([[0.0], np.cumsum(gaps)[:-1]]),
        gpus=gpus,
        work=work,
        rates=rates,
        kinds=tuple(pool.kinds[row] for row in drawn.tolist()) if pool.kinds else (),
    )


def believed_work(problem: PlacementProblem, sigma: float, seed: int) -> Floats | None:
    """(jobs,) the work times a lognormal error of this sigma and median 1; None where sigma is 0: it is known."""
    if not sigma:
        return None
    error = np.random.default_rng([seed, 22]).normal(0.0, sigma, len(problem))
    believed: Floats = problem.work * np.exp(error)
    return believed
