"""The advisor's predictions inside a simulation: each is made from jobs that ended there before the submission."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from advisor.duration.features import Submission
from advisor.duration.prediction import Prediction
from advisor.duration.rank_scale import RankScale, default_exponent
from advisor.online import OnlinePredictor
from almanac.config import Config
from almanac.names import name_key
from simulator.rank_choice import choose_exponent
from simulator.workload import Workload

_SUBMISSION = ("user", "account", "partition", "qos", "name", "tier", "gpu_count", "node_count", "cpu_count")


class SimulatedPredictor:
    """Feeds the online predictor with a simulation's events, after those of the workload's history.

    exponent: of predicted run times in the ranking, instead of the one that trainings choose.
    """

    def __init__(self, config: Config, exponent: float | None = None) -> None:
        self._config = config
        self._scale = None if exponent is None else RankScale(exponent)
        self._choose = choose_exponent if exponent is None else default_exponent
        self._online = OnlinePredictor(config)
        self._submissions: list[Submission] = []

    def prepare(self, workload: Workload) -> None:
        self._online = OnlinePredictor(self._config, self._choose)
        if workload.history is not None:
            self._replay(workload.history, int(workload.array("submit_s")[0]))
        self._submissions = submissions_of(workload)

    def _replay(self, history: Workload, until_s: int) -> None:
        """The history's jobs as they ran; those with unknown start times ran at once."""
        submissions = submissions_of(history)
        events: list[tuple[int, int, int]] = []
        submits, starts, runs = (history.array(name).tolist() for name in ("submit_s", "start_s", "run_s"))
        for job, (submit_s, start_s, run_s) in enumerate(zip(submits, starts, runs, strict=True)):
            begun_s = start_s if start_s >= 0 else submit_s
            events += [(begun_s + run_s, 0, job), (submit_s, 1, job), (begun_s, 2, job)]
        is_failed = are_failed(history)
        for time_s, what, job in sorted(events):
            if time_s >= until_s:
                return
            if what == 0:
                self._online.end(("history", job), time_s, is_failed[job])
            elif what == 1:
                self._online.submit([(("history", job), submissions[job])])
            else:
                self._online.start(("history", job), time_s)

    def predict(self, jobs: Sequence[int]) -> list[Prediction | None]:
        """Of jobs that are submitted now."""
        found = self._online.submit([(job, self._submissions[job]) for job in jobs])
        if self._scale is None:
            return found
        return [each and dataclasses.replace(each, scale=self._scale) for each in found]

    def start(self, job: int, now_s: int) -> None:
        self._online.start(job, now_s)

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        self._online.end(job, now_s, is_failed)


def are_failed(workload: Workload) -> list[bool]:
    """By job: whether its record says another end than completion."""
    return [state not in ("", "COMPLETED") for state in workload.array("state")]


def submissions_of(workload: Workload) -> list[Submission]:
    columns = [workload.array(name).tolist() for name in _SUBMISSION]
    # A request of as few nodes as possible is one of one node to the predictor, as in accounting.
    columns[_SUBMISSION.index("node_count")] = [max(nodes, 1) for nodes in columns[_SUBMISSION.index("node_count")]]
    columns[_SUBMISSION.index("name")] = [name_key(name) for name in columns[_SUBMISSION.index("name")]]
    limits = [float(limit) if limit > 0 else float("nan") for limit in workload.array("time_limit_s").tolist()]
    arrays, submits = workload.array("is_array").tolist(), workload.array("submit_s").tolist()
    return [Submission(*row) for row in zip(*columns, limits, arrays, submits, strict=True)]
