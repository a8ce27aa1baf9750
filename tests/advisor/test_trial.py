"""The engine of `almanac trial`: gains by week, their interval, and the verdict."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.trial import (
    DO_NOT,
    NO_DATA,
    SWITCH_ON,
    WEEK_S,
    Affected,
    Losers,
    TooShortError,
    TrialResult,
    TrialSpan,
    WeeklyGains,
    gains_by_week,
    judge,
    lacking,
    losers_of,
    mean_gain,
    size_classes,
    trial_span,
    with_users,
)
from almanac.config import TrialRules
from almanac.units import DAY_S

RULES = TrialRules()
HOURS = np.arange(0, 4 * WEEK_S, 3600.0)
FOUR_WEEKS = TrialSpan(0, 4 * WEEK_S)


def gained(ours: np.ndarray, times_s: np.ndarray = HOURS, control: float = 1.0, is_cost: bool = False) -> WeeklyGains:
    measured = {"ours": ours, "site": np.zeros(len(ours)), "control": np.full(len(ours), control)}
    return gains_by_week("points", "ours", "site", measured, times_s, FOUR_WEEKS, RULES, is_cost=is_cost)


def answer(gains: WeeklyGains, share: float = 0.0) -> str:
    return judge(TrialResult("priority", gains, Losers(share)), RULES).answer


@given(st.floats(1e-3, 1e6), st.integers(3, 12))
def test_a_constant_gain_is_switched_on_and_none_is_not(value: float, weeks: int) -> None:
    span = TrialSpan(0, weeks * WEEK_S)
    times_s = np.arange(0, weeks * WEEK_S, DAY_S, dtype="float64")
    for each, expected in ((value, SWITCH_ON), (0.0, DO_NOT), (-value, DO_NOT)):
        measured = {name: np.full(len(times_s), number) for name, number in (("a", each), ("b", 0.0), ("c", 0.0))}
        assert answer(gains_by_week("points", "a", "b", measured, times_s, span, RULES)) == expected
        less = gains_by_week("points", "a", "b", {**measured, "a": -measured["a"]}, times_s, span, RULES, is_cost=True)
        assert answer(less) == expected, "a cost is better if it is less"


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_interval_holds_the_mean_and_orders_with_the_sign(weekly: list[float]) -> None:
    values = np.array(weekly)
    found, other = mean_gain("x", values, 1.0, 0.95), mean_gain("x", -values, 1.0, 0.95)
    assert found.low <= found.mean <= found.high
    assert (other.low, other.high) == pytest.approx((-found.high, -found.low))


def test_a_gain_over_the_site_alone_is_not_enough() -> None:
    gains = gained(np.full(len(HOURS), 0.5))
    assert gains.site.low > 0 > gains.best_control.high
    verdict = judge(TrialResult("power", gains), RULES)
    assert (verdict.answer, verdict.reason) == (DO_NOT, "loses to control")


def test_one_good_week_of_four_is_not_switched_on() -> None:
    assert answer(gained(np.where(HOURS < WEEK_S, 40.0, 1.0))) == DO_NOT


def test_the_site_limits_how_many_users_are_worse_off() -> None:
    gains = gained(np.full(len(HOURS), 3.0))
    assert [answer(gains, share) for share in (0.0, 0.25, 0.26, math.nan)] == [SWITCH_ON, SWITCH_ON, DO_NOT, DO_NOT]
    strict = dataclasses.replace(RULES, worse_users=0.0)
    assert judge(TrialResult("x", gains, Losers(0.01)), strict).answer == DO_NOT


def test_a_week_without_data_is_left_out_and_is_not_zero() -> None:
    is_there = (HOURS < WEEK_S) | (HOURS >= 2 * WEEK_S)
    gains = gained(np.full(int(is_there.sum()), 3.0), HOURS[is_there])
    assert (gains.starts_s, gains.lost_weeks) == ((0, 2 * WEEK_S, 3 * WEEK_S), 1)
    assert gains.site.by_week == (3.0, 3.0, 3.0)
    known = gained(np.where(is_there, 3.0, math.nan))
    assert known.site == gains.site, "an unknown value is like no unit"


def test_a_week_counts_with_data_on_most_of_its_days() -> None:
    for days, weeks in ((3, 3), (4, 4)):
        is_there = (HOURS >= WEEK_S) | (days * DAY_S > HOURS)
        assert len(gained(np.full(int(is_there.sum()), 3.0), HOURS[is_there]).starts_s) == weeks


def test_too_few_weeks_say_how_many_days_are_needed() -> None:
    for weeks, days in ((1, 14), (2, 7), (0, 21)):
        is_there = weeks * WEEK_S > HOURS
        with pytest.raises(TooShortError) as raised:
            gained(np.full(int(is_there.sum()), 3.0), HOURS[is_there])
        verdict = judge(lacking("priority", raised.value), RULES)
        assert (verdict.answer, verdict.needed_days) == (NO_DATA, days)


@pytest.mark.parametrize(
    ("days", "needed", "weeks"),
    [(0, 35, 0), (-5, 35, 0), (7, 28, 0), (34.5, 1, 0), (35, 0, 3), (56, 0, 4), (400, 0, 28)],
)
def test_the_span_leaves_time_to_learn_from(days: float, needed: int, weeks: int) -> None:
    try:
        span = trial_span(1e9, 1e9 + days * DAY_S, RULES)
    except TooShortError as error:
        assert error.days == needed
        return
    assert (needed, span.weeks, span.end_s) == (0, weeks, round(1e9 + days * DAY_S))
    assert span.start_s >= 1e9 + RULES.train_days * DAY_S


def test_weeks_that_are_not_numbers_and_trials_without_a_control_are_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not zero"):
            mean_gain("x", np.array([1.0, bad]), 1.0, 0.95)
    values = {"ours": HOURS, "site": HOURS}
    with pytest.raises(ValueError, match="needs a control"):
        gains_by_week("points", "ours", "site", values, HOURS, FOUR_WEEKS, RULES)


def test_users_and_sizes_that_lose_on_average_are_counted_once_each() -> None:
    users = np.array(["a", "a", "b", "b", "", "c", "d"], dtype=object)
    gain = np.array([5.0, -1.0, -3.0, 1.0, -9.0, math.nan, -0.5])
    sizes = size_classes([1, 2, 7, 8, 9, 1, math.nan])
    assert sizes.tolist() == ["1 GPU", "2 to 7 GPUs", "2 to 7 GPUs", "8 GPUs", "more than 8 GPUs", "1 GPU", ""]
    losers = losers_of(gain, users, sizes, "GPU-h")
    assert (losers.share, losers.how_much) == (2 / 3, "0.75 GPU-h")
    assert losers.by_user == (Affected("b", 2, -1.0, True), Affected("d", 1, -0.5, True), Affected("a", 2, 2.0, False))
    assert [(each.name, each.gain) for each in losers.by_size] == [
        ("more than 8 GPUs", -9.0), ("2 to 7 GPUs", -2.0), ("8 GPUs", 1.0), ("1 GPU", 5.0),
    ]  # fmt: skip
    mild = losers_of(gain, users, sizes, "h", np.full(7, 0.75))
    assert (mild.share, mild.how_much) == (1 / 3, "1 h")
    assert losers_of(gain[4:5], users[4:5], sizes[4:5], "h").share == 0.0, "nobody is known"
    result = with_users(TrialResult("x", losers=losers), lambda name: f"user-{name}")
    assert [each.name for each in result.losers.by_user] == ["user-b", "user-d", "user-a"]


def test_the_interval_is_students_of_both_sides() -> None:
    """By hand, of 1, 2, 3: t(0.975, 2) = 4.303, times the standard error 1 / sqrt(3)."""
    gain = mean_gain("x", np.array([1.0, 2.0, 3.0]), 4.0, 0.95)
    assert (gain.mean, gain.share) == (2.0, 0.5)
    assert (gain.low, gain.high) == pytest.approx((-0.484, 4.484), abs=1e-3)
