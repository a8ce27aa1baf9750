"""Packing of jobs on GPUs: policies on Gavel's measured pairs, one-GPU jobs on 36 GPUs, and gangs on 64.

Run: benchmarks/packing_sim.py [SEEDS] [JOBS], by default 10 seeds of 1,500 jobs. The pairs come from ../shared/data.
Poisson arrivals; a job runs for 1 to 4 h alone; first in, first out; packed only if free GPUs do not suffice. 30 users.
Each ratio is a mean over seeds of the mean JCT over that without packing, on the same jobs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from figures import Figure, at_most, main
from traces import DATA

from almanac.units import HOUR_S
from simulator.policies.packing import BASE, POLICIES, PackingNodes, run_packing
from simulator.scores import LEAST_SPEED
from simulator.traces.packing import GANGS, ArrivalOptions, PairTable, read_pairs

PAIRS = DATA / "gavel_throughputs_k80_p100_v100.json"
LOADS = (1.1, 0.9)
ONE_GPU_POLICIES = ("none", "blind", "utilization", "utilization-140", "speed", "same-user")
GOALS: Mapping[tuple[str, float], float] = {
    ("speed", 1.1): 0.45, ("speed", 0.9): 0.98, ("same-user", 1.1): 0.50, ("same-user", 0.9): 1.00,
}  # fmt: skip
MOST_SLOW = 0.01


def one_gpu(pairs: Path, gpu_type: str, seeds: Sequence[int], jobs: int, has_goals: bool) -> list[Figure]:
    """The goals' case: 36 GPUs, one-GPU jobs."""
    table, nodes = read_pairs(pairs, gpu_type), PackingNodes.uniform(36, 4)
    figures = []
    for load in LOADS:
        options = ArrivalOptions(load=load, jobs=jobs, gpus=36)
        goals = {name: goal for (name, at), goal in GOALS.items() if at == load and has_goals}
        figures += compare(f"{gpu_type}, load {load}", table, ONE_GPU_POLICIES, options, nodes, seeds, goals=goals)
    return figures


def wrong_speeds(table: PairTable, seeds: Sequence[int], jobs: int) -> list[Figure]:
    """The goals' case with predicted speeds of pairs, that is, with errors."""
    nodes = PackingNodes.uniform(36, 4)
    figures = []
    for load, sigma in product(LOADS, (0.1, 0.2)):
        options = ArrivalOptions(load=load, jobs=jobs, gpus=36)
        about = f"v100, speeds off by sigma {sigma}, load {load}"
        figures += compare(about, table, ("speed", "same-user"), options, nodes, seeds, sigma)
    return figures


def gangs(table: PairTable, seeds: Sequence[int], jobs: int) -> list[Figure]:
    """Simulate jobs of 1 to 8 GPUs under the topology rule, on 8 nodes of 8."""
    nodes = PackingNodes.uniform(64, 8)
    figures = []
    for load in LOADS:
        options = ArrivalOptions(load=load, jobs=jobs, gpus=64, shares=GANGS)
        figures += compare(f"gangs on v100, load {load}", table, tuple(POLICIES), options, nodes, seeds)
    return figures


def compare(
    about: str, table: PairTable, names: Sequence[str], options: ArrivalOptions, nodes: PackingNodes,
    seeds: Sequence[int], error: float = 0.0, goals: Mapping[str, float] = {},
) -> list[Figure]:  # fmt: skip
    """Mean JCT, its ratio to no packing with the spread over seeds, and slow jobs."""
    wanted = list(dict.fromkeys([BASE, *names]))
    runs = [run_packing(table, wanted, options, nodes, seed, error)[1] for seed in seeds]
    jct_s = np.array([[run.jobs.jct_s.mean() for run in each] for each in runs])
    slow = np.array([[(run.jobs.speed < LEAST_SPEED - 1e-9).mean() for run in each] for each in runs]).max(axis=0)
    figures = []
    for name in names:
        place, goal = wanted.index(name), goals.get(name)
        ratios = jct_s[:, place] / jct_s[:, 0]
        spread = float(ratios.std(ddof=1)) if len(seeds) > 1 else 0.0
        figures.append(Figure(f"{about}, {name}: mean JCT, h", float(jct_s[:, place].mean()) / HOUR_S))
        if name != BASE:
            figures += [
                at_most(f"{about}, {name}: JCT / none", float(ratios.mean()), goal),
                Figure(f"{about}, {name}: standard deviation, largest", f"{spread:.3f}, {ratios.max():.3f}"),
                at_most(f"{about}, {name}: jobs below .6 (worst seed)", slow[place], MOST_SLOW if goal else None),
            ]
    return figures


def measure() -> list[Figure]:
    if not PAIRS.is_file():
        return [Figure("the table of pairs is not here", PAIRS.name)]
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    started, seeds = time.perf_counter(), range(1, count + 1)
    figures = [
        figure for gpu_type in ("v100", "p100", "k80")
        for figure in one_gpu(PAIRS, gpu_type, seeds, jobs, gpu_type == "v100")
    ]  # fmt: skip
    figures += wrong_speeds(read_pairs(PAIRS, "v100"), seeds, jobs)
    figures += gangs(read_pairs(PAIRS, "v100"), seeds, jobs)
    return [*figures, Figure(f"{count} seeds of {jobs} jobs, s", time.perf_counter() - started)]


if __name__ == "__main__":
    main(measure)
