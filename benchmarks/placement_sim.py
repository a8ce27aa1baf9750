"""Placement of jobs on GPU types: policies on Gavel's jobs, with Poisson arrivals, and with advice alone.

Run: benchmarks/placement_sim.py [SEEDS] [JOBS], by default 2 seeds of 960 arriving jobs. The traces come from
../shared/data. 20 GPUs each of V100, P100, and K80; rounds of 360 s; a move costs 10 s. Gavel's policies are rebuilt
(simulator/policies/types/rounds.py), so that its published scheduler can differ by some percent.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from figures import Figure, at_most, main
from traces import DATA

from simulator.comparison import silent_solver
from simulator.policies.types.chosen_type import AdvisedType, simulate_queues
from simulator.policies.types.comparison import (
    ONE_PLACE_EXCEPT,
    POLICIES,
    PlacementOptions,
    find_bounds,
    run_policy,
)
from simulator.traces.gavel import PlacementProblem, poisson_arrivals, read_problem

CAPACITY = {"v100": 20, "p100": 20, "k80": 20}
LOADS = (0.7, 0.9)
ARRIVING = (
    "fifo", "fastest-type", "max-min", "max-min-perf", "hadar", "advice", "advice-half", "recent-waits",
    "priced-srpt-stay", "priced-srpt",
)  # fmt: skip
GOALS = {
    ("priced-srpt", "makespan"): 1.07, ("priced-srpt", "JCT"): 1.11,
    ("priced-srpt-stay", "makespan"): 1.22, ("priced-srpt-stay", "JCT"): 1.13,
}  # fmt: skip
ADVICE_GOALS = {0.7: 1.20, 0.9: 2.05}
HOUR_S = 3600.0


def trace_of(seed: int) -> PlacementProblem:
    path = DATA / "gavel_480" / f"seed{seed}.trace"
    return read_problem(path, DATA / "gavel_throughputs_k80_p100_v100.json", CAPACITY)[0]


def show_progress(where: str, policy: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {where}: {policy}", file=sys.stderr, flush=True)


def batch(seed: int) -> list[Figure]:
    """Compare the policies on jobs that are all submitted at time 0."""
    problem = trace_of(seed)
    bounds = find_bounds(problem)
    figures = [
        Figure(f"seed {seed}: bound of the makespan, h", bounds.makespan_s / HOUR_S),
        Figure(f"seed {seed}: bound of the mean JCT, h", bounds.mean_jct_s / HOUR_S),
    ]
    for name in POLICIES:
        show_progress(f"seed {seed}", name)
        run = run_policy(problem, name, PlacementOptions())
        for what, value, bound in (
            ("makespan", run.makespan_s, bounds.makespan_s), ("JCT", float(run.jobs.jct_s.mean()), bounds.mean_jct_s),
        ):  # fmt: skip
            figures.append(Figure(f"seed {seed}, {name}: {what}, h", value / HOUR_S))
            if name not in ONE_PLACE_EXCEPT:
                goal = GOALS.get((name, what))
                figures.append(at_most(f"seed {seed}, {name}: {what} / bound", value / bound, goal))
    return figures


def arriving(pool: PlacementProblem, load: float, seeds: Sequence[int], jobs: int) -> list[Figure]:
    """Means over the seeds."""
    problems = [poisson_arrivals(pool, load, jobs, seed) for seed in seeds]
    jct = {name: mean_jct_h(problems, name, seeds) for name in ARRIVING}
    wrong = {
        (name, sigma): mean_jct_h(problems, name, seeds, sigma)
        for name in ("advice", "priced-srpt-stay", "priced-srpt") for sigma in (1.0,)
    }  # fmt: skip
    fair, best = jct["max-min-perf"], jct["priced-srpt"]
    is_high = load == max(LOADS)
    figures = [Figure(f"load {load}, {name}: mean JCT, h", value) for name, value in jct.items()]
    figures += [
        Figure(f"load {load}, {name}, run times off by sigma {sigma}: mean JCT, h", value)
        for (name, sigma), value in wrong.items()
    ]
    figures += [
        at_most(f"load {load}: priced-srpt / max-min-perf", best / fair, 0.80 if is_high else None),
        at_most(f"load {load}: priced-srpt at sigma 1 / max-min-perf", wrong["priced-srpt", 1.0] / fair, None),
        at_most(
            f"load {load}: priced-srpt-stay / max-min-perf", jct["priced-srpt-stay"] / fair, 0.92 if is_high else None
        ),
        at_most(f"load {load}: advice / priced-srpt", jct["advice"] / best, ADVICE_GOALS[load]),
    ]
    return figures + controls(load, jct) + by_age(problems, load, best)


def controls(load: float, jct: Mapping[str, float]) -> list[Figure]:
    """Rivals of the advice; the median of recent waits must lose."""
    worse = jct["recent-waits"] / jct["advice"]
    return [
        Figure(f"load {load}: recent-waits / advice", worse, "> 1", worse > 1),
        Figure(f"load {load}: fastest-type / advice", jct["fastest-type"] / jct["advice"]),
        Figure(f"load {load}: fifo (untyped, one queue) / advice", jct["fifo"] / jct["advice"]),
    ]


def by_age(problems: Sequence[PlacementProblem], load: float, best: float) -> list[Figure]:
    """Advice from snapshots of several ages, with starts at once as in Slurm rather than at rounds."""
    figures = []
    for snapshot_s in (60.0, 600.0, 3600.0):
        jct_h = float(np.mean([queued_jct_h(problem, AdvisedType(snapshot_s)) for problem in problems]))
        about = f"load {load}, advice, starts at once, snapshots of up to {snapshot_s / 60:.0f} min"
        figures.append(Figure(f"{about}: mean JCT / priced-srpt", jct_h / best))
    return figures


def queued_jct_h(problem: PlacementProblem, chooser: AdvisedType) -> float:
    return float((simulate_queues(problem, chooser).end_s - problem.submit_s).mean()) / HOUR_S


def mean_jct_h(
    problems: Sequence[PlacementProblem], name: str, seeds: Sequence[int], sigma: float = 0.0
) -> float:  # fmt: skip
    show_progress(f"{len(problems)} seeds", f"{name} sigma {sigma}")
    found = [
        run_policy(problem, name, PlacementOptions(error=sigma, seed=seed)).jobs.jct_s.mean()
        for problem, seed in zip(problems, seeds, strict=True)
    ]
    return float(np.mean(found)) / HOUR_S


def joined(first: PlacementProblem, second: PlacementProblem) -> PlacementProblem:
    """The jobs of both."""
    arrays = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("submit_s", "gpus", "work", "rates")
    }
    return dataclasses.replace(first, **arrays, kinds=first.kinds + second.kinds)


def measure() -> list[Figure]:
    if not (DATA / "gavel_480").is_dir():
        return [Figure("the trace is not here", "gavel_480")]
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 960
    started = time.perf_counter()
    pool = joined(trace_of(0), trace_of(1))
    with silent_solver():
        figures = [figure for seed in (0, 1) for figure in batch(seed)]
        for load in LOADS:
            figures += arriving(pool, load, range(1, count + 1), jobs)
    return [*figures, Figure(f"{count} seeds of {jobs} arriving jobs, s", time.perf_counter() - started)]


if __name__ == "__main__":
    main(measure)
