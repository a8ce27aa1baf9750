"""A new batch: how many jobs follow an advice before one of them has shown its memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.memory.calibration import Calibration, Margins, class_of, pools_of
from advisor.memory.decide import bound_of, decide_memory
from advisor.memory.evidence import Evidence
from advisor.memory.peak_store import replay_peaks
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


def test_a_running_job_shows_its_need_after_ten_minutes_and_the_watchs_lag(history_of: History, config: Config) -> None:
    long = {"submit_s": NOW_S, "start_s": NOW_S + 100, "end_s": NOW_S + 5000, "elapsed_s": 4900.0}
    asked = [{"submit_s": NOW_S + at, "start_s": NOW_S + at, "end_s": NOW_S + 6000} for at in (939, 940, 4999, 5001)]
    untold = {**long, "hbm_peak_mib": math.nan, "hbm_evidence": "none"}
    live = [
        case.evidence.live_mib for case in replay_peaks(history_of([long, untold, *asked]), config.advice, config.tiers)
    ]
    assert [len(each) for each in live] == [0, 0, 0, 1, 3, 2], "two of those that asked run long enough, too"
    assert live[3][0] == pytest.approx(1.02 * history_of([long])["hbm_peak_mib"][0])


@pytest.mark.parametrize(
    ("open_jobs", "live", "pilot", "is_held"),
    [(0, 0, 10, False), (9, 0, 1, False), (10, 0, 0, True), (12, 2, 0, True), (12, 3, 1, False)],
)
def test_ten_jobs_follow_before_one_has_shown_its_memory(
    config: Config, open_jobs: int, live: int, pilot: int, is_held: bool
) -> None:
    request = JobRequest(gpu_count=4, constraints="gpu&hbm80g", job_name="train", user="ann")
    evidence = dataclasses.replace(evidence_of([20000.0] * 9), open_jobs=open_jobs, live_mib=(19000.0,) * live)
    advice = decide_memory(request, evidence, calibrated(evidence, 2.0), config)
    assert (advice.tier.pilot, advice.tier.is_held) == (pilot, is_held)
    small = dataclasses.replace(evidence_of([9000.0] * 9), open_jobs=99)
    assert decide_memory(request, small, calibrated(small, 2.0), config).tier.pilot is None, "four times as much fits"
    fits = decide_memory(
        dataclasses.replace(request, constraints="hbm40g"), evidence, calibrated(evidence, 2.0), config
    )
    assert not fits.tier.is_held, "it asks for that tier anyway"


def test_a_running_job_above_the_bound_withdraws_the_advice(config: Config) -> None:
    evidence = evidence_of([20000.0] * 9)
    bound = bound_of(evidence, calibrated(evidence, 2.0), CONFIG).bound
    assert bound.bound_mib is not None
    for live_mib, is_stated in ((bound.bound_mib - 1, True), (bound.bound_mib + 1, False)):
        live = dataclasses.replace(evidence, live_mib=(live_mib,))
        assert (bound_of(live, calibrated(live, 2.0), CONFIG).bound is not None) == is_stated
