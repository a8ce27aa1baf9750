"""Wait: how long jobs waited of late, by tier and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from advisor.duration.features import known_at, without_parts
from advisor.duration.waits import WaitQuartiles, learn_waits
from advisor.services.base import AdviceRequest, Record
from almanac.config import Config
from almanac.records import ExpectedWait


class WaitService:
    """The service `wait`: the field waits of the advice."""

    def fetch(self, record: Record) -> pd.DataFrame:
        return record.history

    def update(self, data: pd.DataFrame, previous: WaitQuartiles | None, config: Config, now_s: int) -> WaitQuartiles:
        return learn_waits(without_parts(known_at(data, now_s)), now_s)

    def predict(self, asked: AdviceRequest, artefact: WaitQuartiles | None) -> tuple[ExpectedWait, ...]:
        return artefact.expected(asked.config.tiers, asked.request.node_count) if artefact else ()

    def predict_many(
        self, asked: Sequence[AdviceRequest], artefact: WaitQuartiles | None
    ) -> Sequence[tuple[ExpectedWait, ...]]:
        return [self.predict(each, artefact) for each in asked]

    def advise(self, asked: AdviceRequest, predicted: tuple[ExpectedWait, ...]) -> Mapping[str, Any]:
        return {"waits": predicted}
