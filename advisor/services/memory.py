"""Memory: the upper bound of the HBM peak, and from it the tier."""

from __future__ import annotations

import dataclasses
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
from almanac.hardware import NEAR
from almanac.slices import real_capacities


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
    now_s = asked[0].request.submit_s
    users = {each.job.user for each in asked}
    known = submitted_by(asked[0].history, now_s, asked[0].config.advice.history_days)
    config = _with_capacities(asked[0].config, known)
    peaks = remember_peaks(users, known, now_s, config.advice, config.tiers)
    evidences = [peaks.evidence(each.job, now_s) for each in asked]
    return [
        AdvisedMemory(decide_memory(each.request, evidence, calibration, config), dict(evidence.excluded))
        for each, evidence in zip(asked, evidences, strict=True)
    ]


def _with_capacities(config: Config, history: pd.DataFrame) -> Config:
    """Tiers with the least capacity that telemetry has measured on their GPUs, where that is below the configured one.

    A driver can give a profile less memory than another one does, and ECC takes some of a whole GPU: no name says it.
    """
    slices = {tier.gres for tier in config.tiers if tier.is_slice and tier.gres}
    if not {"gpu_type", "hbm_capacity_mib"} <= set(history.columns):
        return config
    known = history[history["hbm_capacity_mib"] > 0]
    of_slices = known[known["gpu_type"].isin(slices)].groupby("gpu_type")["hbm_capacity_mib"].min()
    sizes = known[["tier", "hbm_capacity_mib"]].drop_duplicates()
    least = {str(gres): float(mib) for gres, mib in of_slices.items()}
    for tier in config.tiers:
        own = sizes.loc[sizes["tier"] == tier.name, "hbm_capacity_mib"]
        own = own[own >= (1 - NEAR) * tier.capacity_mib]
        if not tier.is_slice and len(own):
            least[tier.name] = float(own.min())
    return dataclasses.replace(config, tiers=real_capacities(config.tiers, least))
