"""Memory: the upper bound of the HBM peak, and from it the tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from advisor.decisions.memory import MemoryAdvice, decide_memory
from advisor.features import known_at, whole_runs
from advisor.models.calibration import Calibration
from advisor.models.hbm import calibrate
from advisor.models.peak_store import evidence_now
from advisor.services.base import Asked, Record
from almanac.config import Config


@dataclass(frozen=True)
class Bounded:
    """set_aside: runs without evidence, by reason."""

    advice: MemoryAdvice
    set_aside: Mapping[str, int]


class Memory:
    """The service `memory`: fields tier, bound, evidence and set_aside of the advice."""

    def fetch(self, record: Record) -> pd.DataFrame:
        return record.history

    def update(self, data: pd.DataFrame, previous: Calibration | None, config: Config, now_s: int) -> Calibration:
        return calibrate(whole_runs(known_at(data, now_s)), config.advice, config.tiers)

    def predict(self, asked: Asked, artefact: Calibration | None) -> Bounded:
        config = asked.config
        evidence = evidence_now(asked.job, whole_runs(asked.history), config.advice, config.tiers)
        return Bounded(decide_memory(asked.request, evidence, artefact, config), dict(evidence.set_aside))

    def act(self, asked: Asked, predicted: Bounded) -> Mapping[str, Any]:
        advice = predicted.advice
        return {
            "tier": advice.tier,
            "bound": advice.bound,
            "evidence": advice.evidence,
            "set_aside": predicted.set_aside,
        }
