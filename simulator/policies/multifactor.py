"""Slurm's multifactor priority (priority/multifactor): age, fair share, job size, QOS, and the site factor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from simulator.cluster import Cluster
from simulator.policies.base import Actions, ClusterView, Policy, Ranking
from simulator.workload import Workload


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
