"""The interface of a scheduling policy, and the policies that predict nothing.

FIFO, shortest job, controls without run times, and Slurm's multifactor priority (age, fair share, job size, QOS, and
the site factor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.workload import Workload

Backfill = Literal["none", "skip", "easy", "conservative"]
"""none: the first job that does not fit blocks those behind it. skip: whatever fits starts. easy: a job may start
before its turn if the first one that waits starts no later. conservative: if no job before it starts later."""

Estimate = Literal["requested", "true", "predicted"]


@dataclass(frozen=True)
class BackfillLimits:
    """Limits of conservative backfill; without them, it plans as far as jobs reach and to the second.

    depth: jobs that are looked at. window_s: a job that would start later gets no reservation. resolution_s: to which
    reserved times are rounded down. of_user: jobs of one user that are looked at, 0 for all. reserved: waiting jobs
    that get a reservation, 0 for all. interval_s: least time from one plan to the next, 0 to plan after each event.
    """

    depth: int = 500
    window_s: int = 1 << 40
    resolution_s: int = 1
    of_user: int = 0
    reserved: int = 0
    interval_s: int = 0


BF_UNITS: Mapping[str, tuple[str, int]] = {
    "bf_max_job_test": ("depth", 1), "bf_window": ("window_s", 60), "bf_resolution": ("resolution_s", 1),
    "bf_max_job_user": ("of_user", 1), "bf_job_part_count_reserve": ("reserved", 1),
    "bf_interval": ("interval_s", 1),
}  # fmt: skip
"""By the name in SchedulerParameters, the limit and how many of its units one is."""


JOB_MASK = (1 << 32) - 1
"""Takes the number of the job from an entry of a queue, order << 32 | job. The smallest entry starts first."""


@dataclass(frozen=True)
class Ranking:
    """The order in which jobs start. keys: by job; the smallest starts first, and the earliest submission among equals.

    expected_s: predicted run times in whole seconds; None without predictions.
    """

    keys: npt.NDArray[Any]
    expected_s: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class ClusterView:
    """View of the cluster at a tick. Each list holds job or node numbers, waiting jobs in the order of the queue."""

    now_s: int
    waiting: Sequence[int]
    running: Sequence[int]
    idle_nodes: Sequence[int]
    asleep_nodes: Sequence[int]


@dataclass(frozen=True)
class Actions:
    """Changes that a policy asks for.

    keys: new keys of waiting jobs. sleep, wake: node numbers; a node with jobs stays awake.
    """

    keys: Mapping[int, float] = field(default_factory=dict)
    sleep: Sequence[int] = ()
    wake: Sequence[int] = ()


class Policy:
    """FIFO is the base: override what differs.

    label: what it is called in results; "" for its name. estimate: the run times that a backfill plans with.
    observes: whether `start` and `end` are called. tick_s: seconds between calls of `tick`, 0 for none. restart_s:
    seconds that a preempted job loses.
    """

    name: ClassVar[str] = "fifo"
    label: str = ""
    estimate: Estimate = "requested"
    backfill: Backfill = "none"
    limits: BackfillLimits = BackfillLimits()
    is_preemptive: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    tick_s: int = 0
    restart_s: int = 0

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        """Rank all jobs before the simulation starts; None if only `arrive` can."""
        return Ranking(workload.array("submit_s"))

    def arrive(self, jobs: Sequence[int], now_s: int) -> Ranking:
        """Rank jobs that become eligible now, in their order. Called if `rank` gave None."""
        raise NotImplementedError

    def has_learned(self) -> bool:
        """Return True if waiting jobs rank differently since the last call. Called after `arrive`."""
        return False

    def rank_again(self, jobs: Sequence[int], now_s: int) -> Ranking:
        """Rank jobs that wait. Called if `has_learned`."""
        raise NotImplementedError

    def start(self, job: int, now_s: int) -> None:
        """A job starts, or starts again."""

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        """A job that had started ends for good."""

    def tick(self, view: ClusterView) -> Actions:
        return Actions()

    def victims(self, job: int, left_s: int, now_s: int, running: Sequence[int]) -> Iterator[int]:
        """Jobs to preempt for a waiting one until it fits. running: entries end << 32 | job, ascending."""
        return iter(())

    def resume_order(self, job: int, left_s: int, order: int) -> int:
        """The order of a job that was preempted, or whose node failed. order: the one it had."""
        return order


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


class LeastRequested(Policy):
    """A control: rank jobs by the GPU-time that users ask for (GPUs x time limit), the least first."""

    name: ClassVar[str] = "gpu-limit"

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking((workload.array("gpu_count") * workload.requested_s()).astype(np.int64))


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


@dataclass(frozen=True)
class Weights:
    """As in slurm.conf: PriorityWeightAge and so on, PriorityMaxAge, and PriorityDecayHalfLife; times in seconds.

    qos: priority of each QOS, by name. shares: of each user, of a common total; users without one have 1.
    """

    age: float = 1000.0
    fair_share: float = 1000.0
    size: float = 0.0
    qos_weight: float = 0.0
    max_age_s: float = 7 * 86_400.0
    half_life_s: float = 7 * 86_400.0
    qos: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


class Multifactor(Policy):
    """The greatest priority first, computed again every 5 minutes (PriorityCalcPeriod).

    The fair-share factor is the classic one, 2^(-usage / share), of users without accounts: usage is a user's share of
    the decayed GPU-seconds. site_factors: by job, added as they are; 0 without any.
    """

    name: ClassVar[str] = "multifactor"
    observes: ClassVar[bool] = True
    tick_s = 300

    def __init__(self, weights: Weights | None = None, site_factors: Sequence[float] | None = None) -> None:
        self._weights = weights or Weights()
        self._site_factors = site_factors

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        gpus = workload.array("gpu_count")
        self._gpus: list[int] = gpus.tolist()
        self._users: list[str] = workload.array("user").tolist()
        self._submit_s: list[int] = workload.array("submit_s").tolist()
        most = max(self._weights.qos.values(), default=1.0) or 1.0
        qos = np.array([self._weights.qos.get(name, 0.0) / most for name in workload.array("qos")])
        fixed = self._weights.size * gpus / cluster.gpu_count + self._weights.qos_weight * qos
        if self._site_factors is not None:
            fixed = fixed + np.asarray(self._site_factors, dtype="float64")
        self._fixed: list[float] = fixed.tolist()
        shares = {user: self._weights.shares.get(user, 1.0) for user in sorted(set(self._users))}
        total = sum(shares.values()) or 1.0
        self._shares = {user: share / total for user, share in shares.items()}
        self._usage_s: dict[str, float] = defaultdict(float)
        self._running: dict[int, int] = {}
        self._counted_s = self._submit_s[0]
        return None

    def arrive(self, jobs: Sequence[int], now_s: int) -> Ranking:
        factors = self._fair_shares(now_s)
        return Ranking(np.array([-self._priority(job, now_s, factors) for job in jobs]))

    def tick(self, view: ClusterView) -> Actions:
        factors = self._fair_shares(view.now_s)
        return Actions({job: -self._priority(job, view.now_s, factors) for job in view.waiting})

    def start(self, job: int, now_s: int) -> None:
        self._count(now_s)
        self._running[job] = now_s

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        self._count(now_s)
        self._running.pop(job, None)

    def _count(self, now_s: int) -> None:
        """Decay the usage, then add that of running jobs since it was last counted."""
        passed_s = now_s - self._counted_s
        if passed_s <= 0:
            return
        decay = 0.5 ** (passed_s / self._weights.half_life_s)
        for user in self._usage_s:
            self._usage_s[user] *= decay
        for job in self._running:
            self._usage_s[self._users[job]] += passed_s * self._gpus[job]
        self._counted_s = now_s

    def _fair_shares(self, now_s: int) -> dict[str, float]:
        self._count(now_s)
        total = sum(self._usage_s.values())
        if not total:
            return dict.fromkeys(self._shares, 1.0)
        return {
            user: 2.0 ** -(self._usage_s.get(user, 0.0) / total / share) if share > 0 else 0.0
            for user, share in self._shares.items()
        }

    def _priority(self, job: int, now_s: int, factors: Mapping[str, float]) -> float:
        age = min((now_s - self._submit_s[job]) / self._weights.max_age_s, 1.0)
        fair_share = factors[self._users[job]]
        return self._weights.age * age + self._weights.fair_share * fair_share + self._fixed[job]
