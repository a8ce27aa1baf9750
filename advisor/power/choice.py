"""Choose a forecast and settings for a node set: what lets most nodes sleep within the budget, on its own record.

The last 30 days are replayed under each kind of forecast, with forecasts made by what lies before each of them. The
plainest kind wins unless another one lets clearly more nodes sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from advisor.power.decide import (
    HOLDS,
    Budget,
    Controller,
    ForecastController,
    ForecastSettings,
    Views,
    views_of,
)
from advisor.power.forecast import (
    DAY,
    HOURLY,
    MODEL,
    PERSISTENCE,
    RECENT_STEPS,
    Forecaster,
    Steps,
    changes_of,
    fit_forecaster,
    pinball,
    rolling_forecasts,
)
from advisor.power.replay import DAY_MIN, UNLIMITED, Plant, PowerReplay, replay, span_of
from telemetry.power.series import NodeSeries

REFIT_STEPS = 3 * DAY
"""A forecaster forecasts so long before the next one is fitted."""
LEAST_GAIN = {PERSISTENCE: 0.0, HOURLY: 0.01, MODEL: 0.02}
"""Share by which a kind must let more nodes sleep than every plainer one: less is chance."""

# Chosen on Philly before 16 November, Helios, and Earth.
MARGINS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 18, 24, 32, 42, 56, 75, 100)
"""Nodes; those up to a tenth of the set are tried."""
EXTRAS = (0.0, 0.5, 1.0)
"""Shares of the margin."""
START = 24, 0.015, 0.5
"""First guess: steps held, margin as a share of the set's nodes, and extra as a share of the margin."""
SAFE_SHARE = 0.9
"""Settings are chosen to use this part of the budget: the coming days differ from the past ones."""


@dataclass(frozen=True)
class PowerUse:
    """A replay by its means: nodes asleep; nodes booted, wake-ups, and minutes of shortage per day."""

    asleep: float
    boots_per_day: float
    wakes_per_day: float
    short_min_per_day: float

    def use(self, budget: Budget) -> float:
        """Largest used share of the budget."""
        return budget.use(self.boots_per_day, self.short_min_per_day, self.wakes_per_day)


def outcome_of(series: NodeSeries, views: Views, run: PowerReplay) -> PowerUse:
    """Return the means over the usable minutes of the views' span; zeros if none is usable."""
    rows = span_of(views)
    usable = series.is_usable[rows]
    if not usable.any():
        return PowerUse(0.0, 0.0, 0.0, 0.0)
    days = float(usable.sum()) / DAY_MIN
    asleep = float((series.total[rows] - run.powered)[usable].mean())
    return PowerUse(asleep, sum(run.wakes) / days, len(run.wakes) / days, float((run.short[usable] > 0).sum()) / days)


@dataclass(frozen=True)
class ForecastTrial:
    """One kind of forecast on the site's own past days, under its best settings.

    days: replayed. use: largest used share of the budget. loss: mean pinball loss of the forecasts, nodes.
    """

    kind: str
    settings: ForecastSettings
    days: float
    asleep: float
    use: float
    loss: float


def try_forecast(
    series: NodeSeries, steps: Steps, budget: Budget, plant: Plant, kind: str, span: tuple[int, int],
    fit: Callable[[int], Forecaster],
) -> ForecastTrial:  # fmt: skip
    """Replay one kind of forecast on the steps of the span. fit: a forecaster of what lies before a step."""
    first, end = span
    origins = [(step, fit(step)) for step in range(first, max(first + 1, end - DAY), REFIT_STEPS)]
    steps = steps.part(0, end)
    changes, moves = rolling_forecasts(steps, origins)
    views = views_of(steps, moves, first, end)
    settings, outcome = best_settings(series, views, budget, plant)
    loss = pinball(changes_of(steps)[first:], changes[first:])
    return ForecastTrial(kind, settings, (end - first) / DAY, outcome.asleep, outcome.use(budget), loss)


