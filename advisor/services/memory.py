"""Memory: the upper bound of the HBM peak, and from it the tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from advisor.decisions.memory import MemoryAdvice, decide_memory
from advisor.duration.features import submitted_by
from advisor.memory.bound import calibrate
from advisor.memory.calibration import Calibration
from advisor.memory.peak_store import remember_peaks
from advisor.services.base import AdviceRequest, Record
from almanac.config import Config


@dataclass(frozen=True)
class PredictedMemory:
    """set_aside: runs without evidence, by reason."""

    advice: MemoryAdvice
    set_aside: Mapping[str, int]


class MemoryService:
    """The service `memory`: fields tier, bound, evidence and set_aside of the advice."""

    def fetch(self, record: Record) -> pd.DataFrame:
        return record.history

    def update(self, data: pd.DataFrame, previous: Calibration | None, config: Config, now_s: int) -> Calibration:
        return calibrate(submitted_by(data, now_s, config.advice.history_days), config.advice, config.tiers)

    def predict(self, asked: AdviceRequest, artefact: Calibration | None) -> PredictedMemory:
        return self.predict_many([asked], artefact)[0]

    def predict_many(self, asked: Sequence[AdviceRequest], artefact: Calibration | None) -> Sequence[PredictedMemory]:
        config, now_s = asked[0].config, asked[0].request.submit_s
        users = {each.job.user for each in asked}
        known = submitted_by(asked[0].history, now_s, config.advice.history_days)
        peaks = remember_peaks(users, known, now_s, config.advice, config.tiers)
        evidences = [peaks.evidence(each.job, now_s) for each in asked]
        return [
            PredictedMemory(decide_memory(each.request, evidence, artefact, config), dict(evidence.set_aside))
            for each, evidence in zip(asked, evidences, strict=True)
        ]

    def advise(self, asked: AdviceRequest, predicted: PredictedMemory) -> Mapping[str, Any]:
        advice = predicted.advice
        return {
            "tier": advice.tier,
            "bound": advice.bound,
            "evidence": advice.evidence,
            "set_aside": predicted.set_aside,
        }
