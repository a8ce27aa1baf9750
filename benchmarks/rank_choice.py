"""The order that a replay of the first 40% of a record chooses, scored on the later weeks with EASY backfill.

Run: python benchmarks/rank_choice.py [helios mason SEED ...]; a number is the seed of a generated site of six weeks.
Clusters have as many nodes as make strict first in, first out spend about 71% and 90% of the mean time in the queue.
Predictions are of models that were trained every two days on what had ended by then. Intervals: 2,000 draws of weeks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from figures import Figure, at_most, main
from traces import DATA, TRACES, load_trace

from advisor.backtest import training_times
from advisor.duration.model import DurationModel, fit, learned_rows
from advisor.duration.rank import DEFAULT_RANK, RankRule, ReplayedJobs, expected_s, mean_rule
from advisor.duration.replay import replay_durations
from almanac.config import Config
from almanac.submit_config import Priority
from almanac.units import DAY_S
from demo import SiteShape, generate_jobs
from simulator.cluster import uniform
from simulator.engine import simulate
from simulator.policies.base import FewestGpus, Fifo, GivenOrder, Policy
from simulator.rank_choice import aged_keys, choose_rank
from simulator.workload import Workload, make_workload
from telemetry.history import load_history
from telemetry.store.store import Store

Floats = npt.NDArray[np.float64]
GOALS = {0.71: 0.95, 0.9: 0.90}
"""By the share of waiting, the most of FIFO's mean time to the end."""
TRAIN_S, SKIPPED, CHOSEN_ON, NEWEST = 2 * DAY_S, 0.15, 0.4, 3000
SHUFFLES = 5


def record_of(name: str) -> pd.DataFrame:
    """The history of a trace, or of a generated site."""
    with tempfile.TemporaryDirectory() as folder:
        if name in TRACES:
            history = load_trace(DATA / TRACES[name][0], Path(folder) / "store")
            return history[history["gpu_count"] > 0].reset_index(drop=True)
        store = Store.create(Path(folder) / "store").of("trace")
        shape = dataclasses.replace(SiteShape.demo(int(name)), days=42, jobs_per_day=250)
        store.write("jobs", generate_jobs(shape))
        return load_history(store, running=True)


def predicted(history: pd.DataFrame) -> ReplayedJobs:
    """The jobs with predictions from what had ended by the last training before; by submission."""
    past = replay_durations(history)
    past = past.select(np.isfinite(past.duration_s))
    past = past.select(np.argsort(past.submit_s, kind="stable"))
    mean_s, high_s = np.full((2, len(past)), math.nan)
    model: DurationModel | None = None
    edges_s = [*training_times(float(np.quantile(past.submit_s, SKIPPED)), float(past.submit_s.max()) + 1, TRAIN_S)]
    for since_s, until_s in itertools.pairwise([*edges_s, math.inf]):
        before = past.select(past.end_s < since_s)
        learned = before.select(learned_rows(before.job_id, before.submit_s, before.end_s, model))
        fitted = fit(learned, Config().training, math.ceil(since_s), model)
        rows = np.flatnonzero((past.submit_s >= since_s) & (past.submit_s < until_s))
        model = fitted.model if fitted else None
        if model and len(rows):
            jobs = past.select(rows)
            told = model.predict_all(jobs.features, jobs.rolling_s)
            mean_s[rows], high_s[rows] = expected_s(jobs.features, told.rank_s), told.high_s
    columns = (past.submit_s.astype("float64"), past.features.number("gpu_count"), past.duration_s)
    limit_s, users = np.exp(past.features.number("log_time_limit")), np.array(past.features.category("user"), dtype=str)
    found = ReplayedJobs(*columns, np.full(len(past), math.nan), limit_s, mean_s, high_s, users)
    return found.select(np.isfinite(mean_s) & (found.gpu_count > 0))


class Simulated(NamedTuple):
    jct_s: Floats
    wait_s: Floats


def run(workload: Workload, nodes: int, policy: Policy, backfill: str = "easy") -> Simulated:
    policy.backfill = backfill  # type: ignore[assignment]
    record, submit_s = simulate(workload, uniform(nodes), policy), workload.array("submit_s")
    return Simulated((record.end_s - submit_s).astype("float64"), (record.start_s - submit_s).astype("float64"))