def try_forecasts(
    series: NodeSeries, steps: Steps, budget: Budget, plant: Plant, first: int, end: int, kinds: Iterable[str],
    seed: int, holidays: frozenset[np.datetime64],
) -> list[ForecastTrial]:  # fmt: skip
    """Replay kinds of forecasts on the last 30 days before step `end`, from step `first` at the earliest."""
    span = max(first, end - RECENT_STEPS), end
    return [
        try_forecast(
            series, steps, budget, plant, kind, span,
            lambda step, kind=kind: fit_forecaster(steps, step, seed, kind, holidays),  # type: ignore[misc]
        )
        for kind in kinds
    ]  # fmt: skip


def choose(trials: Sequence[ForecastTrial]) -> ForecastTrial:
    """The plainest kind, unless a later one lets clearly more nodes sleep within the budget. trials: plainest first."""
    best = trials[0]
    for each in trials[1:]:
        is_kept = each.use <= max(1.0, best.use)
        if is_kept and each.asleep > best.asleep * (1 + LEAST_GAIN[each.kind]):
            best = each
    return best


def best_settings(series: NodeSeries, views: Views, budget: Budget, plant: Plant) -> tuple[ForecastSettings, PowerUse]:
    """Settings that let most nodes sleep in the span of the views within the budget, and what they did.

    A hill climb over steps held, margin, and extra; about 30 replays.
    """
    total = float(np.nanmedian(series.total[: span_of(views).stop]))
    margins = [each for each in MARGINS if each <= max(2.0, total / 10)]
    scales: tuple[Sequence[float], ...] = HOLDS, margins, EXTRAS
    seen: dict[tuple[int, ...], PowerUse] = {}

    def value(place: tuple[int, ...]) -> float:
        if place not in seen:
            run = replay(series, views, ForecastController(_settings(scales, place)), UNLIMITED, plant)
            seen[place] = outcome_of(series, views, run)
        return value_of(seen[place], budget, total)

    guesses = START[0], START[1] * total, START[2]
    place = tuple(min(range(len(s)), key=lambda k: abs(s[k] - guess)) for s, guess in zip(scales, guesses, strict=True))
    reach = 1
    while reach <= 2:
        best = max(_neighbors(place, scales, reach), key=value)
        place, reach = (best, 1) if value(best) > value(place) else (place, reach + 1)
    return _settings(scales, place), seen[place]


def value_of(outcome: PowerUse, budget: Budget, total: float) -> float:
    """Nodes asleep, less half the set for each time that the outcome uses the safe part of the budget too often."""
    return outcome.asleep - total / 2 * max(0.0, outcome.use(budget) / SAFE_SHARE - 1)


def _settings(scales: Sequence[Sequence[float]], place: Sequence[int]) -> ForecastSettings:
    hold, margin, share = (scale[index] for scale, index in zip(scales, place, strict=True))
    return ForecastSettings(int(hold), int(margin), round(margin * share))


def _neighbors(place: Sequence[int], scales: Sequence[Sequence[float]], reach: int) -> Iterator[tuple[int, ...]]:
    """Places that differ by one in so many settings."""
    for step in product((-1, 0, 1), repeat=len(place)):
        found = tuple(here + by for here, by in zip(place, step, strict=True))
        if sum(map(abs, step)) == reach and all(0 <= k < len(s) for k, s in zip(found, scales, strict=True)):
            yield found


def best_within(
    series: NodeSeries, views: Views, controllers: Sequence[Controller], budget: Budget, plant: Plant
) -> Controller:
    """The controller that lets most nodes sleep in the span of the views within the budget, or else the nearest."""
    total = float(np.nanmedian(series.total[: span_of(views).stop]))
    found = [outcome_of(series, views, replay(series, views, each, UNLIMITED, plant)) for each in controllers]
    return max(zip(controllers, found, strict=True), key=lambda one: value_of(one[1], budget, total))[0]
