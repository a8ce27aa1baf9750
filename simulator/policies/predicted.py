"""QSSF: the shortest predicted GPU-time first (helios-qssf-ces, 4.2), as the hooks rank jobs, and its controls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from advisor.decisions.priority import decide_priority
from advisor.duration.prediction import Prediction
from almanac.config import Config
from simulator.cluster import Cluster
from simulator.policies.base import Actions, ClusterView, Policy, Ranking
from simulator.policies.predictions import SimulatedPredictor
from simulator.workload import Workload

FIRST_GUESS_S = 3600.0
"""Run time of jobs that arrive before any job has ended: they go by GPU count."""


class Predicted(Policy):
    """A policy that asks the predictor about each job at its submission, and shows it each start and end."""

    observes: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._predictor = SimulatedPredictor(config)
        self._is_known: set[int] = set()

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        self._is_known = set()
        self._gpus: list[int] = workload.array("gpu_count").tolist()
        self._submit_s: list[int] = workload.array("submit_s").tolist()
        self._limit_s: list[int] = workload.array("time_limit_s").tolist()
        self._users: list[str] = workload.array("user").tolist()
        self._predictor.prepare(workload)
        return None

    def arrive(self, jobs: Sequence[int], now_s: int) -> Ranking:
        predictions = self._predictor.predict(jobs)
        expected_s = [each.duration.duration_s if each else FIRST_GUESS_S for each in predictions]
        keys = [self.key(job, each, now_s) for job, each in zip(jobs, predictions, strict=True)]
        return Ranking(np.array(keys, dtype="float64"), np.ceil(np.array(expected_s)))

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        raise NotImplementedError

    def start(self, job: int, now_s: int) -> None:
        # A job that starts again after a failure of its node is still one start to the predictor.
        if job not in self._is_known:
            self._is_known.add(job)
            self._predictor.start(job, now_s)

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        self._predictor.end(job, now_s, is_failed)


class Qssf(Predicted):
    """The least predicted GPU-time first.

    weight: exponent of the predicted run time: 1 is GPU-time, 0 is GPU count alone.
    """

    name: ClassVar[str] = "qssf"

    def __init__(self, config: Config, weight: float = 1.0) -> None:
        super().__init__(config)
        self._weight = weight

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        gpus = self._gpus[job]
        run_s = max(prediction.rank_gpu_time_s / gpus, 1.0) if prediction else FIRST_GUESS_S
        return float(gpus * run_s**self._weight)


class AgedQssf(Qssf):
    """QSSF in the order of Slurm's age factor plus the site factor that almanac sets: no job starves.

    config.priority holds what a site can set: tau_hours, marquee users to relieve, and points for short jobs
    (helios-qssf-ces, implications 6 and 7).
    """

    name: ClassVar[str] = "qssf-aged"

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        settings, gpus = self._config.priority, self._gpus[job]
        gpu_time_s = super().key(job, prediction, now_s)
        cautious_s, overran = gpu_time_s, 0.0
        if prediction is not None:
            cautious_s, overran = (prediction.duration.high_s or 0.0) * gpus, prediction.overran
        advice = decide_priority(gpu_time_s, cautious_s, overran, self._users[job], (), settings)
        # The smallest key goes first, the greatest priority in Slurm: the sign changes.
        return self._submit_s[job] / (settings.tau_hours * 3600) - advice.site_factor / settings.points_per_e


class RelievedQssf(Qssf):
    """QSSF with relief for the users who wait most (helios-qssf-ces, implication 7).

    Every hour, the users with the longest total wait of their waiting jobs, at most `share` of all that wait, get
    their jobs' keys divided by `factor`.
    """

    name: ClassVar[str] = "qssf-relief"

    def __init__(self, config: Config, share: float = 0.05, factor: float = math.e, tick_s: int = 3600) -> None:
        super().__init__(config)
        self._share, self._factor, self.tick_s = share, factor, tick_s
        self._keys: dict[int, float] = {}

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        self._keys[job] = super().key(job, prediction, now_s)
        return self._keys[job]

    def tick(self, view: ClusterView) -> Actions:
        waited_s: dict[str, int] = {}
        for job in view.waiting:
            user = self._users[job]
            waited_s[user] = waited_s.get(user, 0) + view.now_s - self._submit_s[job]
        longest = sorted(waited_s, key=lambda user: (-waited_s[user], user))
        relieved = set(longest[: math.ceil(len(longest) * self._share)])
        return Actions(
            {job: self._keys[job] / (self._factor if self._users[job] in relieved else 1.0) for job in view.waiting}
        )


class DebugLaneQssf(Qssf):
    """QSSF with a lane for debugging (helios-qssf-ces, implication 6): jobs that ask for little time go first.

    A job is a debugging job if its time limit is at most short_s. The limit ends it, so nobody gains by a false one.
    """

    name: ClassVar[str] = "qssf-debug"

    def __init__(self, config: Config, short_s: float = 900.0) -> None:
        super().__init__(config)
        self._short_s = short_s

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        key = super().key(job, prediction, now_s)
        limit_s = self._limit_s[job]
        return key - 2.0**40 if 0 < limit_s <= self._short_s else key


class ShuffledQssf(Qssf):
    """A control: each job has the predicted run time of a random job that was submitted by then, and its own GPUs."""

    name: ClassVar[str] = "qssf-shuffled"

    def __init__(self, config: Config, seed: int = 0, weight: float = 1.0) -> None:
        super().__init__(config, weight)
        self._seed = seed

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        self._rng, self._drawn = np.random.default_rng(self._seed), list[float]()
        return super().rank(workload, cluster)

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        self._drawn.append(super().key(job, prediction, now_s) / self._gpus[job])
        return self._drawn[int(self._rng.integers(len(self._drawn)))] * self._gpus[job]


class GivenOrder(Policy):
    """Order by values that are given for each job, such as predictions of an earlier run."""

    name: ClassVar[str] = "given"

    def __init__(self, keys: npt.NDArray[np.float64]) -> None:
        self._keys = keys

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        return Ranking(self._keys)
