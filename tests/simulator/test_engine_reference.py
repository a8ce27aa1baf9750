"""Start times, placements, and preemptions are those of the plain one-second simulator, on thousands of traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from reference import Reference, ReferenceJob

from simulator.cluster import uniform
from simulator.engine import simulate
from simulator.policies.base import Backfill, Estimate, Fifo, Policy, Ranking, Sjf, Srtf
from simulator.simulation import Record
from simulator.workload import Workload, make_workload


class _Easy(Policy):
    backfill: Backfill = "easy"
    estimate: Estimate = "predicted"

    def __init__(self, keys: np.ndarray, expected_s: np.ndarray) -> None:
        self.ranking = Ranking(keys, expected_s)

    def rank(self, workload: Workload, cluster: object) -> Ranking:
        return self.ranking


def random_trace(rng: np.random.Generator, nodes: int, size: int) -> pd.DataFrame:
    count = int(rng.integers(1, 25))
    most = int(rng.integers(1, nodes * size + 1))
    return pd.DataFrame(
        {
            "submit_s": np.sort(rng.integers(0, int(rng.integers(1, 60)), count)),
            "run_s": rng.integers(1, int(rng.integers(2, 40)), count),
            "gpu_count": np.minimum(rng.integers(1, most + 1, count), nodes * size),
        }
    )


def jobs_of(trace: pd.DataFrame, keys: np.ndarray, expected_s: np.ndarray) -> list[ReferenceJob]:
    rows = zip(trace["submit_s"], trace["run_s"], trace["gpu_count"], keys, expected_s, strict=True)
    return [ReferenceJob(number, *(int(value) for value in row)) for number, row in enumerate(rows)]


def runs_of(record: Record) -> list[tuple[int, int, int, tuple[tuple[int, tuple[int, ...]], ...]]]:
    return [
        (run.job, run.start_s, run.end_s, tuple(sorted((node, bits(mask)) for node, mask in run.allocation)))
        for run in record.runs()
    ]


def bits(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


def agree(trace: pd.DataFrame, nodes: int, size: int, name: str, rng: np.random.Generator) -> None:
    workload = make_workload(trace)
    run_s = trace["run_s"].to_numpy()
    keys = {"fifo": trace["submit_s"].to_numpy(), "sjf": run_s, "srtf": run_s}.get(name)
    expected_s, policy, kind = run_s, {"fifo": Fifo(), "sjf": Sjf(), "srtf": Srtf()}.get(name), name
    if policy is None:
        kind = "easy"
        keys = rng.integers(-5, 5, len(trace)) if "any" in name else trace["submit_s"].to_numpy()
        if "wrong" in name:
            expected_s = np.maximum(run_s + rng.integers(-15, 15, len(trace)), 1)
        policy = _Easy(keys, expected_s)
    jobs = Reference(jobs_of(trace, keys, expected_s), nodes, size, kind).run()
    expected = sorted(
        (job.number, start, end, tuple(sorted(held))) for job in jobs for start, end, held in job.runs if end > start
    )
    assert [run for run in runs_of(simulate(workload, uniform(nodes, size), policy)) if run[2] > run[1]] == expected


@pytest.mark.parametrize("seeds", [range(12), range(12, 500)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["fifo", "sjf", "srtf", "easy", "easy wrong", "easy any", "easy any wrong"])
def test_it_agrees_with_the_plain_simulator(name: str, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng([seed, len(name)])
        nodes, size = int(rng.integers(1, 6)), int(rng.choice([1, 2, 4, 8]))
        agree(random_trace(rng, nodes, size), nodes, size, name, rng)


@pytest.mark.data
@pytest.mark.parametrize("name", ["fifo", "sjf", "srtf", "easy", "easy wrong"])
def test_it_agrees_on_cuts_of_a_real_trace(name: str, trace: Callable[[str], Path]) -> None:
    """Times divided by 60, so that the plain simulator gets through."""
    whole = pd.read_parquet(trace("helios_jobs_15k.parquet")).query("gpu_num > 0").sort_values("submit_s")
    for first in (0, 4000, 9000):
        cut = whole.iloc[first : first + 250]
        small = pd.DataFrame(
            {
                "submit_s": ((cut["submit_s"] - cut["submit_s"].min()) // 60).to_numpy(),
                "run_s": np.clip(cut["run_time_s"] // 60, 1, 600).to_numpy(),
                "gpu_count": cut["gpu_num"].clip(upper=32).to_numpy(),
            }
        )
        agree(small, 4, 8, name, np.random.default_rng(first))
