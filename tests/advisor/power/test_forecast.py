"""The demand forecasts: see only the past, are repeatable, and are what they are called."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from advisor.power.forecast import (
    HORIZON,
    HOURLY,
    KINDS,
    MODEL,
    PERSISTENCE,
    QUANTILE,
    RECENT_STEPS,
    STEP_MIN,
    Floats,
    changes_of,
    expected_demand,
    features_of,
    fit_forecaster,
    load_holidays,
    pinball,
    rolling_forecasts,
    shuffled,
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


@pytest.mark.parametrize("kind", KINDS)
def test_no_feature_and_no_forecast_sees_its_own_step_or_a_later_one(kind: str) -> None:
    active = daily(12)
    changed = active.copy()
    step = 1500
    changed[step * STEP_MIN :] = 3.0
    before, after = steps_of(made(active)), steps_of(made(changed))
    seen, later = features_of(before), features_of(after)
    assert list(seen) == list(later)
    for name, values in seen.items():
        np.testing.assert_array_equal(values[: step + 1], later[name][: step + 1], name)
    one, other = (fit_forecaster(steps, 1000, 0, kind).changes(steps) for steps in (before, after))
    np.testing.assert_array_equal(one[: step + 1], other[: step + 1])


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
        losses.append(pinball(changes_of(one)[1000:], fit_forecaster(one, 1000, 0, MODEL).changes(one)[1000:]))
    assert losses[0] < 0.95 * losses[1], "the queue tells what comes"


def test_a_forecaster_of_a_queue_bears_a_series_without_one_and_the_other_way_round() -> None:
    series = announced(8)
    steps, without = steps_of(series), steps_of(dataclasses.replace(series, queued=None))
    unknown = steps_of(dataclasses.replace(series, queued=np.full(len(series), np.nan)))
    of_queue, of_none = (fit_forecaster(one, 1000, 0, MODEL) for one in (steps, without))
    np.testing.assert_array_equal(of_queue.changes(without), of_queue.changes(unknown))
    np.testing.assert_array_equal(of_none.changes(steps), of_none.changes(without))


def test_training_sees_nothing_from_its_end_on() -> None:
    active = daily(12)
    changed = active.copy()
    changed[1000 * STEP_MIN :] = 3.0
    one, other = (expected_demand(steps_of(made(a)), 30, 1000, 0) for a in (active, changed))
    np.testing.assert_array_equal(one[:1001], other[:1001])
    for kind in KINDS:
        found = [fit_forecaster(steps_of(made(each)), 1000, 0, kind) for each in (active, changed)]
        assert found[0] == found[1]


def swinging(days: int) -> Floats:
    """Busy every third hour, at random: what comes next follows from the hour before, not from the day before."""
    rng = np.random.default_rng(1)
    level, levels = 50.0, []
    for _ in range(days * 8):
        level += 0.7 * (50.0 - level) + rng.normal(0, 15)
        levels.append(level)
    return np.clip(np.round(np.repeat(levels, 180)), 0, 100)


def test_persistence_is_the_quantile_of_past_changes() -> None:
    steps = steps_of(made(swinging(8)))
    found = fit_forecaster(steps, 1000, 0, PERSISTENCE)
    past = [changes_of(steps)[step] for step in range(6, 1000 - HORIZON + 1)]
    assert found.usual == pytest.approx(np.quantile(past, QUANTILE))
    assert set(found.changes(steps)[6:].tolist()) == {found.usual}


def test_the_hour_of_day_knows_when_demand_rises_and_forgets_after_30_days() -> None:
    steps = steps_of(made(daily(12)))
    found = fit_forecaster(steps, len(steps), 0, HOURLY)
    assert len(found.by_hour) == 24
    assert found.by_hour[1] > 10 > 0 > found.by_hour[13], "demand is highest at 6 and lowest at 18"
    assert found.by_hour[1] == found.changes(steps)[144 + 6 + 3]
    flat = np.concatenate([daily(5), np.full(31 * 1440, 50.0)])
    assert set(fit_forecaster(steps_of(made(flat)), 36 * 144, 0, HOURLY).by_hour) == {0.0}
    assert RECENT_STEPS == 30 * 144


def test_the_model_beats_persistence_where_the_hour_before_tells_what_comes() -> None:
    steps = steps_of(made(swinging(16)))
    plain, model = (pinball(changes_of(steps)[1500:], fit_forecaster(steps, 1500, 0, kind).changes(steps)[1500:])
                    for kind in (PERSISTENCE, MODEL))  # fmt: skip
    assert model < 0.97 * plain


def test_the_same_seed_gives_the_same_model_of_several_seeds() -> None:
    steps = steps_of(made(daily(12)))
    one, same, other = (fit_forecaster(steps, 1000, seed, MODEL) for seed in (3, 3, 4))
    assert one == same != other
    assert len(set(one.texts)) == 3


def test_a_missing_minute_leaves_no_forecast_for_an_hour() -> None:
    active = daily(12)
    active[1500 * STEP_MIN + 3] = np.nan
    steps = steps_of(made(active))
    found = fit_forecaster(steps, 1000, 0, MODEL).changes(steps)
    assert np.isnan(found[1501:1507]).all()
    assert not np.isnan(found[[1500, 1507]]).any()


def test_too_short_a_record_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="432 needed"):
        fit_forecaster(steps_of(made(daily(4))), 300, 0, PERSISTENCE)


def test_pinball_by_hand() -> None:
    actual, forecast = np.array([10.0, 0.0, np.nan]), np.array([6.0, 6.0, 6.0])
    assert pinball(actual, forecast, 0.9) == pytest.approx((0.9 * 4 + 0.1 * 6) / 2)


def test_shuffling_keeps_the_values_and_the_gaps() -> None:
    values = np.array([1.0, np.nan, 2.0, 3.0, 4.0, 5.0])
    mixed = shuffled(values, 1)
    assert np.isnan(mixed[1]) and sorted(mixed[~np.isnan(mixed)]) == [1, 2, 3, 4, 5]
    assert not np.array_equal(mixed, values, equal_nan=True)


def test_rolling_forecasts_are_those_of_the_forecaster_of_their_time() -> None:
    steps = steps_of(made(swinging(12)))
    forecasters = [(step, fit_forecaster(steps, step, 0, HOURLY)) for step in (800, 1200)]
    values, moves = rolling_forecasts(steps, forecasters)
    assert np.isnan(values[:800]).all()
    for (_, one), rows in zip(forecasters, (slice(800, 1200), slice(1200, None)), strict=True):
        np.testing.assert_array_equal(values[rows], one.changes(steps)[rows])
        np.testing.assert_array_equal(moves[rows], values[rows] - one.usual)


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
