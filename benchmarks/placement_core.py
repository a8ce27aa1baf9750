"""Priced SRPT against lower bounds, brute force, and FIFO's longest wait. Run: make bench-placement.

480 jobs at time 0 on 20 V100, 20 P100, and 20 K80, in rounds of 360 s, 10 s a move: the two traces of gavel_480, where
the shared data is, and traces of the same kind made here. The rules were chosen on the two traces and on own seeds 100
to 107; those from 201 on are unseen. Ratios are to the lower bounds of simulator/policies/types/comparison.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
from figures import Figure, at_most, exactly, main

from advisor.types.placement import (
    NEVER_MOVE,
    SOLVER_S,
    WAITS,
    Floats,
    PlacementRules,
    PlacementView,
    decide_placement,
    price,
)
from simulator.policies.types.comparison import makespan_bound_s, mean_jct_bound_s
from simulator.policies.types.rounds import PricedSrpt, Rounds, TypedFifo, simulate_rounds
from simulator.traces.gavel import PlacementProblem, read_gavel_types, read_problem


@dataclass(frozen=True)
class BestSchedules:
    """The least mean completion time and the least makespan, each over all schedules; infinite if none ends."""

    mean_jct_s: float
    makespan_s: float


def best_schedules(problem: PlacementProblem, round_s: float, rounds: int) -> BestSchedules:
    """Find the best schedules of jobs submitted at time 0, among those that end within so many rounds.

    Moves cost nothing. Ends may lie inside a round. A schedule that takes more rounds can have a lower mean completion
    time than the best of these.
    """
    places = _places(problem)
    search = _PlacementSearch(problem, places, round_s, rounds)
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
class _PlacementSearch:
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


SHARED = Path(os.environ.get("ALMANAC_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")
THROUGHPUTS = SHARED / "gavel_throughputs_k80_p100_v100.json"
CAPACITY = {"v100": 20, "p100": 20, "k80": 20}
GOALS = {"movable": (PlacementRules(), 1.07, 1.11), "never moved": (NEVER_MOVE, 1.22, 1.13)}


def like_gavel(seed: int, jobs: int = 480, load: float | None = None) -> PlacementProblem:
    """Jobs as Gavel's generator makes them; at time 0, or Poisson arrivals at a share of what the GPUs can do.

    Type of job uniform; 1, 2, or 4 GPUs for 70%, 10%, and 20% of those that can use several; 1 to 4 h on a V100.
    """
    rng = np.random.default_rng(seed)
    of_type = read_gavel_types(THROUGHPUTS, tuple(CAPACITY))
    kinds = sorted(kind for kind, gpus in of_type[0] if gpus == 1)
    rows = []
    for _ in range(jobs):
        kind, gpus = kinds[rng.integers(len(kinds))], int(rng.choice([1, 2, 4], p=[0.7, 0.1, 0.2]))
        gpus = gpus if of_type[0].get((kind, gpus)) else 1
        rates = [rate.get((kind, gpus), 0.0) for rate in of_type]
        rows.append((kind, gpus, 3600.0 * rng.integers(1, 5) * rates[0], rates))
    problem = PlacementProblem(
        tuple(CAPACITY), np.array(list(CAPACITY.values())), np.zeros(jobs), np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]), np.array([row[3] for row in rows]), tuple(row[0] for row in rows),
    )  # fmt: skip
    if load is None:
        return problem
    least_s, _ = price(problem.gpus, problem.work, problem.rates, problem.capacity)
    return replace(problem, submit_s=np.cumsum(rng.exponential(least_s / jobs / load, jobs)))


def mean_jct_s(problem: PlacementProblem, record: Rounds) -> float:
    return float(np.mean(record.end_s - problem.submit_s))


def longest_first_wait_s(problem: PlacementProblem, record: Rounds) -> float:
    return float(np.max(record.start_s - problem.submit_s))


def against_bounds(seeds: Sequence[int]) -> list[Figure]:
    problems = {f"gavel_480 seed {seed}": _given(seed) for seed in (0, 1)}
    problems |= {f"own seed {seed}": like_gavel(seed) for seed in seeds}
    figures, worst = [], dict[str, float]()
    for name, problem in problems.items():
        bounds_s = makespan_bound_s(problem), mean_jct_bound_s(problem)
        figures.append(Figure(f"{name}: lower bounds, h", f"{bounds_s[0] / 3600:.2f} / {bounds_s[1] / 3600:.2f}"))
        for mode, (rules, most_makespan, most_jct) in GOALS.items():
            record = simulate_rounds(problem, PricedSrpt(rules), clock=time.process_time)
            ratios = float(record.end_s.max()) / bounds_s[0], mean_jct_s(problem, record) / bounds_s[1]
            for what, ratio, most in zip(("makespan", "mean JCT"), ratios, (most_makespan, most_jct), strict=True):
                figures.append(at_most(f"{name}, {mode}: {what} / bound", ratio, most))
                if name.startswith("own"):
                    worst[f"{mode}: {what}"] = max(ratio, worst.get(f"{mode}: {what}", 0.0))
            median_s = float(np.median(record.decision_s))
            figures.append(at_most(f"{name}, {mode}: median decision, CPU s", median_s, 0.1))
            print(name, mode, *ratios, median_s, file=sys.stderr, flush=True)
    return figures + [Figure(f"worst of {len(seeds)} unseen traces, {what}", ratio) for what, ratio in worst.items()]


def _given(seed: int) -> PlacementProblem:
    return read_problem(SHARED / "gavel_480" / f"seed{seed}.trace", THROUGHPUTS, CAPACITY)[0]


def against_brute_force(instances: int) -> list[Figure]:
    """Random instances of at most 5 jobs that all schedules of 6 rounds were tried on."""
    gaps, makespans, makespans_first, beaten = [], [], [], 0
    makespan_first = PricedSrpt(PlacementRules(makespan_weight=10.0))
    for seed in range(1000, 1000 + instances):
        problem = random_instance(np.random.default_rng(seed))
        best = best_schedules(problem, 1.0, 6)
        if not np.isfinite(best.mean_jct_s):
            continue
        record = simulate_rounds(problem, PricedSrpt(), 1.0, 0.0)
        gaps.append(mean_jct_s(problem, record) / best.mean_jct_s - 1)
        makespans.append(float(record.end_s.max()) / best.makespan_s - 1)
        last_s = float(simulate_rounds(problem, makespan_first, 1.0, 0.0).end_s.max())
        makespans_first.append(last_s / best.makespan_s - 1)
        least = makespan_bound_s(problem) / best.makespan_s, mean_jct_bound_s(problem, 12) / best.mean_jct_s
        beaten += max(least) > 1 + 1e-6
    mean, worst = float(np.mean(gaps)), max(gaps)
    return [
        Figure("brute force: instances that end in 6 rounds", len(gaps)),
        at_most("brute force: mean gap of the mean JCT", mean, 0.05),
        at_most("brute force: worst gap of the mean JCT", worst, 0.25),
        Figure("brute force: least gap (below 0: more than 6 rounds, but a lower mean)", min(gaps)),
        Figure("brute force: mean gap of the makespan", float(np.mean(makespans))),
        Figure("brute force: share with a makespan more than 25% above", float(np.mean(np.array(makespans) > 0.25))),
        Figure("brute force: mean gap of the makespan, makespan_weight=10", float(np.mean(makespans_first))),
        Figure("brute force: worst gap of the makespan, makespan_weight=10", max(makespans_first)),
        exactly("brute force: instances whose best beats a bound", beaten, 0),
    ]


def ageing(jobs: int) -> list[Figure]:
    figures = []
    problems = {"gavel_480 seed 0": _given(0), f"{jobs} arrivals at load 0.9": like_gavel(201, jobs, 0.9)}
    for name, problem in problems.items():
        fifo, without, aged = (
            simulate_rounds(problem, policy)
            for policy in (TypedFifo(), PricedSrpt(), PricedSrpt(replace(PlacementRules(), ageing=1.0)))
        )
        wait = longest_first_wait_s(problem, aged) / longest_first_wait_s(problem, fifo)
        jct = mean_jct_s(problem, aged) / mean_jct_s(problem, without)
        figures += [
            Figure(f"{name}: longest first wait, FIFO, h", longest_first_wait_s(problem, fifo) / 3600),
            Figure(f"{name}: longest first wait, no ageing, h", longest_first_wait_s(problem, without) / 3600),
            at_most(f"{name}: longest first wait, ageing / FIFO", wait, 2.2),
            at_most(f"{name}: mean JCT, ageing / no ageing", jct, 1.15),
        ]
        print(*figures[-4:], sep="\n", file=sys.stderr, flush=True)
    return figures


def speed() -> Figure:
    problem = like_gavel(301, 2048)
    view = PlacementView(problem.gpus, problem.work, problem.rates, np.full(len(problem), WAITS), problem.capacity)
    rules = PlacementRules(solver_s=SOLVER_S)
    decide_placement(view, rules)
    begun = time.perf_counter()
    decide_placement(view, rules)
    took_s = time.perf_counter() - begun
    return at_most("a decision for 2,048 jobs, 3 types, 60 GPUs, s", took_s, 2)


def measure() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000, help="random ones, against brute force")
    parser.add_argument("--unseen", type=int, default=4, help="own traces")
    parser.add_argument("--arrivals", type=int, default=960, help="jobs of the trace with arrivals")
    parser.add_argument("--only", choices=("bounds", "brute", "ageing", "speed"))
    options = parser.parse_args()
    if not THROUGHPUTS.exists():
        print(f"{THROUGHPUTS}: absent; only the brute force is run", file=sys.stderr)
    parts = {
        "speed": lambda: [speed()],
        "bounds": lambda: against_bounds(range(201, 201 + options.unseen)),
        "ageing": lambda: ageing(options.arrivals),
        "brute": lambda: against_brute_force(options.instances),
    }
    wanted = [options.only] if options.only else list(parts) if THROUGHPUTS.exists() else ["brute"]
    return [figure for part in wanted for figure in parts[part]()]


if __name__ == "__main__":
    main(measure)
