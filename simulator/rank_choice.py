"""How much the queue should rely on predicted run times: the exponent with the shortest simulated queue.

The newest jobs of the site's own record run on equal nodes in the order GPUs x predicted run time^exponent, on clusters
of several sizes: a single size can differ by luck. Jobs start in strict order, without backfill: a wrong prediction
costs most there, because a large job at the head of the queue holds up all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd

from advisor.duration.rank_scale import DEFAULT_EXPONENT, QueuedJobs
from almanac.errors import RequestError
from simulator.cluster import uniform
from simulator.engine import simulate
from simulator.policies.base import Policy
from simulator.policies.ordered import Fifo, GivenOrder
from simulator.workload import Workload, make_workload

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
FIFO_WAITS = (0.4, 0.7, 0.9)
"""Shares of the mean JCT under FIFO that are waiting: one size of the cluster for each (helios-qssf-ces, 4.2.3)."""
MIN_JOBS, NODE_GPUS = 200, 8
CLEARLY = 0.01
"""Another exponent than the default must shorten the mean JCT by this share."""


def choose_exponent(jobs: QueuedJobs) -> float:
    """One of EXPONENTS; the default without enough jobs, or where none is clearly better."""
    if len(jobs.submit_s) < MIN_JOBS:
        return DEFAULT_EXPONENT
    try:
        jct_s = mean_jct_s(jobs)
    except RequestError:
        return DEFAULT_EXPONENT
    best = min(jct_s, key=lambda exponent: (jct_s[exponent], exponent))
    return best if jct_s[best] < (1 - CLEARLY) * jct_s[DEFAULT_EXPONENT] else DEFAULT_EXPONENT


def mean_jct_s(jobs: QueuedJobs) -> Mapping[float, float]:
    """By exponent, the geometric mean over sizes of the mean JCT, seconds. Raises RequestError if no job can run."""
    records = {"submit_s": jobs.submit_s, "run_s": np.ceil(jobs.run_s), "gpu_count": jobs.gpu_count}
    workload = make_workload(pd.DataFrame({**records, "job_id": np.arange(len(jobs.submit_s)).astype(str)}))
    predicted_s = jobs.predicted_s[workload.array("job_id").astype("int64")]
    gpu_count = workload.array("gpu_count").astype("float64")
    sizes = _sizes(workload)
    return {
        exponent: math.exp(
            np.mean([
                math.log(_outcome(workload, nodes, GivenOrder(gpu_count * predicted_s**exponent))[0])
                for nodes in sizes
            ])
        )
        for exponent in EXPONENTS
    }  # fmt: skip


def _outcome(workload: Workload, nodes: int, policy: Policy) -> tuple[float, float]:
    """(mean JCT, mean wait), seconds."""
    record = simulate(workload, uniform(nodes, NODE_GPUS), policy)
    jct_s = float(np.mean(record.end_s - workload.array("submit_s")))
    return jct_s, float(np.mean(record.start_s - workload.array("submit_s")))


def _sizes(workload: Workload) -> list[int]:
    """Numbers of nodes on which FIFO waits for about the shares FIFO_WAITS; fewer where sizes are the same."""

    @cache
    def share(nodes: int) -> float:
        jct_s, wait_s = _outcome(workload, nodes, Fifo())
        return wait_s / jct_s

    least = math.ceil(int(workload.array("gpu_count").max()) / NODE_GPUS)
    most = least + math.ceil(_peak_gpus(workload) / NODE_GPUS)
    sizes = []
    for goal in FIFO_WAITS:
        low, high = least, most
        while low < high:  # the first size that waits for less than the goal
            middle = (low + high) // 2
            low, high = (low, middle) if share(middle) <= goal else (middle + 1, high)
        sizes.append(low)
    return sorted(set(sizes))


def _peak_gpus(workload: Workload) -> int:
    """The most GPUs that run at once where no job waits."""
    submit_s, gpus = workload.array("submit_s"), workload.array("gpu_count")
    times, changes = np.concatenate([submit_s, submit_s + workload.array("run_s")]), np.concatenate([gpus, -gpus])
    return int(np.cumsum(changes[np.lexsort((changes, times))]).max())