def nodes_for(workload: Workload, goal: float) -> int:
    low = math.ceil(int(workload.array("gpu_count").max()) / 8)
    high = low + 400
    while low < high:
        middle = (low + high) // 2
        done = run(workload, middle, Fifo(), "none")
        low, high = (low, middle) if done.wait_s.mean() <= goal * done.jct_s.mean() else (middle + 1, high)
    return low


class Score(NamedTuple):
    """On the later weeks, as multiples of FIFO with EASY. loss_h: median of the users who are worse off."""

    jct: float
    low: float
    high: float
    longest: float
    worse: float
    loss_h: float


def score(jobs: ReplayedJobs, before: Simulated, after: Simulated) -> Score:
    late = np.arange(len(jobs.submit_s)) >= CHOSEN_ON * len(jobs.submit_s)
    weeks = ((jobs.submit_s - jobs.submit_s[0]) // (7 * DAY_S)).astype("int64")[late]
    sums = [np.bincount(weeks - weeks.min(), each.jct_s[late]) for each in (after, before)]
    draws = np.random.default_rng(1).integers(0, len(sums[0]), (2000, len(sums[0])))
    low, high = np.percentile(sums[0][draws].sum(axis=1) / sums[1][draws].sum(axis=1), [2.5, 97.5])
    users = pd.DataFrame({"user": jobs.user[late], "b": before.jct_s[late], "a": after.jct_s[late]})
    means = users.groupby("user").mean()
    worse = means[means["a"] > 1.05 * means["b"]]
    loss_h = float((worse["a"] - worse["b"]).median()) / 3600 if len(worse) else 0.0
    longest = after.wait_s[late].max() / before.wait_s[late].max()
    return Score(sums[0].sum() / sums[1].sum(), low, high, longest, len(worse) / len(means), loss_h)


def figures_of(name: str) -> Iterator[Figure]:
    jobs, priority = predicted(record_of(name)), Priority()
    records = {"submit_s": jobs.submit_s, "run_s": np.ceil(jobs.run_s), "gpu_count": np.ceil(jobs.gpu_count)}
    limits = np.where(jobs.limit_s > 0, np.maximum(jobs.limit_s, np.ceil(jobs.run_s)), 0)
    workload = make_workload(pd.DataFrame({**records, "time_limit_s": limits}))
    first = int(CHOSEN_ON * len(jobs.submit_s))
    for goal, most in GOALS.items():
        nodes = nodes_for(workload, goal)
        fifo = run(workload, nodes, Fifo())
        known = jobs._replace(wait_s=fifo.wait_s).select(np.arange(max(0, first - NEWEST), first))
        choice = choose_rank(known, priority)
        assert choice is not None

        def scored(rule: RankRule, times_s: Floats, nodes: int = nodes, fifo: Simulated = fifo) -> Score:
            ranked_s = rule.ranked(jobs.gpu_count, np.maximum(times_s, 1.0))
            keys = np.array(aged_keys(workload.array("submit_s"), ranked_s, priority))
            return score(jobs, fifo, run(workload, nodes, GivenOrder(keys)))

        title, rng = f"{name}, waiting {goal:.0%}, {nodes} nodes", np.random.default_rng(1)
        chosen = scored(choice.rule, jobs.time_s(choice.rule.by))
        yield at_most(f"{title}: chosen: {choice.rule}, stretch {choice.rule.stretch:g}", chosen.jct, most)
        yield from (Figure(f"  {each}", getattr(chosen, each)) for each in ("low", "high", "worse", "loss_h"))
        yield at_most("  longest", chosen.longest, 2.0)
        for rule, _ in choice.outcomes:
            yield Figure(f"  {rule}, stretch {rule.stretch:g}", scored(rule, jobs.time_s(rule.by)).jct)
        yield Figure("  GPU count, without age", score(jobs, fifo, run(workload, nodes, FewestGpus())).jct)
        drawn = [jobs.mean_s[rng.integers(np.arange(1, len(jobs.mean_s) + 1))] for _ in range(SHUFFLES)]
        yield Figure("  shuffled predictions", float(np.mean([scored(DEFAULT_RANK, each).jct for each in drawn])))
        yield Figure("  true run times^0.5", scored(mean_rule(0.5), jobs.run_s).jct)


def measure() -> Iterator[Figure]:
    for name in sys.argv[1:] or ("helios", "mason", "13", "14"):
        yield from figures_of(name)


if __name__ == "__main__":
    main(measure)
