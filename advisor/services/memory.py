"""Memory: the upper bound of the HBM peak, and from it the tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from advisor.decisions.memory import MemoryAdvice, decide_memory
from advisor.duration.features import submitted_by
from advisor.memory.bound import calibrate
from advisor.memory.calibration import Calibration
from advisor.memory.peak_store import remember_peaks
from advisor.services.base import AdviceRequest
from almanac.config import Config


@dataclass(frozen=True)
class AdvisedMemory:
    """excluded: number of the runs without evidence, by reason."""

    advice: MemoryAdvice
    excluded: Mapping[str, int]


def learn_memory(history: pd.DataFrame, config: Config, now_s: int) -> Calibration:
    """The calibration of bounds and tiers from the jobs submitted before now_s."""
    return calibrate(submitted_by(history, now_s, config.advice.history_days), config.advice, config.tiers)


def advise_memory(asked: Sequence[AdviceRequest], calibration: Calibration | None) -> list[AdvisedMemory]:
    """In the order of `asked`, which all have the same history, settings, and submit_s. Pure."""
    config, now_s = asked[0].config, asked[0].request.submit_s
    users = {each.job.user for each in asked}
    known = submitted_by(asked[0].history, now_s, config.advice.history_days)
    peaks = remember_peaks(users, known, now_s, config.advice, config.tiers)
    evidences = [peaks.evidence(each.job, now_s) for each in asked]
    return [
        AdvisedMemory(decide_memory(each.request, evidence, calibration, config), dict(evidence.excluded))
        for each, evidence in zip(asked, evidences, strict=True)
    ]
