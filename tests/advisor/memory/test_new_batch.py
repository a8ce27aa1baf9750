"""A new batch: how many jobs follow an advice before one of them has shown its memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.memory.calibration import Calibration, Margins, class_of, pools_of
from advisor.memory.decide import decide_memory
from advisor.memory.evidence import Evidence
from almanac.config import AdviceSection, Config
from almanac.records import JobRequest

NOW_S = 1_750_000_000
CONFIG = AdviceSection()
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def evidence_of(peaks: list[float]) -> Evidence:
    logs = tuple(math.log(peak) for peak in peaks)
    return Evidence("family", NOW_S, len(peaks), logs, tuple(range(len(peaks))), max(peaks), max(peaks))


def calibrated(evidence: Evidence, margin: float) -> Calibration:
    return Calibration(CONFIG.risk, {pools_of(class_of(evidence))[0]: Margins(margin, margin)})


@pytest.mark.parametrize(
    ("open_jobs", "pilot", "is_held"), [(0, 10, False), (9, 1, False), (10, 0, True), (12, -2, True)]
)
def test_ten_jobs_follow_before_one_has_shown_its_memory(
    config: Config, open_jobs: int, pilot: int, is_held: bool
) -> None:
    request = JobRequest(gpu_count=4, constraints="gpu&hbm80g", job_name="train", user="ann")
    evidence = dataclasses.replace(evidence_of([20000.0] * 9), open_jobs=open_jobs)
    advice = decide_memory(request, evidence, calibrated(evidence, 2.0), config)
    assert (advice.tier.pilot, advice.tier.is_held) == (pilot, is_held)
    small = dataclasses.replace(evidence_of([9000.0] * 9), open_jobs=99)
    assert decide_memory(request, small, calibrated(small, 2.0), config).tier.pilot is None, "four times as much fits"
    fits = decide_memory(
        dataclasses.replace(request, constraints="hbm40g"), evidence, calibrated(evidence, 2.0), config
    )
    assert not fits.tier.is_held, "it asks for that tier anyway"
