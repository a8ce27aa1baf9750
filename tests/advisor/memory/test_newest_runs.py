"""The newest runs decide the tier, and all of them the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.duration.features import submission_of
from advisor.memory.peak_store import remember_peaks
from almanac.config import Config
from almanac.records import JobRequest

NOW_S = 1_750_000_000
SMALL = {"hbm_capacity_mib": 40960.0, "tier": "hbm40g"}


@pytest.mark.parametrize(
    ("high", "seen_mib"),
    [({"hbm_peak_mib": 60000.0, "is_flat": False}, 61200.0), ({**SMALL, "hbm_peak_mib": 40900.0}, math.inf)],
)
def test_a_tier_goes_by_the_newest_runs_and_a_bound_by_all(
    history_of: Callable[[list[dict[str, Any]]], pd.DataFrame], config: Config, high: dict[str, Any], seen_mib: float
) -> None:
    """At a risk of 1% by 50 runs: after so many that fit, one that needs more is rarer than that."""
    for later, is_recent in ((49, True), (50, False)):
        store = remember_peaks(["ann"], history_of([high, *[{}] * later]), NOW_S, config.advice, config.tiers)
        job = submission_of(JobRequest(user="ann", job_name="train-9", gpu_count=4, submit_s=NOW_S), config.tiers)
        evidence = store.evidence(job, NOW_S)
        assert evidence.runs == 50
        assert evidence.seen_mib == pytest.approx(seen_mib)
        assert (evidence.censored_mib is not None or evidence.least_mib == pytest.approx(61200)) == is_recent
        assert evidence.supports_bound == (seen_mib < math.inf)
