"""The simulator's speed and memory: 100,000 jobs on 64 nodes with 8 GPUs, busy, on one core; and a million.

Run: python benchmarks/simulation.py [--jobs N]. Each simulation is a process of its own, and the best of three counts.
The policies that predict run 10,000 jobs in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from figures import Figure, at_least, at_most, between, exactly, main

from almanac.config import Config
from simulator.cluster import uniform
from simulator.engine import simulate
from simulator.policies.base import Fifo, GivenOrder, Policy, Ranking, Sjf, Srtf
from simulator.policies.priority import AgedQssf, Qssf
from simulator.workload import Workload, make_workload

NODES, SEED, REPEATS = 64, 1, 3
LOAD = 0.9
"""GPU-time that is asked for, as a share of the cluster's."""
SPEEDS = {"fifo": 150_000, "sjf": 150_000, "qssf (predictions given)": 150_000, "srtf": 40_000, "fifo + easy": 60_000}
MOST_TIMES, MOST_AGED = 12, 1.25
"""Most growth of the cost, for ten times the jobs; most cost of qssf-aged relative to qssf."""
PREDICTED_JOBS = 10_000


def busy_trace(jobs: int, load: float) -> pd.DataFrame:
    """Poisson arrivals of jobs with log-normal run times; GPU counts much as on Helios."""
    rng = np.random.default_rng(SEED)
    gpus = rng.choice([1, 2, 4, 8, 16, 32], jobs, p=[0.6, 0.1, 0.12, 0.12, 0.04, 0.02])
    run_s = np.clip(rng.lognormal(6.2, 2.0, jobs), 1, 3 * 86_400).astype("int64")
    span_s = float((gpus * run_s).sum()) / (NODES * 8) / load
    return pd.DataFrame(
        {"submit_s": np.sort(rng.uniform(0, span_s, jobs)).astype("int64"), "run_s": run_s, "gpu_count": gpus}
    )


def policy(name: str, workload: Workload) -> Policy:
    if name.startswith("qssf"):
        rng = np.random.default_rng(SEED)
        predicted_s = workload.array("run_s") * np.exp(rng.normal(0, 1, len(workload)))
        return GivenOrder(workload.array("gpu_count") * predicted_s)
    made = {"fifo": Fifo, "sjf": Sjf, "srtf": Srtf}[name.split(" ")[0]]()
    if name.endswith("easy"):
        made.backfill, made.estimate = "easy", "true"
    return made


def measure(name: str, jobs: int) -> dict[str, float]:
    """Measure a simulation in this process: CPU seconds, share of the mean JCT that is waiting, and bytes per job."""
    workload = make_workload(busy_trace(jobs, LOAD))
    order = policy(name, workload)
    simulate(make_workload(busy_trace(1000, LOAD)), uniform(NODES), policy(name, make_workload(busy_trace(1000, LOAD))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    record = simulate(workload, uniform(NODES), order)
    cpu_s = time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    submit_s = workload.array("submit_s")
    waited, whole = (record.start_s - submit_s).mean(), (record.end_s - submit_s).mean()
    return {"cpu_s": cpu_s, "share": float(waited / whole), "bytes": grown * 1024 / jobs}


def in_process(name: str, jobs: int, repeats: int = REPEATS) -> dict[str, float]:
    """The best CPU time and the most memory of several processes."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--measure", name, "--jobs", str(jobs)]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    best = min(runs, key=lambda run: run["cpu_s"])
    return {**best, "bytes": max(run["bytes"] for run in runs)}


def against_the_plain_one() -> tuple[float, float]:
    """Return the engine's speed as a multiple of the tests' one-second simulator, and the queueing share of JCT.

    On the first part of the trace, until the queue is long.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulator"))
    from reference import Reference, ReferenceJob

    trace = busy_trace(100_000, LOAD).iloc[:20_000]
    rows = zip(trace["submit_s"], trace["run_s"], trace["gpu_count"], strict=True)
    jobs = [
        ReferenceJob(number, int(at), int(run), int(gpus), int(at), 0) for number, (at, run, gpus) in enumerate(rows)
    ]
    started = time.process_time()
    Reference(jobs, NODES, 8, "fifo").run()
    plain_s = time.process_time() - started
    workload = make_workload(trace)
    best_s = np.inf
    for _ in range(REPEATS):
        started = time.process_time()
        record = simulate(workload, uniform(NODES), Fifo())
        best_s = min(best_s, time.process_time() - started)
    waited = (record.start_s - trace["submit_s"]).mean() / (record.end_s - trace["submit_s"]).mean()
    return float(plain_s / best_s), float(waited)


def predicted() -> tuple[float, float]:
    """Return the cost of qssf-aged relative to qssf, and the share of waiting jobs that a new model ranks again."""
    trace, rng = busy_trace(PREDICTED_JOBS, LOAD), np.random.default_rng(SEED)
    users, names = rng.zipf(1.5, len(trace)) % 200, rng.integers(0, 500, len(trace))
    workload = make_workload(trace.assign(user=users.astype(str), name=names.astype(str)))
    again: list[tuple[int, int]] = []

    class Watched(Qssf):
        def rank_again(self, jobs: Sequence[int], now_s: int) -> Ranking:
            again.append((now_s, len(jobs)))
            return super().rank_again(jobs, now_s)

    kinds = (Watched, AgedQssf)
    cost_s = dict.fromkeys(kinds, np.inf)
    for _ in range(REPEATS):
        for kind in kinds:
            started = time.process_time()
            record = simulate(workload, uniform(NODES), kind(Config()))
            cost_s[kind] = min(cost_s[kind], time.process_time() - started)
            if kind is Watched:
                submit_s, start_s = workload.array("submit_s"), record.start_s
                waiting = sum(int(((submit_s < now_s) & (start_s >= now_s)).sum()) for now_s, _ in again)
                ranked = sum(jobs for _, jobs in again)
                again.clear()
    return cost_s[AgedQssf] / cost_s[Watched], ranked / waiting


def measure_all() -> list[Figure]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.jobs)))
        sys.exit()
    figures, cost = [], {}
    for name, goal in SPEEDS.items():
        run = in_process(name, given.jobs)
        cost[name] = run["cpu_s"]
        speed = given.jobs / run["cpu_s"]
        figures.append(at_least(f"{name}, jobs/s", speed, goal))
        figures.append(at_most(f"{name}, memory above the trace, bytes/job", run["bytes"], 1000))
        if name == "fifo":
            share = run["share"]
            figures.append(between("fifo, queueing share of JCT", share, 0.7, 0.9))
    for name in SPEEDS:
        run = in_process(name, 10 * given.jobs)
        ratio = run["cpu_s"] / cost[name]
        figures.append(at_most(f"{name}, ten times the jobs, times the cost", ratio, MOST_TIMES))
        figures.append(Figure(f"{name}, ten times the jobs, queueing share", run["share"]))
    ratio, share = predicted()
    figures.append(at_most("qssf-aged, times the cost of qssf", ratio, MOST_AGED))
    figures.append(exactly("qssf, share of waiting jobs that a new model ranks again", share, 1))
    ratio, share = against_the_plain_one()
    figures.append(at_least("times faster than one second a tick", ratio, 100))
    return [*figures, Figure("its queueing share of JCT", share)]


if __name__ == "__main__":
    main(measure_all)
