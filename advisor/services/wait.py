"""Wait: how long jobs waited of late, by tier and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from advisor.duration.features import known_at, without_parts
from advisor.duration.waits import Waits, learn_waits
from advisor.services.base import Asked, Record
from almanac.config import Config
from almanac.records import ExpectedWait


class Wait:
    """The service `wait`: the field waits of the advice."""

    def fetch(self, record: Record) -> pd.DataFrame:
        return record.history

    def update(self, data: pd.DataFrame, previous: Waits | None, config: Config, now_s: int) -> Waits:
        return learn_waits(without_parts(known_at(data, now_s)), now_s)

    def predict(self, asked: Asked, artefact: Waits | None) -> tuple[ExpectedWait, ...]:
        return artefact.expected(asked.config.tiers, asked.request.node_count) if artefact else ()

    def predict_many(self, asked: Sequence[Asked], artefact: Waits | None) -> Sequence[tuple[ExpectedWait, ...]]:
        return [self.predict(each, artefact) for each in asked]

    def act(self, asked: Asked, predicted: tuple[ExpectedWait, ...]) -> Mapping[str, Any]:
        return {"waits": predicted}
