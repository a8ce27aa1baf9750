"""The demand forecast: sees only the past, is repeatable, and is used only if it beats its baselines."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from advisor.power.forecast import (
    QUANTILES,
    STEP_MIN,
    Floats,
    Skill,
    expected_demand,
    features_of,
    fit_forecaster,
    load_holidays,
    pinball,
    rolling_forecasts,
    shuffled,
    skills_of,
    steps_of,
    volatility_of,
)  # fmt: skip
from telemetry.power.series import NodeSeries


def made(active: Floats) -> NodeSeries:
    known = ~np.isnan(active)
    return NodeSeries(np.datetime64("2026-01-05", "m"), active, np.full(len(active), 100.0), active * np.nan, known)


def daily(days: int, seed: int = 0) -> Floats:
    """Work by day, plus noise: easy to forecast."""
    minutes = np.arange(days * 1440)
    noise = np.random.default_rng(seed).normal(0, 1, len(minutes))
    return np.clip(np.round(50 + 30 * np.sin(minutes * 2 * np.pi / 1440) + noise), 0, 100)


def test_no_feature_and_no_forecast_sees_its_own_step_or_a_later_one() -> None:
    active = daily(12)
    changed = active.copy()
    step = 1500
    changed[step * STEP_MIN :] = 3.0
    before, after = steps_of(made(active)), steps_of(made(changed))
    seen, later = features_of(before), features_of(after)
    assert list(seen) == list(later)
    for name, values in seen.items():
        np.testing.assert_array_equal(values[: step + 1], later[name][: step + 1], name)
    one, other = (fit_forecaster(steps, 1000, 0).changes(steps) for steps in (before, after))
    for key in one:
        np.testing.assert_array_equal(one[key][: step + 1], other[key][: step + 1])


def announced(days: int) -> NodeSeries:
    """40 nodes that 30 more join at random for 4 hours; the queue holds their node-minutes for 3 hours before."""
    rng, active, queued = np.random.default_rng(2), np.full(days * 1440, 40.0), np.zeros(days * 1440)
    for begin in np.cumsum(rng.integers(500, 1500, days * 2)):
        active[begin + 180 : begin + 420] = 70.0
        queued[begin : begin + 180] = 30.0 * 240
    series = made(active[: days * 1440] + rng.integers(0, 3, days * 1440))
    return dataclasses.replace(series, queued=queued)


def test_the_queue_is_a_feature_of_a_series_that_has_it_and_of_no_other() -> None:
    series = announced(12)
    steps, without = steps_of(series), steps_of(dataclasses.replace(series, queued=None))
    assert set(features_of(steps)) - set(features_of(without)) == {"queued_node_h"}
    later = series.queued.copy()
    later[1500 * STEP_MIN :] = 5.0
    seen = features_of(steps_of(dataclasses.replace(series, queued=later)))["queued_node_h"]
    np.testing.assert_array_equal(seen[:1501], features_of(steps)["queued_node_h"][:1501])
    assert seen[1501] != features_of(steps)["queued_node_h"][1501]
    losses = []
    for one in (steps, without):
        skills = skills_of(one, [(1000, fit_forecaster(one, 1000, 0))], len(one), 0)
        losses.append(np.mean([skill.model for skill in skills]))
    assert losses[0] < 0.95 * losses[1], "the queue tells what comes"


def test_a_forecaster_of_a_queue_bears_a_series_without_one_and_the_other_way_round() -> None:
    series = announced(8)
    steps, without = steps_of(series), steps_of(dataclasses.replace(series, queued=None))
    unknown = steps_of(dataclasses.replace(series, queued=np.full(len(series), np.nan)))
    of_queue, of_none = (fit_forecaster(one, 1000, 0) for one in (steps, without))
    for key, values in of_queue.changes(without).items():
        np.testing.assert_array_equal(values, of_queue.changes(unknown)[key])
    for key, values in of_none.changes(steps).items():
        np.testing.assert_array_equal(values, of_none.changes(without)[key])


def test_training_sees_nothing_from_its_end_on() -> None:
    active = daily(12)
    changed = active.copy()
    changed[1000 * STEP_MIN :] = 3.0
    one, other = (expected_demand(steps_of(made(a)), 30, 1000, 0) for a in (active, changed))
    np.testing.assert_array_equal(one[:1001], other[:1001])
    assert fit_forecaster(steps_of(made(active)), 1000, 0) == fit_forecaster(steps_of(made(changed)), 1000, 0)


def swinging(days: int) -> Floats:
    """Busy every third hour, at random: what comes next follows from the hour before, not from the day before."""
    rng = np.random.default_rng(1)
    level, levels = 50.0, []
    for _ in range(days * 8):
        level += 0.7 * (50.0 - level) + rng.normal(0, 15)
        levels.append(level)
    return np.clip(np.round(np.repeat(levels, 180)), 0, 100)


def judged(active: Floats, first: int, end: int) -> list[Skill]:
    steps = steps_of(made(active))
    return skills_of(steps, [(first, fit_forecaster(steps, first, 0))], end, 0)


def test_the_model_is_used_where_it_beats_every_baseline() -> None:
    skills = judged(swinging(16), 1500, 2100)
    used = [skill for skill in skills if skill.is_model_used]
    assert len(used) >= 3
    assert all(s.model < min(s.persistence, s.seasonal, s.shuffled) for s in used)


def test_where_the_model_is_no_better_a_baseline_is_used() -> None:
    skills = judged(daily(14), 1200, 1700)
    lost = [skill for skill in skills if not skill.is_model_used]
    assert lost
    assert all(s.model >= min(s.persistence, s.seasonal, s.shuffled) for s in lost)
    assert "seasonal" in {skill.used for skill in lost}


def test_the_same_seed_gives_the_same_forecast_and_quantiles_do_not_cross() -> None:
    steps = steps_of(made(daily(12)))
    one, other = (fit_forecaster(steps, 1000, 3) for _ in range(2))
    assert one.fits == other.fits
    found = one.changes(steps)
    known = ~np.isnan(found[36, 0.5])
    assert all((found[36, high] >= found[36, low])[known].all() for low, high in itertools.pairwise(QUANTILES))


def test_a_missing_minute_leaves_no_forecast_for_an_hour() -> None:
    active = daily(12)
    active[1500 * STEP_MIN + 3] = np.nan
    steps = steps_of(made(active))
    found = fit_forecaster(steps, 1000, 0).changes(steps)[36, 0.8]
    assert np.isnan(found[1501:1507]).all()
    assert not np.isnan(found[[1500, 1507]]).any()


def test_too_short_a_record_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="432 needed"):
        fit_forecaster(steps_of(made(daily(4))), 300, 0)


def test_pinball_by_hand() -> None:
    actual, forecast = np.array([10.0, 0.0, np.nan]), np.array([6.0, 6.0, 6.0])
    assert pinball(actual, forecast, 0.9) == pytest.approx((0.9 * 4 + 0.1 * 6) / 2)


def test_shuffling_keeps_the_values_the_gaps_and_the_quantiles_of_a_time_together() -> None:
    values = np.array([1.0, np.nan, 2.0, 3.0, 4.0, 5.0])
    mixed = shuffled({(36, 0.5): values, (36, 0.8): values + 10}, 1)
    low = mixed[36, 0.5]
    assert np.isnan(low[1]) and sorted(low[~np.isnan(low)]) == [1, 2, 3, 4, 5]
    assert not np.array_equal(low, values, equal_nan=True)
    np.testing.assert_array_equal(mixed[36, 0.8], low + 10)


def test_rolling_forecasts_are_those_of_the_forecaster_of_their_time() -> None:
    steps = steps_of(made(swinging(12)))
    forecasters = [(step, fit_forecaster(steps, step, 0)) for step in (800, 1200)]
    rolled = rolling_forecasts(steps, forecasters)
    for key, values in rolled.items():
        assert np.isnan(values[:800]).all()
        np.testing.assert_array_equal(values[800:1200], forecasters[0][1].changes(steps)[key][800:1200])
        np.testing.assert_array_equal(values[1200:], forecasters[1][1].changes(steps)[key][1200:])


def test_volatility_by_hand_and_from_no_later_step() -> None:
    active = np.tile([10.0] * 30 + [16.0] * 30, 40)
    steps = steps_of(made(active))
    found = volatility_of(steps)
    assert np.isnan(found[:11]).all()
    assert found[60] == pytest.approx(3)  # the highest of any hour is 16, its mean 13
    active[600:] = 90.0
    np.testing.assert_array_equal(volatility_of(steps_of(made(active)))[:61], found[:61])


def test_a_fall_to_near_zero_is_suspect_from_the_next_step_on_until_an_hour_after_it() -> None:
    active = np.full(4 * 1440, 60.0)
    active[3 * 1440 : 3 * 1440 + 60] = 2.0
    found = np.flatnonzero(steps_of(made(active)).is_suspect)
    assert found.tolist() == list(range(3 * 144 + 1, 3 * 144 + 12))
    assert not steps_of(made(active / 4)).is_suspect.any(), "an empty small set is ordinary"


def test_holidays_are_data() -> None:
    assert np.datetime64("2017-11-23") in load_holidays("US")
    assert not load_holidays("nowhere")
