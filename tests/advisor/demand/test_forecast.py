"""The demand forecast: sees only the past, is repeatable, and is used only where it beats its baselines."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.demand.features import STEP_MIN, Floats, features_of, load_holidays, steps_of
from advisor.demand.forecast import HORIZONS, forecast_demand, pinball, shuffled
from telemetry.node_series import NodeSeries


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
    for horizon in HORIZONS:
        names, features = features_of(before, horizon)
        assert len(names) == features.shape[1]
        np.testing.assert_array_equal(features[: step + 1], features_of(after, horizon)[1][: step + 1])
    one, other = (forecast_demand(steps, 1000, 1400, 0, expected_over=(30,)) for steps in (before, after))
    for key in one.used:
        np.testing.assert_array_equal(one.used[key][: step + 1], other.used[key][: step + 1])
    np.testing.assert_array_equal(one.expected[30][: step + 1], other.expected[30][: step + 1])


def test_training_sees_nothing_from_its_end_on() -> None:
    active = daily(12)
    changed = active.copy()
    changed[1000 * STEP_MIN :] = 3.0
    one, other = (forecast_demand(steps_of(made(a)), 1000, 1400, 0, expected_over=(30,)) for a in (active, changed))
    np.testing.assert_array_equal(one.expected[30][:1001], other.expected[30][:1001])


def swinging(days: int) -> Floats:
    """Busy every third hour, at random: what comes next follows from the hour before, not from the day before."""
    rng = np.random.default_rng(1)
    level, levels = 50.0, []
    for _ in range(days * 8):
        level += 0.7 * (50.0 - level) + rng.normal(0, 15)
        levels.append(level)
    return np.clip(np.round(np.repeat(levels, 180)), 0, 100)


def test_the_model_is_used_where_it_beats_every_baseline() -> None:
    skills = forecast_demand(steps_of(made(swinging(16))), 1500, 2100, 0).skills
    used = [skill for skill in skills if skill.is_model_used]
    assert len(used) >= 5
    assert all(s.model < min(s.persistence, s.seasonal, s.shuffled) for s in used)


def test_where_the_model_is_no_better_a_baseline_is_used() -> None:
    skills = forecast_demand(steps_of(made(daily(14))), 1200, 1700, 0).skills
    lost = [skill for skill in skills if not skill.is_model_used]
    assert lost
    assert all(s.model >= min(s.persistence, s.seasonal, s.shuffled) for s in lost)
    assert "seasonal" in {skill.used for skill in lost}


def test_the_same_seed_gives_the_same_forecast_and_quantiles_do_not_cross() -> None:
    steps = steps_of(made(daily(12)))
    one, other = (forecast_demand(steps, 1000, 1400, 3) for _ in range(2))
    assert all(np.array_equal(one.model[key], other.model[key], equal_nan=True) for key in one.model)
    known = ~np.isnan(one.used[18, 0.5])
    assert (one.used[18, 0.8] >= one.used[18, 0.5])[known].all()
    assert (one.used[36, 0.8] >= one.used[18, 0.8])[known].all()


def test_a_missing_minute_leaves_no_forecast_for_an_hour() -> None:
    active = daily(12)
    active[1500 * STEP_MIN + 3] = np.nan
    found = forecast_demand(steps_of(made(active)), 1000, 1400, 0).used[18, 0.8]
    assert np.isnan(found[1501:1507]).all()
    assert not np.isnan(found[[1500, 1507]]).any()


def test_too_short_a_record_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="432 needed"):
        forecast_demand(steps_of(made(daily(4))), 300, 400, 0)


def test_pinball_by_hand() -> None:
    actual, forecast = np.array([10.0, 0.0, np.nan]), np.array([6.0, 6.0, 6.0])
    assert pinball(actual, forecast, 0.9) == pytest.approx((0.9 * 4 + 0.1 * 6) / 2)


def test_shuffling_keeps_the_values_and_the_gaps() -> None:
    values = np.array([1.0, np.nan, 2.0, 3.0, 4.0, 5.0])
    mixed = shuffled(values, 1)
    assert np.isnan(mixed[1]) and sorted(mixed[~np.isnan(mixed)]) == [1, 2, 3, 4, 5]
    assert not np.array_equal(mixed, values, equal_nan=True)


def test_holidays_are_data() -> None:
    assert np.datetime64("2017-11-23") in load_holidays("US")
    assert not load_holidays("nowhere")
