"""From past runs on whole GPUs, and on slices, to a slice and the sentence that says what it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from advisor.explain import explain, short_text, to_json
from advisor.memory.backtest import replay_tiers
from advisor.memory.calibration import Calibration, Margins
from advisor.service import Trained, advise, train
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.records import Advice, JobRequest

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
CONFIG = parse_config(
    {
        "tiers": [
            {"name": name, "capacity_mib": mib, "gpu_model": "A100-80", "gres": name}
            for name, mib in (("1g.10gb", 10240), ("2g.20gb", 20480), ("3g.40gb", 40960), ("a100", 81920))
        ]
    }
)
SMALL = {
    "gpu_count": 1, "constraints": "", "tier": "a100", "hbm_peak_mib": 6000.0, "gpu_model": "A100-80",
    "mean_sm_active_frac": 0.06, "mean_dram_active_frac": 0.04, "mean_gr_engine_active_frac": 0.5,
    "mean_gpu_util_pct": 60.0, "has_profiling_fault": False,
}  # fmt: skip


@pytest.fixture
def trained(history_of: History) -> Trained:
    """Margins of evidence of 5 to 7 runs, as a long record would give them."""
    margins = {f"family/{waiting}/{trend}/*/0": Margins(3.0, 3.0) for waiting in range(3) for trend in range(3)}
    nothing = train(history_of([SMALL]).head(0), Config(), 0)
    return dataclasses.replace(nothing, calibration=Calibration(0.01, margins))


def asked(**more: Any) -> JobRequest:
    return JobRequest("ann", job_name="train-9", gpu_count=1, gpu_options=(("--gpus", "1"),), submit_s=NOW_S, **more)


def told(history: pd.DataFrame, trained: Trained, request: JobRequest | None = None, config: Config = CONFIG) -> Advice:
    return advise(request or asked(), history, trained, config, NOW_S)


def test_a_quiet_family_gets_the_smallest_slice(history_of: History, trained: Trained) -> None:
    advice = told(history_of([SMALL] * 6), trained)
    assert advice.tier.tier == "1g.10gb"
    assert advice.tier.rewrite == "--gpus=1g.10gb:1"
    assert short_text(advice).endswith("; it runs about 1.2 times as long as on a whole GPU.")
    shown = explain(advice).split("\n")
    assert shown[0].startswith('almanac: ask for 1g.10gb (--gpus "1g.10gb:1"), which may shorten')
    assert max(map(len, shown)) <= 80
    assert to_json(advice)["tier"]["slow_down"] == pytest.approx(1.17, abs=0.06)  # type: ignore[index]


def test_a_busy_family_gets_no_seventh_of_the_compute(history_of: History, trained: Trained) -> None:
    for sm, tier in ((0.9, "a100"), (0.6, "a100"), (0.5, "3g.40gb"), (0.3, "2g.20gb"), (0.1, "1g.10gb")):
        busy = {**SMALL, "mean_sm_active_frac": sm, "mean_gr_engine_active_frac": 1.0}
        advice = told(history_of([busy] * 6), trained)
        assert (sm, advice.tier.tier) == (sm, tier)
        if tier == "a100":
            assert "no smaller MIG slice: on 3g.40gb such jobs would run about" in explain(advice)


@pytest.mark.parametrize(
    "hole",
    [{"mean_sm_active_frac": math.nan}, {"mean_dram_active_frac": math.nan}, {"has_profiling_fault": True},
     {"mean_sm_active_frac": 0.0, "mean_dram_active_frac": 0.0}, {"gpu_model": "H100-80"},
     {"gpu_model": None, "tier": None, "gpu_type": "a30"}, {"state": "FAILED"}, {"verdict": "low coverage"}],
    ids=str,
)  # fmt: skip
def test_without_known_activity_no_slice_is_advised_and_this_is_said(
    history_of: History, trained: Trained, hole: dict[str, Any]
) -> None:
    known, unknown = [SMALL] * 2, [{**SMALL, **hole}] * 4
    advice = told(history_of([*unknown, *known]), trained)
    assert advice.tier.tier in (None, "a100")
    if advice.tier.tier:
        assert "no smaller MIG slice: too few past runs on such GPUs have SM_ACTIVE" in explain(advice)


def test_histories_without_these_columns_and_other_jobs_get_whole_gpus(history_of: History, trained: Trained) -> None:
    bare = history_of([SMALL] * 6).drop(columns=["mean_sm_active_frac", "has_profiling_fault"])
    assert told(bare, trained).tier.tier == "a100"
    assert told(history_of([SMALL] * 6), trained, asked(may_use_more=True)).tier.tier == "a100"
    four = [{**SMALL, "gpu_count": 4}] * 6
    request = dataclasses.replace(asked(), gpu_count=4, gpu_options=(("--gpus", "4"),))
    assert told(history_of(four), trained, request).tier.tier == "a100"


def test_runs_on_a_slice_count_as_its_share(history_of: History, trained: Trained) -> None:
    on_slice = {**SMALL, "gpu_type": "2g.20gb", "tier": "2g.20gb", "hbm_capacity_mib": 19968.0}
    half_used = {**on_slice, "mean_sm_active_frac": 0.4, "mean_gr_engine_active_frac": 1.0}  # 0.10 of the whole
    advice = told(history_of([half_used] * 6), trained, asked(gpu_type="2g.20gb", gres="gpu:2g.20gb:1"))
    assert (advice.tier.tier, advice.tier.slow_down) == ("1g.10gb", pytest.approx(1.2, abs=0.05))
    full = {**on_slice, "mean_sm_active_frac": 0.97, "mean_gr_engine_active_frac": 1.0}
    kept = told(history_of([full] * 6), trained, asked(gpu_type="2g.20gb", gres="gpu:2g.20gb:1"))
    assert (kept.tier.tier, kept.tier.reason, kept.tier.slow_down) == ("2g.20gb", "fits", None)


def test_a_measured_capacity_below_the_published_one_counts(history_of: History, trained: Trained) -> None:
    on_slice = {**SMALL, "gpu_type": "1g.10gb", "tier": "1g.10gb", "hbm_capacity_mib": 9728.0}
    peaks = [{**on_slice, "hbm_peak_mib": 7400.0 - 20 * number} for number in range(6)]
    roomy = history_of(peaks)
    asks = asked(gpu_type="1g.10gb", gres="gpu:1g.10gb:1")
    assert told(roomy, trained, asks).tier.tier == "1g.10gb"
    tight = history_of([{**each, "hbm_capacity_mib": 8704.0} for each in peaks])
    assert told(tight, trained, asks).tier.tier == "2g.20gb"


def test_the_backtest_knows_slices(history_of: History) -> None:
    outcomes = replay_tiers(history_of([SMALL] * 40), CONFIG)
    assert set(outcomes["asked"]) == {"a100"}
    assert len(outcomes) == 40
