"""Rounds and problems to place, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.types.placement import WAITS
from simulator.policies.types.rounds import RoundView
from simulator.traces.gavel import PlacementProblem


def view_of(
    gpus: Sequence[int],
    rates: Sequence[Sequence[float]],
    capacity: Sequence[int],
    left: Sequence[float] | None = None,
    done: Sequence[float] | None = None,
    since_s: Sequence[float] | None = None,
) -> RoundView:
    """A round whose jobs wait. left: 1,000 by default."""
    jobs = len(gpus)
    return RoundView(
        now_s=0.0,
        jobs=np.arange(jobs),
        gpus=np.array(gpus),
        rates=np.array(rates, dtype=float),
        left=np.array(left or [1000.0] * jobs, dtype=float),
        placed=np.full(jobs, WAITS),
        waited_s=np.zeros(jobs),
        since_s=np.array(since_s or [0.0] * jobs, dtype=float),
        done=np.array(done or [0.0] * jobs, dtype=float),
        capacity=np.array(capacity),
        round_s=360.0,
    )


def random_view(generator: np.random.Generator, most_jobs: int = 5) -> RoundView:
    """1 to most_jobs jobs of which some ran before, and 2 or 3 types; every job can run somewhere."""
    jobs, types = int(generator.integers(1, most_jobs + 1)), int(generator.integers(2, 4))
    rates = generator.lognormal(0, 1, (jobs, types)) * (generator.random((jobs, types)) > 0.2)
    rates[:, 0] = np.maximum(rates[:, 0], 0.01)
    return view_of(
        generator.integers(1, 4, jobs).tolist(),
        rates.tolist(),
        generator.integers(1, 6, types).tolist(),
        generator.lognormal(7, 1, jobs).tolist(),
        (generator.lognormal(5, 1, jobs) * (generator.random(jobs) > 0.5)).tolist(),
        (generator.random(jobs) * 20_000).tolist(),
    )


def random_problem(generator: np.random.Generator, jobs: int, spread_s: float = 0.0) -> PlacementProblem:
    """Jobs on types of 4, 4, and 8 GPUs, each several times as fast as the one before it for some jobs."""
    rates = generator.lognormal(0, 0.7, (jobs, 3)) * np.array([4.0, 2.0, 1.0])
    return PlacementProblem(
        types=("h100", "a100", "v100"),
        capacity=np.array([4, 4, 8]),
        submit_s=np.sort(generator.random(jobs)) * spread_s,
        gpus=generator.choice([1, 2, 4], jobs, p=[0.7, 0.2, 0.1]),
        work=generator.lognormal(8, 1.2, jobs),
        rates=rates,
        kinds=tuple(f"kind {row % 5}" for row in range(jobs)),
    )
