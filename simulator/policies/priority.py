"""QSSF: the shortest predicted GPU-time first (Hu et al., SC'21, 4.2), as the hooks rank jobs, and its controls.

Each prediction is made from jobs that ended in the simulation before the submission. Trainings choose the order as
`almanac train` does (simulator.rank_choice).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from advisor.duration.features import SubmittedJob
from advisor.duration.rank import DEFAULT_RANK, mean_rule
from advisor.duration.service import OnlinePredictor, Prediction, priority_of
from advisor.priority import NO_OVERRUN, RELIEF_S, RELIEF_SHARE, decide_priority, relieved_users
from almanac.config import Config
from almanac.errors import RequestError
from almanac.names import name_key
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.policies.base import Actions, ClusterView, Policy, Ranking
from simulator.rank_choice import aged_key, aged_keys, choose_rank
from simulator.workload import Workload

FIRST_GUESS_S = 3600.0
"""Run time of jobs that arrive before any job has ended: they go by GPU count."""
_SUBMISSION = ("user", "account", "partition", "qos", "name", "tier", "gpu_count", "node_count", "cpu_count")


class Predicted(Policy):
    """A policy that predicts each job at its submission, from jobs that ended before, those of the history included.

    Once a model is trained, it ranks waiting jobs again, by what is known then, as `almanac reprioritize` does.

    exponent: of expected run times, instead of the order that trainings choose: 1 is GPU-time, 0 the GPU count alone.
    """

    observes: ClassVar[bool] = True

    def __init__(self, config: Config, exponent: float | None = None) -> None:
        self._config = config
        self._rule = None if exponent is None else mean_rule(exponent)

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        self._started = set[int]()
        self._jobs = _submissions(workload)
        choose = partial(choose_rank, priority=self._config.priority, has_backfill=self.backfill != "none")
        self._online = OnlinePredictor(self._config, choose, self._rule)
        if workload.history is not None:
            _replay(workload.history, int(workload.array("submit_s")[0]), self._online)
        self._trainings = self._online.trainings
        return None

    def arrive(self, jobs: Sequence[int], now_s: int) -> Ranking:
        return self._ranking(jobs, self._online.submit([(job, self._jobs[job]) for job in jobs]), now_s)

    def has_learned(self) -> bool:
        before, self._trainings = self._trainings, self._online.trainings
        return self._trainings > before

    def rank_again(self, jobs: Sequence[int], now_s: int) -> Ranking:
        return self._ranking(jobs, self._online.predict_again(jobs, now_s), now_s)

    def _ranking(self, jobs: Sequence[int], predictions: Sequence[Prediction | None], now_s: int) -> Ranking:
        expected_s = [each.duration.duration_s if each else FIRST_GUESS_S for each in predictions]
        keys = [self.key(job, each, now_s) for job, each in zip(jobs, predictions, strict=True)]
        return Ranking(np.array(keys, dtype="float64"), np.ceil(np.array(expected_s)))

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        raise NotImplementedError

    def start(self, job: int, now_s: int) -> None:
        # A job that starts again after a failure of its node is still one start to the predictor.
        if job not in self._started:
            self._started.add(job)
            self._online.start(job, now_s)

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        self._online.end(job, now_s, is_failed)


def _submissions(workload: Workload) -> list[SubmittedJob]:
    columns = [workload.array(name).tolist() for name in _SUBMISSION]
    # A request of as few nodes as possible is one of one node to the predictor, as in accounting.
    columns[_SUBMISSION.index("node_count")] = [max(nodes, 1) for nodes in columns[_SUBMISSION.index("node_count")]]
    columns[_SUBMISSION.index("name")] = [name_key(name) for name in columns[_SUBMISSION.index("name")]]
    limits = [float(limit) if limit > 0 else float("nan") for limit in workload.array("time_limit_s").tolist()]
    arrays, submits = workload.array("is_array").tolist(), workload.array("submit_s").tolist()
    return [SubmittedJob(*row) for row in zip(*columns, limits, arrays, submits, strict=True)]


def _replay(history: Workload, until_s: int, online: OnlinePredictor) -> None:
    """The history's jobs as they ran; those with unknown start times ran at once."""
    submissions = _submissions(history)
    events: list[tuple[int, int, int]] = []
    submits, starts, runs = (history.array(name).tolist() for name in ("submit_s", "start_s", "run_s"))
    for job, (submit_s, start_s, run_s) in enumerate(zip(submits, starts, runs, strict=True)):
        begun_s = start_s if start_s >= 0 else submit_s
        events += [(begun_s + run_s, 0, job), (submit_s, 1, job), (begun_s, 2, job)]
    is_failed = [state not in ("", "COMPLETED") for state in history.array("state")]
    for time_s, what, job in sorted(events):
        if time_s >= until_s:
            return
        if what == 0:
            online.end(("history", job), time_s, is_failed[job])
        elif what == 1:
            online.submit([(("history", job), submissions[job])])
        else:
            online.start(("history", job), time_s)


class PredictedRunTimes(Predicted):
    """Another policy's fixed order, with predicted run times for the backfill."""

    def __init__(self, config: Config, order: Policy) -> None:
        super().__init__(config)
        self._order = order

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        ranking = self._order.rank(workload, cluster)
        if ranking is None:
            raise RequestError(
                "this policy's order changes with time", "plan its backfill with requested or true run times"
            )
        self._keys = np.asarray(ranking.keys).tolist()
        return super().rank(workload, cluster)

    def key(self, job: int, prediction: object, now_s: int) -> float:
        return float(self._keys[job])


