"""The two things the advisor does: learn from a site's history, and advise one submission."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from advisor.duration.waits import WaitQuartiles
from advisor.memory.calibration import Calibration
from advisor.services.base import AdviceRequest, BuiltInService, Record
from advisor.services.gpu_time import GpuTimeService, LearnedDurations
from advisor.services.memory import MemoryService
from advisor.services.wait import WaitService
from almanac.config import Config
from almanac.records import Advice, Request

BUILT_IN: Mapping[str, BuiltInService[Any, Any, Any]] = {
    "gpu_time": GpuTimeService(),
    "memory": MemoryService(),
    "wait": WaitService(),
}
"""almanac's own services; together they tell all fields of `Advice`. Node demand comes later."""


@dataclass(frozen=True)
class Trained(LearnedDurations):
    """What almanac's own services learned from a site's jobs at trained_s."""

    trained_s: int
    calibration: Calibration
    waits: WaitQuartiles = field(default_factory=WaitQuartiles)

    def artefacts(self) -> Mapping[str, Any]:
        """What each service of BUILT_IN learned."""
        return {"gpu_time": self, "memory": self.calibration, "wait": self.waits}


def train_site(record: Record, previous: Trained | None, config: Config) -> Trained:
    """Updates almanac's own services from a site's record. previous: the version in use."""
    data = {name: service.fetch(record) for name, service in BUILT_IN.items()}
    return _update(data, previous, config, record.now_s)


def train(history: pd.DataFrame, config: Config, now_s: int) -> Trained:
    """The same from a history alone, load_history(..., running=True): back-tests have no store.

    Only jobs that ended before now_s count, and what users had running then; with few or none, what can be learned.
    """
    return _update(dict.fromkeys(BUILT_IN, history), None, config, now_s)


def _update(data: Mapping[str, Any], previous: Trained | None, config: Config, now_s: int) -> Trained:
    before = previous.artefacts() if previous else {}
    learned = {name: service.update(data[name], before.get(name), config, now_s) for name, service in BUILT_IN.items()}
    return Trained(**vars(learned["gpu_time"]), trained_s=now_s, calibration=learned["memory"], waits=learned["wait"])


def advise(request: Request, history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> Advice:
    """Everything almanac has to say of a submission at now_s. Pure.

    history: the user's own jobs, those that still run too; rows of others, and what came after now_s, are passed over.
    """
    return advise_many([request], history, trained, config, now_s)[0]


def advise_many(
    requests: Sequence[Request], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> list[Advice]:
    """The same of many submissions at now_s, of any users: each as if it were the only one.

    history: all of these users' jobs.
    """
    if not requests:
        return []
    asked = [AdviceRequest(dataclasses.replace(request, submit_s=now_s), history, config) for request in requests]
    artefacts = trained.artefacts() if trained else {}
    told: list[dict[str, Any]] = [{} for _ in asked]
    for name, service in BUILT_IN.items():
        predicted = service.predict_many(asked, artefacts.get(name))
        for each, own, fields in zip(asked, predicted, told, strict=True):
            fields |= service.advise(each, own)
    return [Advice(request=each.request, **fields) for each, fields in zip(asked, told, strict=True)]
