"""Packing of jobs on GPUs: policies on Gavel's measured pairs, one-GPU jobs on 36 GPUs, and gangs on 64.

Run: benchmarks/packing_sim.py [SEEDS] [JOBS], by default 10 seeds of 1,500 jobs. The pairs come from ../shared/data.
Poisson arrivals; a job runs for 1 to 4 h alone; first in, first out; packed only where no free GPUs do. 30 users. Each
ratio is a mean over seeds of the mean JCT over that without packing, on the same jobs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from figures import Figure, at_most, main
from traces import DATA

from advisor.decisions.packing_sets import PackingNodes
from almanac.units import HOUR_S
from simulator.packing.comparison import PackingScore, compare_packing
from simulator.packing.pairs import PairTable, read_pairs
from simulator.packing.policies import POLICIES
from simulator.packing.workload import GANGS, ArrivalOptions

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
        for score in compare_packing(table, ONE_GPU_POLICIES, options, nodes, seeds):
            goal = GOALS.get((score.policy, load)) if has_goals else None
            figures += show_score(f"{gpu_type}, load {load}", score, goal)
    return figures


def wrong_speeds(table: PairTable, seeds: Sequence[int], jobs: int) -> list[Figure]:
    """The goals' case with predicted speeds of pairs, that is, with errors."""
    nodes = PackingNodes.uniform(36, 4)
    figures = []
    for load, sigma in product(LOADS, (0.1, 0.2)):
        options = ArrivalOptions(load=load, jobs=jobs, gpus=36)
        for score in compare_packing(table, ("speed", "same-user"), options, nodes, seeds, sigma):
            figures += show_score(f"v100, speeds off by sigma {sigma}, load {load}", score, None)
    return figures


def gangs(table: PairTable, seeds: Sequence[int], jobs: int) -> list[Figure]:
    """Jobs of 1 to 8 GPUs under the topology rule, on 8 nodes of 8."""
    nodes = PackingNodes.uniform(64, 8)
    figures = []
    for load in LOADS:
        options = ArrivalOptions(load=load, jobs=jobs, gpus=64, shares=GANGS)
        for score in compare_packing(table, tuple(POLICIES), options, nodes, seeds):
            figures += show_score(f"gangs on v100, load {load}", score, None)
    return figures


def show_score(about: str, score: PackingScore, goal: float | None) -> list[Figure]:
    """Mean JCT, its ratio with spread, and slow jobs."""
    about = f"{about}, {score.policy}"
    figures = [Figure(f"{about}: mean JCT, h", score.mean_jct_s / HOUR_S)]
    if score.policy == "none":
        return figures
    figures += [
        at_most(f"{about}: JCT / none", score.ratio, goal),
        Figure(f"{about}: standard deviation, largest", f"{score.spread:.3f}, {max(score.ratios):.3f}"),
        at_most(f"{about}: jobs below .6 (worst seed)", score.slow, MOST_SLOW if goal else None),
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
