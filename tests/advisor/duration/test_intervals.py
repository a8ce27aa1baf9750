"""Intervals around predicted durations: what they hold, and which of them people are told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.features import CATEGORIES, NUMBERS, Features
from advisor.duration.intervals import conformal_margins
from advisor.evaluation.durations import evaluate
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats
from advisor.explain import explain
from advisor.service import advise
from almanac.config import Config
from almanac.records import Duration, Request

NOW_S = 1_750_000_000
DAY_S = 86_400
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def ended(duration_s: Floats, submit_s: list[int], end_s: float = 1000.0 * DAY_S) -> DurationReplay:
    """Jobs of one user of whom nothing else is known; all end at once, unless end_s is NaN."""
    features = Features(
        np.full((len(submit_s), len(NUMBERS)), np.nan), np.full((len(submit_s), len(CATEGORIES)), "u", dtype=object)
    )
    times_s = np.array(submit_s, dtype="int64")
    ends_s = times_s + duration_s if math.isnan(end_s) else np.full(len(times_s), end_s)
    return DurationReplay(features, np.full(len(times_s), np.nan), duration_s, times_s, ends_s, np.arange(len(times_s)))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60), st.sampled_from([0.5, 0.8, 0.9]))
def test_of_jobs_that_end_at_once_an_interval_ends_at_the_conformal_rank(
    residuals: list[float], coverage: float
) -> None:
    past = ended(1000 * np.exp(residuals), [DAY_S * place for place in range(len(residuals))])
    low, high = conformal_margins(np.full(len(past), 1000.0), past, coverage)[""]
    place = min(math.ceil((len(residuals) + 1) * (1 + coverage) / 2 - 1e-9), len(residuals))
    ordered = sorted(residuals)
    assert (low, high) == (pytest.approx(min(ordered[-place], 0)), pytest.approx(max(ordered[place - 1], 0)))


def test_one_burst_of_odd_jobs_does_not_widen_the_intervals_of_all() -> None:
    """A third of the jobs took a hundred times as long, but they are one submission of a hundred others."""
    usual = np.random.default_rng(1).normal(0, 0.3, 100)
    residuals = np.concatenate([usual, np.full(50, math.log(100))])
    submit_s = [DAY_S * place for place in range(100)] + [DAY_S * 200 + place for place in range(50)]
    _, high = conformal_margins(np.full(150, 1000.0), ended(1000 * np.exp(residuals), submit_s), 0.8)[""]
    assert 0.2 < high < 1.0
    apart = [DAY_S * place for place in range(150)]
    _, high = conformal_margins(np.full(150, 1000.0), ended(1000 * np.exp(residuals), apart), 0.8)[""]
    assert high == pytest.approx(math.log(100))


def test_the_newest_days_count_more_and_the_older_ones_are_not_forgotten() -> None:
    """For 90 days jobs took half to twice as long as said; in the last 3 days, up to ten times as long."""
    old, new = np.linspace(-math.log(2), math.log(2), 900), np.linspace(0, math.log(10), 30)
    submit_s = [place * DAY_S // 10 for place in range(930)]
    past = ended(1000 * np.exp(np.concatenate([old, new])), submit_s, math.nan)
    _, high = conformal_margins(np.full(930, 1000.0), past, 0.8)[""]
    assert math.log(3) < high < math.log(10), "of 930 alike, the tenth from above is below twice"
    calm = ended(1000 * np.exp(np.concatenate([old, np.zeros(30)])), submit_s, math.nan)
    _, high = conformal_margins(np.full(930, 1000.0), calm, 0.8)[""]
    assert 0.3 < high < math.log(2), "three calm days do not close the interval"


@pytest.mark.parametrize(
    ("low_s", "high_s", "told"),
    [
        (600.0, 7200.0, ", usually 10 min to 2 h ("),
        (60.0, 1800.0, ", usually 1 min to 30 min ("),
        (60.0, 1860.0, ", too irregular for a range ("),
        (None, None, "predicted time: 10 min ("),
    ],
)
def test_an_interval_wider_than_30_times_is_not_told(
    low_s: float | None, high_s: float | None, told: str, history_of: History, config: Config
) -> None:
    request = Request(user="ann", job_name="train-1", gpu_count=1)
    duration = Duration(600.0, 600.0, 600.0, 600.0, "name", 5, low_s, high_s)
    advice = dataclasses.replace(advise(request, history_of([{}]), None, config, NOW_S), duration=duration)
    assert told in " ".join(explain(advice).split())


def test_an_evaluation_says_what_held_at_each_time(site_history: pd.DataFrame, config: Config) -> None:
    weekly = dataclasses.replace(config, training=dataclasses.replace(config.training, retrain_hours=168))
    result = evaluate(site_history, weekly)
    assert result.coverage is not None and result.told is not None
    assert len(result.coverage_by_quarter) == 4
    assert np.mean(result.coverage_by_quarter) == pytest.approx(result.coverage, abs=0.01)
    assert 0.5 < result.told <= 1.0, "its families are regular"