class Qssf(Predicted):
    """The least predicted GPU-time first, as the hooks rank jobs (advisor.duration.blend)."""

    name: ClassVar[str] = "qssf"

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        if prediction is None:
            return self._jobs[job].gpu_count * FIRST_GUESS_S
        gpus = self._jobs[job].gpu_count
        # The stretch only weighs the rank against the age of jobs, which does not count here.
        rule = dataclasses.replace(prediction.rule, stretch=1.0)
        return float(rule.ranked(gpus, prediction.queue_gpu_time_s / gpus))


class AgedQssf(Qssf):
    """QSSF in the order of Slurm's age factor plus the site factor that almanac sets: no job starves.

    config.priority holds what a site can set: tau_hours, and points for short jobs (Hu et al., SC'21, implication 6).
    """

    name: ClassVar[str] = "qssf-aged"

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        settings, submission = self._config.priority, self._jobs[job]
        advice = priority_of(submission, prediction, (), settings) if prediction else None
        if advice is None:
            gpu_time_s = super().key(job, None, now_s)
            advice = decide_priority(gpu_time_s, gpu_time_s, NO_OVERRUN, (), settings)
        return aged_key(submission.submit_s, advice.site_factor, settings)


class AgedGpuCount(Policy):
    """A control: the order of the site factor, if every job were predicted to run equally long."""

    name: ClassVar[str] = "gpu-count"

    def __init__(self, config: Config) -> None:
        self._priority = config.priority

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        gpu_time_s = workload.array("gpu_count").astype("float64") * FIRST_GUESS_S
        return Ranking(np.array(aged_keys(workload.array("submit_s"), gpu_time_s, self._priority)))


class RelievedQssf(AgedQssf):
    """The order of AgedQssf with relief for the users who wait most, as `almanac reprioritize` gives it.

    Every hour, the jobs of relieved_users get `points` of the site factor.
    """

    name: ClassVar[str] = "qssf-relief"

    def __init__(self, config: Config, share: float = RELIEF_SHARE, points: float = 1000.0) -> None:
        super().__init__(config)
        self._share, self._gain, self.tick_s = share, points / config.priority.points_per_e, RELIEF_S
        self._keys: dict[int, float] = {}

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        self._keys[job] = super().key(job, prediction, now_s)
        return self._keys[job]

    def tick(self, view: ClusterView) -> Actions:
        waiting = ((self._jobs[job].user, self._jobs[job].submit_s) for job in view.waiting)
        relieved = relieved_users(waiting, view.now_s, self._share)
        return Actions({
            job: self._keys[job] - (self._gain if self._jobs[job].user in relieved else 0.0) for job in view.waiting
        })  # fmt: skip


class DebugLaneQssf(Qssf):
    """QSSF with a lane for debugging (Hu et al., SC'21, implication 6): jobs that ask for little time go first.

    A job is a debugging job if its time limit is at most short_s. The limit ends it, so nobody gains by a false one.
    """

    name: ClassVar[str] = "qssf-debug"

    def __init__(self, config: Config, short_s: float = 900.0) -> None:
        super().__init__(config)
        self._short_s = short_s

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        key = super().key(job, prediction, now_s)
        return key - 2.0**40 if self._jobs[job].time_limit_s <= self._short_s else key


class ShuffledQssf(Policy):
    """A control: each job has the predicted run time of a random job that was submitted by then, and its own GPUs.

    The predictions are those of a simulation of QSSF without backfill. The order relies on them in full, as in the
    paper, unless there is an exponent, or age counts as in AgedQssf: then as far as the hooks do by default.
    """

    name: ClassVar[str] = "qssf-shuffled"

    def __init__(self, config: Config, seed: int = 0, exponent: float | None = None, is_aged: bool = False) -> None:
        default = DEFAULT_RANK.exponent if is_aged else 1.0
        self._config, self._seed, self._is_aged = config, seed, is_aged
        self._exponent = default if exponent is None else exponent

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking:
        run_s = _predicted_run_s(workload, cluster, self._config)
        drawn = np.random.default_rng(self._seed).integers(np.arange(1, len(run_s) + 1))
        gpus = workload.array("gpu_count").astype("float64")
        if self._is_aged:
            ranked_s = mean_rule(self._exponent).ranked(gpus, run_s[drawn])
            return Ranking(np.array(aged_keys(workload.array("submit_s"), ranked_s, self._config.priority)))
        return Ranking(gpus * run_s[drawn] ** self._exponent)


class _Recording(Qssf):
    """run_s: the run time that was predicted for each job at its submission."""

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        self.run_s = np.full(len(workload), np.nan)
        return super().rank(workload, cluster)

    def key(self, job: int, prediction: Prediction | None, now_s: int) -> float:
        if np.isnan(self.run_s[job]):
            self.run_s[job] = prediction.queue_gpu_time_s / self._jobs[job].gpu_count if prediction else FIRST_GUESS_S
        return super().key(job, prediction, now_s)


_newest: list[tuple[Workload, Cluster, Config, npt.NDArray[np.float64]]] = []
"""The last result of _predicted_run_s: several draws of a control in one process need it once."""


def _predicted_run_s(workload: Workload, cluster: Cluster, config: Config) -> npt.NDArray[np.float64]:
    for *given, run_s in _newest:
        if all(one is other for one, other in zip(given, (workload, cluster, config), strict=True)):
            return run_s
    policy = _Recording(config, 1.0)
    simulate(workload, cluster, policy)
    run_s = np.where(np.isnan(policy.run_s), FIRST_GUESS_S, policy.run_s)
    _newest[:] = [(workload, cluster, config, run_s)]
    return run_s
