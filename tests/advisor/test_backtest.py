"""The frame of the back-tests: methods on the same units of the same weeks, and the intervals of almanac's gains."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from advisor.backtest import Interval, MethodComparison, bootstrap_mean, compare_methods
from advisor.memory.backtest import DOWN, KEPT, compare_freed
from almanac.units import DAY_S


def compared(ours: list[float], other: list[float], days: float = 1.0) -> MethodComparison:
    measured = {"plain": np.array(other), "ours": np.array(ours), "random": np.full(len(ours), 0.0)}
    at_s = np.arange(len(ours)) * days * DAY_S
    return compare_methods("points", "ours", measured, at_s, ("random",))


def test_methods_stand_beside_each_other_on_the_same_days() -> None:
    found = compared([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    assert [(each.method, each.role) for each in found.methods] == [
        ("plain", "baseline"), ("ours", "almanac"), ("random", "control"),
    ]  # fmt: skip
    assert [each.gain for each in found.methods] == [Interval(2, 2, 2), None, Interval(4, 3, 5)]
    assert found.methods[1].value == Interval(4, 3, 5)
    assert (found.units, found.blocks, found.block) == (3, 3, "days")


def test_long_spans_are_drawn_by_the_week_and_incomplete_units_are_left_out() -> None:
    found = compared([1.0] * 29, [0.0, math.nan, *[0.0] * 27])
    assert (found.units, found.blocks, found.block) == (28, 5, "weeks")
    assert compared([], []).units == 0


def test_memory_advice_frees_what_fits_and_loses_what_does_not() -> None:
    outcomes = pd.DataFrame({
        "move": [DOWN, DOWN, KEPT, DOWN], "asked": "a", "gpu_hours": [4.0, 2.0, 8.0, 1.0], "usable_mib": 30.0,
        "need_mib": [20.0, 40.0, 20.0, math.nan], "submit_s": [0, DAY_S, 2 * DAY_S, 3 * DAY_S],
    })  # fmt: skip
    means = {each.method: each.value.mean for each in compare_freed(outcomes).methods}
    assert means["almanac"] == pytest.approx(2 / 3) and means["as asked"] == 0, "the last need is unknown"


def test_the_bootstrap_draws_whole_users() -> None:
    """Two users of equal values: draws are 0, 5, or 10. Single jobs would give a narrow interval."""
    values, blocks = np.repeat([0.0, 10.0], 500), np.repeat([0, 1], 500)
    assert bootstrap_mean(values, blocks, 1) == Interval(5, 0, 10)
    assert bootstrap_mean(values, blocks, 1) == bootstrap_mean(values, blocks, 1)
    one = bootstrap_mean(values, np.zeros(1000, dtype="int64"), 1)
    assert one.mean == 5
    assert math.isnan(one.low)
    assert math.isnan(bootstrap_mean(np.array([]), np.array([], dtype="int64"), 1).mean)


def test_the_interval_covers_the_mean_of_new_users_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    blocks = np.repeat(np.arange(60), 20)
    covered = 0
    for seed in range(200):
        values = np.repeat(rng.normal(0, 1, 60), 20) + rng.normal(0, 1, 1200)
        interval = bootstrap_mean(values, blocks, seed)
        covered += interval.low <= 0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99
