"""Drift of demand forecasts and of what was spent of the budget: hand-computed, and silent while all is well."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.power.decide import Budget
from advisor.power.forecast import DAY, HORIZON, QUANTILE, STEP_MIN, Forecaster, pinball
from advisor.power.lifecycle import budget_alarms, budget_of, drift_of_demand, trimmed
from advisor.power.model import DemandModel, train_demand
from advisor.power.versions import TrainedDemand
from almanac.config import Power
from almanac.units import DAY_S
from telemetry.power.demand import NodeUse
from telemetry.power.series import NodeSeries

DAYS, TRAINED_DAYS = 30, 20
START = np.datetime64("2026-10-05", "m")
START_S = int(START.astype("datetime64[s]").astype(np.int64))
NOW_S = START_S + DAYS * DAY_S


def made(level: float = 50, seed: int = 0) -> NodeSeries:
    """Work by day on 100 nodes with noise."""
    minutes = np.arange(DAYS * 1440)
    noise = np.repeat(np.random.default_rng(seed).normal(0, 3, DAYS * 24), 60)
    active = np.clip(np.round(level + 25 * np.sin(minutes * 2 * np.pi / 1440) + noise), 0, 100)
    full = np.full(len(minutes), 100.0)
    return NodeSeries(START, active, full, full * np.nan, np.ones(len(minutes), dtype=bool))


def cut(series: NodeSeries, first: int, end: int) -> NodeSeries:
    part = slice(first, end)
    return NodeSeries(
        series.start + np.timedelta64(first, "m"), series.active[part], series.total[part], series.wanted[part],
        series.is_usable[part],
    )  # fmt: skip


@pytest.fixture(scope="module")
def series() -> NodeSeries:
    return made()


@pytest.fixture(scope="module")
def model(series: NodeSeries) -> DemandModel:
    return train_demand(cut(series, 0, TRAINED_DAYS * 1440), Budget(60, 20), seed=1)


def trained(model: DemandModel, day: float) -> TrainedDemand:
    return TrainedDemand("v", "", START_S + round(day * DAY_S), 0, 0, "nodes n1", (), model)


def constant(model: DemandModel, change: float) -> DemandModel:
    """The model with this change as its only forecast."""
    return dataclasses.replace(
        model, forecaster=Forecaster("persistence", change),
        trials=(dataclasses.replace(model.trials[0], kind="persistence"),),
    )  # fmt: skip


def test_a_world_that_stays_raises_no_alarm(series: NodeSeries, model: DemandModel) -> None:
    drift = drift_of_demand([trained(model, TRAINED_DAYS)], series, NOW_S)
    assert drift.alarms == ()
    open_days = HORIZON / DAY
    assert drift.days == pytest.approx(7 - open_days, abs=0.05), "7 days, less the longest horizon, still open"
    assert drift.expected_loss == pytest.approx(model.used.loss)


def test_a_world_that_changed_raises_alarms(series: NodeSeries, model: DemandModel) -> None:
    wild = np.where(np.arange(len(series)) < TRAINED_DAYS * 1440, series.active, 0)
    bursts = np.random.default_rng(3).random(DAYS * 24).repeat(60) < 0.1
    wild = np.where((np.arange(len(series)) >= TRAINED_DAYS * 1440) & bursts, 100.0, wild)
    drift = drift_of_demand([trained(model, TRAINED_DAYS)], dataclasses.replace(series, active=wild), NOW_S)
    assert "pinball loss" in drift.alarms[0]
    assert "in the last 7 days" in drift.alarms[0]
    low = drift_of_demand([trained(constant(model, -30.0), TRAINED_DAYS)], series, NOW_S)
    assert any("within the 60% forecast" in alarm for alarm in low.alarms)


def test_each_forecast_is_that_of_the_version_of_its_time(series: NodeSeries, model: DemandModel) -> None:
    """A second version with absurd forecasts counts from its training on, and not before."""
    absurd = constant(model, 1000.0)

    def loss(day: float) -> float:
        drift = drift_of_demand([trained(absurd, day), trained(model, TRAINED_DAYS)], series, NOW_S)
        return drift.loss

    alone = drift_of_demand([trained(model, TRAINED_DAYS)], series, NOW_S)
    assert loss(DAYS) == alone.loss
    assert loss(DAYS + 400) == alone.loss, "trained by a clock that was ahead: it never forecast anything"
    assert alone.loss < loss(DAYS - 1) < loss(DAYS - 3) < loss(DAYS - 5)
    # An excess of about 1000 nodes costs (1 - q) of it.
    assert loss(DAYS - 7) == pytest.approx(1000 * (1 - QUANTILE), rel=0.1)


def test_the_loss_is_that_of_the_forecasts(series: NodeSeries, model: DemandModel) -> None:
    """Computed again, slowly, with a constant forecast."""
    drift = drift_of_demand([trained(constant(model, 7.0), 0)], series, NOW_S)
    losses = []
    for step in range((DAYS - 7) * DAY, DAYS * DAY - HORIZON + 1):
        minute = step * STEP_MIN
        recent = series.active[minute - 60 : minute].max()
        target = series.active[minute : minute + HORIZON * STEP_MIN].max() - recent
        losses.append(pinball(np.array([target]), np.array([7.0])))
    assert drift.loss == pytest.approx(np.mean(losses))


def test_of_a_record_with_holes_only_what_is_known_is_judged(series: NodeSeries, model: DemandModel) -> None:
    is_usable = series.is_usable.copy()
    is_usable[-2 * 1440 :] = False
    drift = drift_of_demand([trained(model, 0)], dataclasses.replace(series, is_usable=is_usable), NOW_S)
    assert drift.days == pytest.approx(5 - HORIZON / DAY, abs=0.05)
    is_usable[-5 * 1440 :] = False
    holed = dataclasses.replace(series, is_usable=is_usable)
    assert drift_of_demand([trained(model, 0)], holed, NOW_S) is None
    assert drift_of_demand([], series, NOW_S) is None
    assert drift_of_demand([trained(model, 0)], cut(series, 0, 0), NOW_S) is None


def test_demand_that_never_changed_is_no_measure(series: NodeSeries) -> None:
    """A validation loss of 0 would make any later change an alarm."""
    flat = dataclasses.replace(series, active=np.full(len(series), 40.0))
    model = train_demand(cut(flat, 0, TRAINED_DAYS * 1440), Budget(60, 20), seed=1)
    assert model.used.loss == pytest.approx(0, abs=0.01)
    bump = flat.active.copy()
    bump[-2 * 1440 : -2 * 1440 + 120] = 41
    drift = drift_of_demand([trained(model, TRAINED_DAYS)], dataclasses.replace(flat, active=bump), NOW_S)
    assert drift.alarms == ()


def test_a_miss_of_a_fraction_of_a_node_is_no_alarm(series: NodeSeries) -> None:
    """One node now and then, on a set that was idle: the forecast of 0 holds, but not 60% of the time."""
    idle = dataclasses.replace(series, active=np.zeros(len(series)))
    model = train_demand(cut(idle, 0, TRAINED_DAYS * 1440), Budget(60, 20), seed=1)
    now_and_then = idle.active.copy()
    now_and_then[-7 * 1440 :: 600] = 1
    drift = drift_of_demand([trained(model, TRAINED_DAYS)], dataclasses.replace(idle, active=now_and_then), NOW_S)
    assert drift.coverage < 0.75
    assert drift.loss < 0.25
    assert drift.alarms == ()


def use(wakes: int, short_min: float, days: float = 7, boots: int = 0) -> NodeUse:
    """Of 20 nodes."""
    known_s = round(days * DAY_S)
    return NodeUse(7 * DAY_S, known_s, 20 * known_s / 3600, 0, 0, tuple(range(wakes)), short_min, boots)


def test_a_budget_exceeded_by_far_is_an_alarm() -> None:
    power = Power(wakes_per_day=1, short_min_per_day=2)
    assert budget_alarms(use(10, 40), power) == []
    assert budget_alarms(use(11, 40), power) == ["11 wake-ups in 7.0 days, the budget is 1 a day"]
    assert budget_alarms(use(7, 44), power) == ["44 short minutes in 7.0 days, the budget is 2 a day"]
    assert budget_alarms(use(3, 31, days=0.5), power) == ["31 short minutes in 0.5 days, the budget is 2 a day"]
    assert budget_alarms(use(2, 0, days=0.1), power) == [], "two wake-ups prove nothing"
    assert budget_alarms(use(5, 0, boots=21), power) == []
    assert budget_alarms(use(5, 0, boots=22), power) == ["22 node boots in 7.0 days, the budget is 2 a day"]
    assert budget_alarms(use(700, 0), Power()) == [], "any number of wake-ups"
    assert budget_alarms(use(3, 30), Power(wakes_per_day=0, short_min_per_day=0)) == [
        "3 wake-ups in 7.0 days, the budget is 0 a day", "30 short minutes in 7.0 days, the budget is 0 a day",
    ]  # fmt: skip


def test_the_budget_of_a_set_grows_with_its_nodes() -> None:
    assert budget_of(Power(), 430) == Budget(43.0, 2.0, None)
    assert budget_of(Power(boots_per_node=0.5, wakes_per_day=0), 10) == Budget(5.0, 2.0, 0.0)


@given(st.integers(0, 100), st.floats(0, 500), st.floats(0, 7), st.floats(0, 100), st.floats(0, 1440))
def test_within_the_budget_there_is_never_an_alarm(
    wakes: int, short_min: float, days: float, per_day: float, short_per_day: float
) -> None:
    found = use(wakes, short_min, days)
    alarms = budget_alarms(found, Power(wakes_per_day=per_day, short_min_per_day=short_per_day))
    words = " ".join(alarms)
    if wakes <= per_day * found.known_days:
        assert "wake-ups" not in words
    if short_min <= short_per_day * found.known_days:
        assert "short minutes" not in words


def test_what_lies_before_the_record_is_cut_off(series: NodeSeries) -> None:
    is_usable = series.is_usable.copy()
    is_usable[:3000] = is_usable[-500:] = False
    is_usable[5000:6000] = False
    found = trimmed(dataclasses.replace(series, is_usable=is_usable))
    assert len(found) == len(series) - 3500
    assert found.start == START + np.timedelta64(3000, "m")
    assert found.active[0] == series.active[3000]
    assert (~found.is_usable).sum() == 1000
    assert len(trimmed(dataclasses.replace(series, is_usable=is_usable & False))) == 0
