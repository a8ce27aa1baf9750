"""Policies with fixed orders: FIFO, SJF, SRTF, and the controls that know nothing of run times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.policies.base import Policy, Ranking
from simulator.waiting import JOB_MASK
from simulator.workload import Workload


class Fifo(Policy):
    """First in, first out."""

    name: ClassVar[str] = "fifo"


class Sjf(Policy):
    """Shortest job first, with perfect knowledge of run times."""

    name: ClassVar[str] = "sjf"

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking(workload.array("run_s"))


class Srtf(Sjf):
    """Shortest remaining time first: perfect knowledge, and jobs may be preempted for shorter ones."""

    name: ClassVar[str] = "srtf"
    is_preemptive: ClassVar[bool] = True

    def __init__(self, restart_s: int = 0) -> None:
        self.restart_s = restart_s

    def victims(self, job: int, left_s: int, now_s: int, running: Sequence[int]) -> Iterator[int]:
        """Jobs with more left than the waiting one, the one with the most first."""
        least = now_s + left_s + 1 << 32
        for entry in reversed(running):
            if entry < least:
                return
            yield entry & JOB_MASK

    def resume_order(self, job: int, left_s: int, order: int) -> int:
        return left_s


class FewestGpus(Policy):
    """A control: jobs with fewer GPUs first, whatever they run."""

    name: ClassVar[str] = "gpu-count"

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking(workload.array("gpu_count"))


class ShortestService(Policy):
    """Least GPU-time first, with perfect knowledge: what QSSF predicts."""

    name: ClassVar[str] = "ssf"

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking((workload.array("gpu_count") * workload.array("run_s")).astype(np.int64))


class GivenOrder(Policy):
    """Order by values that are given for each job, such as predictions of an earlier run."""

    name: ClassVar[str] = "given"

    def __init__(self, keys: npt.NDArray[np.float64]) -> None:
        self._keys = keys

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking(self._keys)
