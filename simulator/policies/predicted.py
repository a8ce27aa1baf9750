"""QSSF: the shortest predicted GPU-time first (helios-qssf-ces, 4.2), as the hooks rank jobs, and its controls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from advisor.decisions.priority import decide_priority
from advisor.duration.overrun import NO_OVERRUN
from advisor.duration.prediction import Prediction
from almanac.config import Config
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.policies.base import Actions, ClusterView, Policy, Ranking
from simulator.policies.predictions import SimulatedPredictor
from simulator.workload import Workload

FIRST_GUESS_S = 3600.0
"""Run time of jobs that arrive before any job has ended: they go by GPU count."""


class Predicted(Policy):
    """A policy that asks the predictor about each job at its submission, and shows it each start and end.

    exponent: of predicted run times, instead of the one that trainings choose: 1 is GPU-time, 0 the GPU count alone.
    """

    observes: ClassVar[bool] = True

    def __init__(self, config: Config, exponent: float | None = None) -> None:
        self._config = config
        self._predictor = SimulatedPredictor(config, exponent)
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
    """The least predicted GPU-time first, as the hooks rank jobs (advisor.duration.rank_scale)."""

    name: ClassVar[str] = "qssf"

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        if prediction is None:
            return self._gpus[job] * FIRST_GUESS_S
        gpus = self._gpus[job]
        # The stretch only weighs the rank against the age of jobs, which does not count here.
        scale = dataclasses.replace(prediction.scale, stretch=1.0)
        return float(scale.ranked(gpus, prediction.queue_gpu_time_s / gpus))


class AgedQssf(Qssf):
    """QSSF in the order of Slurm's age factor plus the site factor that almanac sets: no job starves.

    config.priority holds what a site can set: tau_hours, marquee users to relieve, and points for short jobs
    (helios-qssf-ces, implications 6 and 7).
    """

    name: ClassVar[str] = "qssf-aged"

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        settings, user = self._config.priority, self._users[job]
        if prediction is None:
            gpu_time_s = super().key(job, None, now_s)
            advice = decide_priority(gpu_time_s, gpu_time_s, NO_OVERRUN, user, (), settings)
        else:
            gpu_time_s = prediction.queue_gpu_time_s
            advice = decide_priority(gpu_time_s, gpu_time_s, NO_OVERRUN, user, (), settings, prediction.ranked)
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


class ShuffledQssf(Policy):
    """A control: each job has the predicted run time of a random job that was submitted by then, and its own GPUs.

    The predictions are those of a simulation of QSSF without backfill. The order relies on them in full, as in the
    paper, unless there is an exponent.
    """

    name: ClassVar[str] = "qssf-shuffled"

    def __init__(self, config: Config, seed: int = 0, exponent: float = 1.0) -> None:
        self._config, self._seed, self._exponent = config, seed, exponent

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        run_s = _predicted_run_s(workload, cluster, self._config)
        drawn = np.random.default_rng(self._seed).integers(np.arange(1, len(run_s) + 1))
        return Ranking(workload.array("gpu_count") * run_s[drawn] ** self._exponent)


class _Recording(Qssf):
    """run_s: the run time that was predicted for each job at its submission."""

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        self.run_s = np.full(len(workload), FIRST_GUESS_S)
        return super().rank(workload, cluster)

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        if prediction is not None:
            self.run_s[job] = prediction.queue_gpu_time_s / self._gpus[job]
        return super().key(job, prediction, now_s)


_newest: list[tuple[Workload, Cluster, Config, npt.NDArray[np.float64]]] = []
"""The last result of _predicted_run_s: several draws of a control in one process need it once."""


def _predicted_run_s(workload: Workload, cluster: Cluster, config: Config) -> npt.NDArray[np.float64]:
    for *given, run_s in _newest:
        if all(one is other for one, other in zip(given, (workload, cluster, config), strict=True)):
            return run_s
    policy = _Recording(config, 1.0)
    simulate(workload, cluster, policy)
    _newest[:] = [(workload, cluster, config, policy.run_s)]
    return policy.run_s
