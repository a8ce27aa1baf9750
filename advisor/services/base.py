"""The interface of a service: fetch, update, predict, and advise (act, in the framework of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import pandas as pd

from advisor.duration.features import Submission, submission_of
from almanac.config import Config
from almanac.records import Request
from telemetry.store.cluster_store import ClusterStore

Data = TypeVar("Data")
Artefact = TypeVar("Artefact")
Predicted = TypeVar("Predicted")


@dataclass(frozen=True)
class Record:
    """A site's record at now_s: its store, and the jobs in it, read once for all services.

    history: load_history(..., running=True). More is in `store.read(table, ...)`.
    """

    store: ClusterStore
    history: pd.DataFrame
    now_s: int


@dataclass(frozen=True)
class AdviceRequest:
    """A submission at request.submit_s, the submitting user's own jobs, and the settings.

    history: load_history(..., running=True) of that user.
    """

    request: Request
    history: pd.DataFrame
    config: Config

    @cached_property
    def job(self) -> Submission:
        return submission_of(self.request, self.config.tiers)


@dataclass(frozen=True)
class Learned:
    """What a site's own service learned at updated_s: plain JSON values."""

    updated_s: int
    artefact: Any


class AdviceService(Protocol[Data, Artefact, Predicted]):
    """Learns one thing of a site, and predicts it for a submission."""

    def fetch(self, record: Record) -> Data:
        """What update learns from."""

    def update(self, data: Data, previous: Artefact | None, config: Config, now_s: int) -> Artefact:
        """What is learned at now_s. previous: what was the last time; None where nothing was."""

    def predict(self, asked: AdviceRequest, artefact: Artefact | None) -> Predicted:
        """Pure. artefact: None where nothing was learned yet."""

    def advise(self, asked: AdviceRequest, predicted: Predicted) -> Mapping[str, Any]:
        """The advice: fields of `Advice`, or for a site's own service plain JSON values. Pure.

        The hooks that change Slurm read these values. A service never changes Slurm itself.
        """
