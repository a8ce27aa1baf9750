"""Settings of a power controller for a budget, chosen by replaying a span of the record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.decisions.power import Budget, Controller, ForecastController, Settings
from advisor.decisions.power_views import Views
from advisor.evaluation.power_replay import Plant, PowerReplay, replay, span_of
from telemetry.nodes.series import NodeSeries

DAY_MIN = 1440

# Chosen on Philly before 16 November and on Earth. Fractions of the set's nodes.
MARGIN, EXTRA = 0.005, 0.08
TAILS = (0.1, 0.14, 0.2, 0.28, 0.4)


def tuned_settings(
    series: NodeSeries, views: Views, budget: Budget, plant: Plant, name: str = "almanac"
) -> tuple[Settings, list[str]]:
    """Settings that the span of the views prefers within the budget, and what a reader has to know."""
    total = int(np.nanmedian(series.total[: span_of(views).stop]))
    notes: list[str] = []
    chosen = best_within(series, views, forecast_controllers(total, name), budget, plant, notes)
    assert isinstance(chosen, ForecastController)
    return chosen.settings, notes


def forecast_controllers(total: int, name: str) -> list[Controller]:
    """Controllers to try for a set of so many nodes, from careful to bold: small sets with and without a margin."""
    extra, usual = max(1, round(EXTRA * total)), round(MARGIN * total)
    margins = sorted({max(1, usual), usual}, reverse=True)
    return [ForecastController(Settings(tail, margin, extra), name) for margin in margins for tail in TAILS]


def best_within(
    series: NodeSeries, views: Views, controllers: Sequence[Controller], budget: Budget, plant: Plant, notes: list[str]
) -> Controller:
    """The controller that lets most nodes sleep in the span of the views within the budget; or the closest to it.

    controllers: from careful to bold. Each is judged together with its neighbors, since a few wake-ups more or less are
    chance.
    """
    outcomes = [_outcome(series, views, replay(series, views, one, budget, plant), budget) for one in controllers]
    found = np.array([np.mean(outcomes[max(0, place - 1) : place + 2], axis=0) for place in range(len(outcomes))])
    asleep, use = found[:, 0], found[:, 1]
    if (use <= 1).any():
        return controllers[int(np.argmax(np.where(use <= 1, asleep, -1.0)))]
    chosen = controllers[int(np.argmin(use))]
    notes.append(f"{chosen.name}: no setting kept the budget while tuning; the closest used {use.min():.1f} times it")
    return chosen


def _outcome(series: NodeSeries, views: Views, run: PowerReplay, budget: Budget) -> tuple[float, float]:
    """Nodes asleep, and the larger of the used shares of the budget."""
    rows = span_of(views)
    usable = series.is_usable[rows]
    days = max(usable.sum() / DAY_MIN, 1e-9)
    use = max(
        len(run.wakes) / days / max(budget.wakes_per_day, 1e-9),
        float((run.short[usable] > 0).sum()) / days / max(budget.short_min_per_day, 1e-9),
    )
    return float((series.total[rows] - run.powered)[usable].mean()) if usable.any() else 0.0, use
