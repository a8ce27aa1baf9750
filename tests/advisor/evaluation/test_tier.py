"""The back-test of the tier: what is counted, by hand."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from advisor.evaluation.tier import DOWN, KEPT, SILENT, UP, rate_of, replay_tiers, score_group, score_tiers
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
    scores = score_group(
        "all",
        outcomes(
            {},
            {"need_mib": 35000.0},
            {"need_mib": 45000.0},
            {"move": UP, "advised": "hbm80g", "asked": "hbm40g", "bound_mib": 60000.0},
            {"move": KEPT, "advised": "hbm80g", "bound_mib": 60000.0},
            {"move": SILENT, "advised": None, "bound_mib": math.nan},
        ),
    )
    assert (scores.jobs, scores.advised, scores.moved_down, scores.moved_up) == (6, 5, 3, 1)
    assert (scores.exceeded_bound.jobs, scores.exceeded_bound.share) == (5, 0.4)
    assert (scores.exceeded_tier.jobs, scores.exceeded_tier.share) == (5, 0.2)
    assert scores.freed_gpu_hours == 8.0  # the one that needed 45,000 MiB would not have fitted


def test_an_array_counts_once_in_the_rates() -> None:
    task = {"is_first": False, "need_mib": 45000.0}
    assert score_group("all", outcomes({}, task, task)).exceeded_bound.jobs == 1


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
