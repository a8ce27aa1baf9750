"""The back-test of the tier: what is counted, by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pandas as pd
import pytest

from advisor.backtest import rate_of
from advisor.memory.backtest import DOWN, KEPT, SILENT, UP, replay_tiers, score_group, score_tiers
from advisor.memory.decide import calibrate
from almanac.config import Config

USABLE = {"hbm40g": 39936.0, "hbm80g": 80896.0}


def outcomes(*rows: dict[str, Any]) -> pd.DataFrame:
    default = {
        "user": "ann", "submit_s": 1_740_960_000, "is_first": True, "scope": "family", "asked": "hbm80g",
        "advised": "hbm40g", "move": DOWN, "bound_mib": 30000.0, "need_mib": 20000.0, "is_known": True,
        "gpu_hours": 4.0,
    }  # fmt: skip
    frame = pd.DataFrame([{**default, "row": number, **row} for number, row in enumerate(rows)])
    frame["usable_mib"] = frame["advised"].map(USABLE)
    return frame


def test_what_is_counted() -> None:
    frame = outcomes(
        {}, {"need_mib": 35000.0}, {"need_mib": 45000.0},
        {"move": UP, "advised": "hbm80g", "asked": "hbm40g", "bound_mib": 60000.0},
        {"move": KEPT, "advised": "hbm80g", "bound_mib": 60000.0},
        {"move": SILENT, "advised": None, "bound_mib": math.nan},
    )  # fmt: skip
    scores = score_group("all", frame)
    assert (scores.jobs, scores.advised, scores.moved_down, scores.moved_up) == (6, 5, 3, 1)
    assert (scores.exceeded_bound.jobs, scores.exceeded_bound.share) == (5, 0.4)
    assert (scores.exceeded_tier.jobs, scores.exceeded_tier.share) == (5, 0.2)
    assert scores.freed_gpu_hours == 8.0  # the one that needed 45,000 MiB would not have fitted
    task = {"is_first": False, "need_mib": 45000.0}
    assert score_group("all", outcomes({}, task, task)).exceeded_bound.jobs == 1, "an array counts once"


def test_a_failed_run_is_judged_only_where_its_peak_is_above() -> None:
    scores = score_group("all", outcomes({}, {"is_known": False}, {"is_known": False, "need_mib": 31000.0}))
    assert (scores.exceeded_bound.jobs, scores.exceeded_bound.share) == (2, 0.5)
    assert scores.exceeded_tier.jobs == 1


def test_the_interval_is_over_users_and_never_empty() -> None:
    users = pd.Series(["a"] * 50 + ["b"] * 50)
    one_user = rate_of(pd.Series([True] * 10 + [False] * 90), users)
    spread = rate_of(pd.Series([True] * 5 + [False] * 45 + [True] * 5 + [False] * 45), users)
    assert one_user.share == spread.share == 0.1
    assert (one_user.low, one_user.high) == (0.0, 0.2)
    assert (spread.low, spread.high) == (0.1, 0.1)
    none = rate_of(pd.Series([False] * 100), users)
    assert none.high == pytest.approx(1 - 0.025**0.01)
    assert math.isnan(rate_of(pd.Series([], dtype=bool), pd.Series([], dtype=object)).share)


@pytest.mark.parametrize("risk", [0.01, 0.05])
def test_the_measured_risk_is_that_of_the_back_test(site_history: pd.DataFrame, config: Config, risk: float) -> None:
    config = dataclasses.replace(config, advice=dataclasses.replace(config.advice, risk=risk))
    history = site_history.copy()
    history.loc[history.index[-300::3], "hbm_peak_mib"] = 70_000.0
    calibration = calibrate(history, config.advice, config.tiers)
    rows = replay_tiers(history, config)
    recent = rows[rows["submit_s"] >= rows["submit_s"].max() - 90 * 86_400]
    measured, expected = calibration.measured, score_group("90 days", recent).exceeded_tier
    assert measured is not None and measured.share > 0
    assert measured.jobs == expected.jobs and measured.share == pytest.approx(expected.share)
    assert measured.low <= measured.share <= measured.high
    said = calibration.told_risk(risk)
    assert said.startswith(f"set {risk:.0%}, measured {100 * measured.share:.2g}% over the last 90 days [")
    assert calibration.told_risk(0.2) == f"set 20%, trained at {risk:.0%}"


def test_groups_add_up(site_history: pd.DataFrame, config: Config) -> None:
    scores = score_tiers(replay_tiers(site_history, config))
    total, rest = scores[0], scores[1:]
    for prefix in ("evidence: ", "users with", "20"):
        parts = [score for score in rest if score.group.startswith(prefix)]
        assert sum(score.jobs for score in parts) == total.jobs == len(site_history)
        assert sum(score.advised for score in parts) == total.advised


def test_the_tier_on_record_is_the_one_that_was_asked_for(site_history: pd.DataFrame, config: Config) -> None:
    history = site_history.assign(constraints="", tier="hbm40g")
    assert set(replay_tiers(history, config)["asked"]) == {"hbm40g"}
