"""The best that any schedule in rounds can do, by trying them all: for instances of a few jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from advisor.decisions.placement import WAITS, Floats
from simulator.placement.problem import PlacementProblem


@dataclass(frozen=True)
class BestSchedules:
    """The least mean completion time and the least makespan, each over all schedules; infinite if none ends."""

    mean_jct_s: float
    makespan_s: float


def best_schedules(problem: PlacementProblem, round_s: float, rounds: int) -> BestSchedules:
    """Of jobs submitted at time 0 that all end within so many rounds; moves cost nothing. Ends may lie inside a round.

    A schedule that takes more rounds can have a lower mean completion time than the best of these.
    """
    places = _places(problem)
    search = _Search(problem, places, round_s, rounds)
    return BestSchedules(search.least_sum(0, problem.work) / len(problem), search.least_last(0, problem.work))


def _places(problem: PlacementProblem) -> list[tuple[int, ...]]:
    found = []
    for types in product(range(WAITS, len(problem.types)), repeat=len(problem)):
        used = [0] * len(problem.types)
        for job, kind in enumerate(types):
            if kind != WAITS:
                used[kind] += int(problem.gpus[job]) if problem.rates[job, kind] > 0 else 1 << 30
        if all(amount <= most for amount, most in zip(used, problem.capacity, strict=True)):
            found.append(types)
    return found


@dataclass
class _Search:
    problem: PlacementProblem
    places: list[tuple[int, ...]]
    round_s: float
    rounds: int
    sums: dict[tuple[int, bytes], float] = field(default_factory=dict)
    lasts: dict[tuple[int, bytes], float] = field(default_factory=dict)

    def least_sum(self, begun: int, left: Floats) -> float:
        """Of the completion times, of jobs with work left after `begun` rounds."""
        key = (begun, left.round(9).tobytes())
        if key not in self.sums:
            self.sums[key] = self._least_sum(begun, left)
        return self.sums[key]

    def _least_sum(self, begun: int, left: Floats) -> float:
        if not (left > 0).any():
            return 0.0
        if begun == self.rounds:
            return np.inf
        return min(float(ends.sum()) + self.least_sum(begun + 1, after) for ends, after in self._steps(begun, left))

    def least_last(self, begun: int, left: Floats) -> float:
        """Of the latest completion time, likewise."""
        key = (begun, left.round(9).tobytes())
        if key not in self.lasts:
            self.lasts[key] = self._least_last(begun, left)
        return self.lasts[key]

    def _least_last(self, begun: int, left: Floats) -> float:
        if not (left > 0).any():
            return 0.0
        if begun == self.rounds:
            return np.inf
        return min(
            max(float(ends.max()), self.least_last(begun + 1, after)) for ends, after in self._steps(begun, left)
        )

    def _steps(self, begun: int, left: Floats) -> list[tuple[Floats, Floats]]:
        """Times at which jobs end in a round, 0 for others, and the work left; by the place of jobs that are left."""
        active, seen = left > 0, dict[tuple[int, ...], tuple[Floats, Floats]]()
        jobs = np.arange(len(left))
        for types in self.places:
            kept = tuple(kind if active[job] else WAITS for job, kind in enumerate(types))
            if kept in seen or not any(kind != WAITS for kind in kept):
                continue
            kinds = np.array(kept)
            rate = np.where(kinds != WAITS, self.problem.rates[jobs, kinds], 0.0)
            after = np.where(rate * self.round_s >= left * (1 - 1e-9), 0.0, left - rate * self.round_s)
            ends = active & (after <= 0)
            at_s = begun * self.round_s + np.divide(left, rate, out=np.zeros(len(left)), where=rate > 0)
            seen[kept] = (np.where(ends, at_s, 0.0), after)
        return _not_dominated(list(seen.values()))


def _not_dominated(steps: list[tuple[Floats, Floats]]) -> list[tuple[Floats, Floats]]:
    """Without those after which no job has less left, and none ended earlier, than after another."""
    after = np.array([step[1] for step in steps])
    ended = np.array([np.where(step[0] > 0, step[0], np.inf) for step in steps])
    kept = []
    for number in range(len(steps)):
        better = (after <= after[number]).all(axis=1) & (ended <= ended[number]).all(axis=1)
        equal = better & (after == after[number]).all(axis=1) & (ended == ended[number]).all(axis=1)
        if not (better & ~equal).any() and equal.argmax() == number:
            kept.append(steps[number])
    return kept


def random_instance(rng: np.random.Generator, most_jobs: int = 5) -> PlacementProblem:
    """2 to most_jobs jobs of up to 3 rounds, 2 or 3 types of 1 to 4 GPUs; some pairs cannot run."""
    jobs, types = int(rng.integers(2, most_jobs + 1)), int(rng.integers(2, 4))
    capacity = rng.integers(1, 5, types)
    gpus = np.minimum(rng.integers(1, 4, jobs), capacity.max())
    rates = rng.uniform(0.2, 1.0, (jobs, types))
    rates[rng.random((jobs, types)) < 0.1] = 0.0
    rates[gpus[:, None] > capacity[None, :]] = 0.0
    stuck = rates.max(axis=1) <= 0
    rates[stuck, capacity.argmax()] = 1.0
    work = rates.max(axis=1) * rng.uniform(0.3, 3.0, jobs)
    return PlacementProblem(tuple(f"t{number}" for number in range(types)), capacity, np.zeros(jobs), gpus, work, rates)
