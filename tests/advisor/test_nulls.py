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

from advisor.duration.features import submission_of
from advisor.memory.calibration import Calibration
from advisor.memory.decide import calibrate, decide_memory
from advisor.memory.peak_store import remember_peaks
from advisor.memory.restart import RestartJob, next_type, why_never
from advisor.memory.runs import SHARED, runs_of
from advisor.mig.compute_need import activity_of, slow_down
from advisor.mig.decide import PendingSlice, decide_raises
from advisor.packing.evidence import packing_families
from advisor.power.decide import (
    DemandView,
    ForecastController,
    ForecastSettings,
    NodeFlag,
    PowerLimits,
    PowerNode,
    select_nodes,
)
from advisor.power.replay import KeepWarm
from advisor.priority import Overrun, decide_priority
from advisor.types.decide import GpuTypeRules, TypeRunTime, TypeWait, decide_type
from almanac.config import Config
from almanac.hardware import gpu_models, mig_models, shares_host_memory
from almanac.records import JobRequest
from almanac.submit_config import Priority
from almanac.tiers import SliceShare
from slurm.releases import release_of
from slurm_hooks.mig.planning import smallest_shape
from telemetry.metrics.data_quality import is_reserved_share

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
    request = JobRequest(user="ann", job_name="train-9", gpu_count=4, submit_s=NOW_S, constraints="gpu&hbm80g")
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


LABELS = [
    *gpu_models(),
    *(label for model in gpu_models().values() for label in model.labels),
    "NVIDIA Rubin",
    "",
    None,
]


@given(label=st.sampled_from(LABELS), peaks=st.lists(st.floats(1000, 81000), min_size=3, max_size=20))
def test_memory_advice_never_asks_for_less_than_was_used_on_any_model(
    label: str | None, peaks: list[float], history_of: History, calibration: Calibration, config: Config
) -> None:
    rows: list[dict[str, Any]] = [{"hbm_peak_mib": peak, "gpu_model": label} for peak in peaks]
    sizes = {tier.name: tier.capacity_mib for tier in config.tiers}
    tier = advised(history_of(rows), calibration, config)
    assert tier is None or sizes[tier] >= max(peaks)
    assert tier is None or not shares_host_memory(label)


@pytest.mark.parametrize("label", ["A100-80", "NVIDIA Rubin", "", None])
def test_an_unlisted_model_gets_the_advice_of_a_listed_one(
    label: str | None, history_of: History, calibration: Calibration, config: Config
) -> None:
    assert advised(history_of([{"gpu_model": label} for _ in range(12)]), calibration, config) == "hbm40g"


@pytest.mark.parametrize("label", [name for name, model in gpu_models().items() if model.shares_host_memory])
def test_memory_that_the_host_shares_gives_no_advice_and_says_why(
    label: str, history_of: History, calibration: Calibration, config: Config
) -> None:
    """Memory in use on a GH200 can be the host's, and more than the GPU's own."""
    history = history_of([{"gpu_model": label, "hbm_peak_mib": 90_000.0} for _ in range(12)])
    assert advised(history, calibration, config) is None
    assert {run.why_not for run in runs_of(history, config.advice, config.tiers)} == {SHARED}
    mixed = history_of([{} for _ in range(12)] + [{"gpu_model": label, "hbm_peak_mib": 60_000.0}])
    assert advised(mixed, calibration, config) != "hbm40g"


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
    """One run that reserves keeps its family from sharing, and so does one that may reserve."""
    use = {"mean_sm_active_frac": 0.2, "mean_dram_active_frac": 0.1, "gpu_model": "NVIDIA B300", "gpu_count": 1}
    use |= {"coverage_sm_active_frac": 1.0, "coverage_dram_active_frac": 1.0, "mean_gpu_util_pct": 60.0}
    for evidence in ("unclear", "none", None):
        rows = [{**use, "hbm_evidence": evidence}] * number + [use] * 6
        [family] = packing_families(history_of(rows), None, config, NOW_S)
        assert family.is_preallocated is None
    [family] = packing_families(history_of([use] * 6), None, config, NOW_S)
    assert (family.is_preallocated, family.gpu_model) == (False, "NVIDIA B300")


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


TIMES = {"run_s": 3600.0, "low_s": 3500.0, "high_s": 3700.0, "longest_s": 4000.0}
WAITS = {"wait_s": 600.0, "low_s": 500.0, "high_s": 700.0}
"""Of type a, which is free now and faster than b."""


