"""Small random traces for a real slurmctld and the simulator, whose start order small delays do not change.

Jobs sleep for seconds and have limits of minutes, Slurm's smallest unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from almanac.config import Config
from simulator.cluster import Cluster, NodeGroup
from simulator.comparison import make_policy
from simulator.engine import simulate
from simulator.workload import make_workload

GPUS = 4
"""GPUs of each node."""
CLUSTER = Cluster((NodeGroup(3, GPUS, partitions=("whole",)), NodeGroup(1, GPUS, partitions=("parts",))))
"""Jobs in "whole" take whole nodes, and those in "parts" some GPUs of one node: placement cannot change the order."""
PARTITIONS = {"whole": "n[1-3]", "parts": "n4"}
LIMITS_MIN = (5, 30, 120, 480)
GAP_S = 3
"""Starts that have different causes are so far apart, also after delays."""
DELAY_S = 4
"""Slurm adds up to so many seconds to a run: prolog, epilog, and the wait for the next pass of a scheduler."""
DRAWS = 40
"""Random delays with which a trace is tried."""
JOBS, EARLY, LAST_START_S = 9, 6, 45
"""Of a random trace; its first jobs wait when the partition opens."""


@dataclass(frozen=True)
class SleepJob:
    """gpus: of each node. submit_s: 0 for jobs that wait in the queue when the partition opens."""

    partition: str
    submit_s: float
    sleep_s: float
    nodes: int
    gpus: int
    limit_s: float


TWO_WAIT = [
    SleepJob("whole", 0, 8, 1, GPUS, 5 * 60),
    SleepJob("whole", 0, 24, 1, GPUS, 120 * 60),
    SleepJob("whole", 0, 4, 3, GPUS, 60 * 60),
    SleepJob("whole", 0, 4, 2, GPUS, 30 * 60),
    SleepJob("whole", 0, 16, 1, GPUS, 30 * 60),
]
"""The last job would delay the second that waits, but not the first: EASY starts it at once, conservative does not."""
ON_SPARE = [
    SleepJob("parts", 0, 15, 1, 2, 30 * 60),
    SleepJob("parts", 0, 5, 1, 3, 30 * 60),
    SleepJob("parts", 0, 5, 1, 1, 480 * 60),
]
"""The last job fits next to the second at any time, on the GPU that the second leaves free."""


def find_trace(policy: str, seed: int, partition: str, other: str) -> list[SleepJob]:
    """The first random trace of a seed in which two policies differ, and delays do not change the order of starts."""
    rng = np.random.default_rng([seed, 18])
    while True:
        jobs = _draw(partition, rng)
        starts = start_times(jobs, policy)
        gaps_s = np.diff(sorted(set(starts)))
        if max(starts) > LAST_START_S or min(gaps_s, default=0) < GAP_S:
            continue
        if not disagreements(jobs, starts, start_times(jobs, other)):
            continue
        if all(not disagreements(jobs, starts, start_times(_delayed(jobs, rng), policy), GAP_S) for _ in range(DRAWS)):
            return jobs


def _draw(partition: str, rng: np.random.Generator) -> list[SleepJob]:
    is_whole = partition == "whole"
    submits_s = [0] * EARLY + sorted(rng.integers(GAP_S, 20, JOBS - EARLY).tolist())
    sizes = rng.choice([1, 1, 2, 3] if is_whole else [1, 1, 2, 2, 3, 4], JOBS).tolist()
    sleeps_s, limits_min = rng.integers(3, 25, JOBS).tolist(), rng.choice(LIMITS_MIN, JOBS).tolist()
    return [
        SleepJob(partition, submit_s, sleep_s, size if is_whole else 1, GPUS if is_whole else size, 60 * limit_min)
        for submit_s, sleep_s, size, limit_min in zip(submits_s, sleeps_s, sizes, limits_min, strict=True)
    ]


def _delayed(jobs: Sequence[SleepJob], rng: np.random.Generator) -> list[SleepJob]:
    """Runs last longer, later submissions come later, and limits differ by seconds."""
    delays = rng.uniform(0, DELAY_S, (len(jobs), 3))
    return [
        replace(
            job,
            sleep_s=job.sleep_s + delay[0],
            submit_s=job.submit_s + delay[1] / 2 if job.submit_s else 0,
            limit_s=job.limit_s + delay[2],
        )
        for job, delay in zip(jobs, delays, strict=True)
    ]


def start_times(jobs: Sequence[SleepJob], policy: str) -> list[float]:
    """The simulator's start times in seconds. It counts whole seconds; here one of these is a millisecond."""
    frame = pd.DataFrame(
        [
            (str(number), job.partition, job.submit_s * 1000, job.sleep_s * 1000, job.nodes * job.gpus, job.nodes,
             job.limit_s * 1000)
            for number, job in enumerate(jobs)
        ],
        columns=["job_id", "partition", "submit_s", "run_s", "gpu_count", "node_count", "time_limit_s"],
    )  # fmt: skip
    workload = make_workload(frame)
    record = simulate(workload, CLUSTER, make_policy(policy, Config()))
    by_id = dict(zip(workload.array("job_id"), record.start_s.tolist(), strict=True))
    return [by_id[str(number)] / 1000 for number in range(len(jobs))]


def disagreements(
    jobs: Sequence[SleepJob], expected_s: Sequence[float], seen_s: Sequence[float], gap_s: float = 0
) -> list[tuple[int, int]]:
    """Pairs of jobs of a partition of which the first starts first as expected, but not seen so by more than gap_s."""
    return [
        (first, second)
        for first in range(len(jobs))
        for second in range(len(jobs))
        if jobs[first].partition == jobs[second].partition
        and expected_s[first] < expected_s[second]
        and not seen_s[first] + gap_s < seen_s[second]
    ]


def overtaking(jobs: Sequence[SleepJob], starts_s: Sequence[float]) -> set[int]:
    """Jobs that start before one that came earlier to their partition."""
    return {
        late
        for late in range(len(jobs))
        for early in range(late)
        if jobs[early].partition == jobs[late].partition and starts_s[late] < starts_s[early]
    }
