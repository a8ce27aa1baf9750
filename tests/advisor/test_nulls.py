"""A dangerous value that is not known never makes a decision bolder than the value itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.decisions.memory import decide_memory
from advisor.decisions.packing import PackingFamily, PackingRules, decide_packing
from advisor.duration.features import submission_of
from advisor.memory.bound import calibrate
from advisor.memory.calibration import Calibration
from advisor.memory.peak_store import remember_peaks
from advisor.mig.compute_need import activity_of, slow_down
from advisor.packing.evidence import packing_families
from almanac.config import Config
from almanac.mig import mig_models
from almanac.records import Request
from almanac.slices import SliceShare
from slurm_hooks.mig.demand import smallest_shape
from telemetry.metrics.preallocation import is_reserved_share

NOW_S = 1_750_000_000
MIB_40, MIB_80 = 40960.0, 81920.0
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
SMALL: dict[str, Any] = {"tier": "hbm40g", "hbm_capacity_mib": MIB_40, "hbm_max_mib": 40900.0}
DANGERS = {
    "died of memory": {**SMALL, "hbm_peak_mib": 40900.0, "state": "FAILED"},
    "cut off": {**SMALL, "hbm_peak_mib": 40950.0, "hbm_max_mib": 40950.0},
    "needed more": {"hbm_peak_mib": 60000.0, "hbm_max_mib": 60000.0},
    "failed with more": {"hbm_peak_mib": 60000.0, "hbm_max_mib": 60000.0, "state": "FAILED"},
    "reserved": {"hbm_peak_mib": math.nan, "hbm_evidence": "preallocated", "hbm_max_mib": 0.75 * MIB_80},
}
NULLS: dict[str, Any] = {
    "hbm_peak_mib": math.nan, "hbm_capacity_mib": math.nan, "hbm_max_mib": math.nan, "tier": None, "state": None,
    "verdict": None, "hbm_evidence": None, "gpu_type": None, "constraints": None, "time_limit_s": math.nan,
}  # fmt: skip


@pytest.fixture(scope="module")
def calibration(site_history: pd.DataFrame, config: Config) -> Calibration:
    return calibrate(site_history, config.advice, config.tiers)


def advised(history: pd.DataFrame, calibration: Calibration, config: Config) -> str | None:
    request = Request(user="ann", job_name="train-9", gpu_count=4, submit_s=NOW_S, constraints="gpu&hbm80g")
    job = submission_of(request, config.tiers)
    evidence = remember_peaks(["ann"], history, NOW_S, config.advice, config.tiers).evidence(job, NOW_S)
    return decide_memory(request, evidence, calibration, config).tier.tier


@pytest.mark.parametrize("danger", list(DANGERS))
@given(data=st.data())
def test_memory(
    danger: str, data: st.DataObject, history_of: History, calibration: Calibration, config: Config
) -> None:
    plain = [{"hbm_peak_mib": 20000.0 + 10 * (number % 3)} for number in range(data.draw(st.integers(3, 30)))]
    place = data.draw(st.integers(0, len(plain)))
    names = data.draw(st.lists(st.sampled_from(sorted(NULLS)), min_size=1, max_size=2, unique=True))
    is_unclear = data.draw(st.booleans()) and danger == "reserved"
    known = [*plain[:place], DANGERS[danger], *plain[place:]]
    nulled = (
        DANGERS[danger] | {name: NULLS[name] for name in names} | ({"hbm_evidence": "unclear"} if is_unclear else {})
    )
    if {"hbm_peak_mib", "hbm_max_mib"} <= set(names) or (danger == "reserved" and "hbm_max_mib" in names):
        return  # of such a run nothing at all is known
    after = [*plain[:place], nulled, *plain[place:]]
    assert advised(history_of(plain), calibration, config) in ("hbm40g", None)
    if advised(history_of(known), calibration, config) != "hbm40g":
        assert advised(history_of(after), calibration, config) != "hbm40g"


def test_a_run_on_a_gpu_of_unknown_size_shows_a_least_need_only(
    history_of: History, calibration: Calibration, config: Config
) -> None:
    """A GPU of unknown size may have cut its peak off."""
    rows: list[dict[str, Any]] = [{} for _ in range(12)]
    assert advised(history_of(rows), calibration, config) == "hbm40g"
    unknown = [{"hbm_capacity_mib": math.nan, "tier": None} for _ in rows]
    assert advised(history_of(unknown), calibration, config) is None


@pytest.mark.parametrize("number", [1, 3])
def test_packing_evidence(number: int, history_of: History, config: Config) -> None:
    """One run that reserves keeps its family from sharing, also where it is not known to."""
    use = {"mean_sm_active_frac": 0.2, "mean_dram_active_frac": 0.1, "gpu_model": "NVIDIA B300", "gpu_count": 1}
    use |= {"coverage_sm_active_frac": 1.0, "coverage_dram_active_frac": 1.0, "mean_gpu_util_pct": 60.0}
    for evidence in ("unclear", "none", None):
        rows = [{**use, "hbm_evidence": evidence}] * number + [use] * 6
        [family] = packing_families(history_of(rows), None, config, NOW_S)
        assert family.is_preallocated is None
    [family] = packing_families(history_of([use] * 6), None, config, NOW_S)
    assert (family.is_preallocated, family.gpu_model) == (False, "NVIDIA B300")


def test_packing() -> None:
    rules = PackingRules()
    family = PackingFamily(
        "ann", "train", 1, sm=(0.2,) * 6, dram=(0.1,) * 6, coverage=1.0, bounds_mib={2: 9000.0},
        is_preallocated=False, gpu_model="NVIDIA B300", capacity_mib=MIB_80,
    )  # fmt: skip
    assert decide_packing((family, family), rules).is_advised
    nulls: dict[str, Any] = {
        "node_count": None, "coverage": math.nan, "bounds_mib": {}, "is_preallocated": None, "gpu_model": "",
        "capacity_mib": None, "sm": (math.nan,) * 6, "dram": (math.nan,) * 6,
    }  # fmt: skip
    for name, value in nulls.items():
        unknown = dataclasses.replace(family, **{name: value})
        assert not decide_packing((unknown, unknown), rules).is_advised, name


@given(sm=st.floats(0.01, 1), dram=st.floats(0, 1), busy=st.floats(0, 1))
def test_a_slice_promises_no_more_speed_where_the_busy_time_is_unknown(sm: float, dram: float, busy: float) -> None:
    known, unknown = (activity_of(sm, dram, each, "A100-80") for each in (busy, math.nan))
    share = SliceShare(1 / 7, 1 / 8)
    assert known is not None and unknown is not None
    assert slow_down(unknown, share) >= slow_down(known, share) - 1e-9
    assert activity_of(math.nan, dram, busy, "A100-80") is activity_of(sm, math.nan, busy, "A100-80") is None


@pytest.mark.parametrize("ran_on", ["whole", "2g", "7g"])
def test_a_slice_stays_what_it_was_where_memory_or_use_is_unknown(ran_on: str, config: Config) -> None:
    model, use = mig_models()["A100-80"], activity_of(0.1, 0.1, 0.5, "A100-80")
    assert smallest_shape(model, ran_on, None, use, config.advice) == ran_on
    assert smallest_shape(model, ran_on, math.nan, use, config.advice) == ran_on
    assert smallest_shape(model, ran_on, 1000.0, None, config.advice) == ran_on


@given(peak=st.floats(1, 2e5), capacity=st.sampled_from([math.nan, math.inf]))
def test_a_share_of_an_unknown_capacity_is_no_reservation(peak: float, capacity: float) -> None:
    """So callers must not take False for "not reserved" there."""
    assert not is_reserved_share(peak / capacity, capacity)