@given(name=st.sampled_from([*TIMES, "gone"]), of_wait=st.sampled_from([*WAITS, "gone"]), limit_s=st.floats(60, 1e5))
def test_gpu_type(name: str, of_wait: str, limit_s: float) -> None:
    """A limit that is not known can be any, and a run time or wait of the type asked for the shortest."""

    def advised(a: dict[str, float] | None, wait: dict[str, float] | None, limit_s: float | None) -> str | None:
        slower = TypeRunTime("b", 3620.0, 3600.0, 3640.0, 4100.0, 9, "own runs")
        times = [slower, *([TypeRunTime("a", **a, runs=9, source="own runs")] if a else [])]
        waits = [TypeWait("b", 0.0, 0.0, 0.0, NOW_S), *([TypeWait("a", **wait, as_of_s=NOW_S)] if wait else [])]
        found = decide_type(times, waits, ["a"], GpuTypeRules(NOW_S, min_gain=0.05), limit_s)
        return found.best.gpu_type if found else None

    late = {each: 10 * value for each, value in WAITS.items()}
    assert advised(TIMES, late, math.inf) == advised(TIMES, late, 4100.0) == "b"
    assert advised(TIMES, late, math.nan) is None
    known = advised(TIMES, late, limit_s)
    assert advised({**TIMES, "longest_s": math.nan}, late, limit_s) == known  # a is not the type advised
    unknown = None if name == "gone" else {**TIMES, name: math.nan}
    assert advised(unknown, late, None) is None or name == "longest_s"
    assert advised(TIMES, None if of_wait == "gone" else {**late, of_wait: math.nan}, None) is None


@given(st.sampled_from(["idle_since_s", "flags"]), st.integers(0, 4), st.integers(0, 5))
def test_power(name: str, place: int, target: int) -> None:
    """A node of which something is not known stays on, and counts for nothing that lets another one go."""
    nodes = [PowerNode(f"n{number}", 0, NodeFlag(0), NOW_S - 10_000 - number) for number in range(5)]
    unknown = dataclasses.replace(nodes[place], **{name: None if name == "idle_since_s" else NodeFlag.UNKNOWN})
    after = [*nodes[:place], unknown, *nodes[place + 1 :]]
    plan, seen = (select_nodes(each, target, PowerLimits(), NOW_S) for each in (nodes, after))
    assert unknown.name not in seen.power_down and len(seen.power_down) <= len(plan.power_down)
    assert select_nodes(nodes, None, PowerLimits(), NOW_S).power_down == ()


@given(st.sampled_from(["active", "recent", "levels"]), st.booleans())
def test_a_target_without_demand_or_forecast_powers_nothing_down(name: str, is_stale: bool) -> None:
    view = DemandView(0, 20, 20, active=1.0, recent=1.0, levels={24: 2.0}, expected={18: 1.0})
    controllers = (ForecastController(ForecastSettings(24)), KeepWarm(1))
    assert all(controller.target(view) is not None for controller in controllers)
    view = view._replace(**{name: None}, is_stale=is_stale)
    assert controllers[0].target(view) is None
    assert controllers[1].target(view) is None or (name != "active" and not is_stale)


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_priority(known_s: float, other_s: float) -> None:
    """A job whose GPU-time is not known stands behind all that are known, never before."""
    priority, nobody = Priority(), Overrun()
    unknown = decide_priority(math.nan, math.nan, nobody, (), priority)
    assert unknown.site_factor <= decide_priority(known_s, other_s, nobody, (), priority).site_factor


@given(st.lists(st.sampled_from(["1g", "2g", ""]), max_size=5), st.sampled_from(["2g", "", "3g"]))
def test_a_slice_of_unknown_shape_is_neither_raised_nor_given(asked: list[str], idle: str) -> None:
    pending = [PendingSlice(number, shape) for number, shape in enumerate(asked)]
    for each in decide_raises(pending, {idle: 9}, ("1g", "2g")):
        assert (each.old, each.new) == ("1g", "2g") and idle == "2g" and "2g" not in asked


@pytest.mark.parametrize(
    "hole", [{"gpu_type": ""}, {"gpu_type": "nobody's"}, {"request": ""}, {"can_requeue": False}, {"is_own": False}]
)
def test_a_job_that_outgrows_its_gpu_stays_if_something_of_it_is_not_known(hole: dict[str, Any]) -> None:
    job = RestartJob(1, "a100", "gres", 0, can_requeue=True, is_own=True, appends_output=True)
    sizes, there = {"a100": 40_960, "h100": 81_920}, ("a100", "h100")
    assert next_type(job, sizes, there).gpu_type == "h100" and not why_never(job, release_of("24.11.5"), 3)
    unknown = dataclasses.replace(job, **hole)
    assert why_never(unknown, release_of("24.11.5"), 3) or not next_type(unknown, sizes, there).gpu_type
    assert why_never(job, None, 3) and not next_type(job, sizes, ()).gpu_type and not next_type(job, {}, there).gpu_type


@given(peak=st.floats(1, 2e5), capacity=st.sampled_from([math.nan, math.inf]))
def test_a_share_of_an_unknown_capacity_is_no_reservation(peak: float, capacity: float) -> None:
    """So callers must not take False for "not reserved" there."""
    assert not is_reserved_share(peak / capacity, capacity)
