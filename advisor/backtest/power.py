"""Power controllers side by side on a node series: trained, then tuned, then scored, each on later minutes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.backtest.power_oracle import oracle_asleep
from advisor.backtest.power_replay import PATIENCES, Replay, Views, replay, views_of
from advisor.decisions.power import (
    Controller,
    ForecastController,
    KeepWarm,
    PaperConstants,
    PaperController,
    Settings,
    Vanilla,
)
from advisor.demand.features import HOUR, STEP_MIN, Floats, Steps, coming, steps_of
from advisor.demand.forecast import DemandForecast, Key, Skill, forecast_demand, shuffled
from almanac.errors import NoModelError, RequestError
from telemetry.node_series import NodeSeries

OURS, PERSISTENCE, SHUFFLED, ORACLE = "almanac", "persistence", "shuffled", "oracle"
PAPER, LEAKY = "CES (paper)", "CES (leaky)"
"""The same algorithm with forecasts made before the decision, and with the demand that really came. In the authors'
code the forecast of the next hours uses demand up to an hour before each of them, so after the decision."""
DAY_MIN = 1440
LEAST_TUNE_DAYS, LEAST_SCORE_DAYS = 3, 1

# Chosen on October and 1 to 15 November of Philly. Buffers and margins are fractions of the set's nodes.
FORECASTS: tuple[Key, ...] = ((3 * HOUR, 0.5), (3 * HOUR, 0.8), (6 * HOUR, 0.5), (6 * HOUR, 0.8), (12 * HOUR, 0.8))
BUFFERS = (0.005, 0.015, 0.025, 0.035, 0.05)
MARGINS = (0.0, 0.005)
WARM = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2)
NEARLY_BEST = 0.02
"""Of settings that let nearly as many nodes sleep as the best, the one furthest from the budget is taken."""

Tick = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Budget:
    """What an operator accepts: wake-ups (times, not nodes) and minutes of shortage, each per day."""

    wakes_per_day: float = 1.0
    short_min_per_day: float = 2.0


@dataclass(frozen=True)
class Rates:
    """What an idle node costs: watts, power usage effectiveness, money and kg of CO2 per kWh."""

    idle_w: float = 800.0
    pue: float = 1.5
    price_per_kwh: float = 0.15
    co2_kg_per_kwh: float = 0.4


@dataclass(frozen=True)
class Spans:
    """Indices of minutes, multiples of 10: train from 0, tune, score; each ends where the next begins."""

    tune: int
    score: int
    end: int


@dataclass(frozen=True)
class PowerScore:
    """What one controller came to over the usable minutes of the scored span.

    asleep: nodes, on average. utilization: nodes in use / nodes powered, mean over minutes. kwh, money and co2_kg are
    of the whole span, saved against all nodes on.
    """

    controller: str
    asleep: float
    wakes: int
    wakes_per_day: float
    nodes_per_wake: float | None
    short_min_per_day: float
    utilization: float | None
    kwh: float
    money: float
    co2_kg: float


@dataclass(frozen=True)
class PowerBacktest:
    """scores: one of each controller. timeline: powered nodes per minute of the scored span by controller.

    notes: what a reader has to know, such as a budget that nothing kept on the tuning span.
    """

    days: float
    utilization_before: float
    scores: list[PowerScore]
    skills: list[Skill]
    settings: Settings
    settings_shuffled: Settings
    notes: list[str]
    spans: Spans
    timeline: dict[str, NDArray[np.int64]] = field(repr=False)
    forecast: Floats = field(repr=False)

    def score_of(self, controller: str) -> PowerScore:
        return next(score for score in self.scores if score.controller == controller)


def spans_of(
    series: NodeSeries, train_until: np.datetime64 | None = None, tune_until: np.datetime64 | None = None,
    start: np.datetime64 | None = None, end: np.datetime64 | None = None,
) -> Spans:  # fmt: skip
    """Half of the record to train on, a quarter to tune on, the rest to score, where nothing is given.

    Raises RequestError if the spans are out of order or too short.
    """

    def place(when: np.datetime64 | None, otherwise: float) -> int:
        minute = series.minute_of(when) if when is not None else int(otherwise)
        return minute // STEP_MIN * STEP_MIN

    last = place(end, len(series))
    score = place(start if start is not None else tune_until, 0.75 * last)
    tuned = place(tune_until, score)
    tune = place(train_until, score * 2 / 3)
    if score < tuned:
        raise RequestError("the scored span begins before the tuning span ends", "give -S at or after --tune-until")
    checks = (
        ("training", tune, 4),
        ("tuning", tuned - tune, LEAST_TUNE_DAYS),
        ("scored", last - score, LEAST_SCORE_DAYS),
    )
    for name, minutes, least in checks:
        if minutes < least * DAY_MIN:
            raise RequestError(
                f"the {name} span has {max(0, minutes) / DAY_MIN:.1f} days, at least {least} are needed",
                "give --train-until, --tune-until, -S, and -E in this order, within the file",
            )
    return Spans(tune, score, last)


def backtest_power(
    series: NodeSeries, spans: Spans, budget: Budget, *, seed: int = 0, boot_min: int = 5, rates: Rates | None = None,
    holidays: Iterable[np.datetime64] = (), tick: Tick = lambda done, total, note: None,
) -> PowerBacktest:  # fmt: skip
    """Train before spans.tune, tune up to spans.score, score up to spans.end. Raises NoModelError."""
    steps = steps_of(series)
    tune, score, end = spans.tune // STEP_MIN, spans.score // STEP_MIN, spans.end // STEP_MIN
    total = int(np.nanmedian(series.total[: spans.score]))
    paper = PaperConstants.for_total(total)
    tick(0, 5, "forecast")
    try:
        forecast = forecast_demand(
            steps, tune, score, seed, expected_over=(paper.future, 2 * paper.future), holidays=frozenset(holidays)
        )
    except ValueError as error:
        raise NoModelError(f"nothing can be trained: {error}", "train on a longer span of the record") from error
    bench = _Bench(series, steps, forecast, (tune, score, end), boot_min, budget)
    notes = _skill_notes(forecast.skills)
    mixed = {key: shuffled(values, seed) for key, values in forecast.model.items()}
    tick(1, 5, "tuning")
    ours, paths, settings = bench.best_forecast(OURS, forecast.used, total, notes)
    tick(2, 5, "tuning without a forecast")
    _, plain, _ = bench.best_forecast(PERSISTENCE, forecast.persistence, total, notes)
    tick(3, 5, "tuning the shuffled control")
    _, control, settings_shuffled = bench.best_forecast(SHUFFLED, mixed, total, notes)
    tick(4, 5, "scoring")
    replays = {
        "vanilla": bench.run(Vanilla(), bench.scored),
        "keep warm": bench.best([KeepWarm(max(1, round(w * total))) for w in WARM], notes)[1],
        PAPER: bench.run(PaperController(paper), bench.scored),
        LEAKY: bench.run(PaperController(paper), bench.leaky(paper)),
        PERSISTENCE: plain, SHUFFLED: control, OURS: paths,
    }  # fmt: skip
    return _summary(series, spans, bench, replays, forecast, ours, settings, settings_shuffled, notes, rates or Rates())


class _Bench:
    """One record, prepared to run many controllers over its tuning and scored spans."""

    def __init__(
        self, series: NodeSeries, steps: Steps, forecast: DemandForecast, bounds: tuple[int, int, int], boot_min: int,
        budget: Budget,
    ) -> None:  # fmt: skip
        self.series, self.steps, self.forecast, self.bounds = series, steps, forecast, bounds
        self.boot_min, self.budget = boot_min, budget
        self.tuning, self.scored = self.views(forecast.used)

    def views(self, changes: dict[Key, Floats]) -> tuple[Views, Views]:
        tune, score, end = self.bounds
        return (
            views_of(self.steps, self.forecast, changes, tune, score),
            views_of(self.steps, self.forecast, changes, score, end),
        )

    def leaky(self, paper: PaperConstants) -> Views:
        """The scored span for a controller that is told the mean demand to come."""
        sizes = (paper.future, 2 * paper.future)
        told = {size: coming(self.steps.highest, size, np.mean) for size in sizes}
        knowing = dataclasses.replace(self.forecast, expected=told)
        return views_of(self.steps, knowing, self.forecast.used, self.bounds[1], self.bounds[2])

    def run(self, controller: Controller, views: Views) -> Replay:
        return replay(self.series, views, controller, self.boot_min)

    def best(
        self, controllers: Iterable[Controller], notes: list[str], views: tuple[Views, Views] | None = None
    ) -> tuple[Controller, Replay]:
        """The controller that the tuning span prefers within the budget, and what it does on the scored span."""
        tuning, scored = views or (self.tuning, self.scored)
        tried = [(controller, self._outcome(self.run(controller, tuning), tuning)) for controller in controllers]
        within = [one for one in tried if one[1][1] <= 1]
        if within:
            enough = max(asleep for _, (asleep, _) in within)
            near = [one for one in within if one[1][0] >= enough * (1 - NEARLY_BEST)]
            chosen = min(near, key=lambda one: (one[1][1], -one[1][0]))[0]
        else:
            chosen, (_, use) = min(tried, key=lambda one: (one[1][1], -one[1][0]))
            notes.append(f"{chosen.name}: no setting kept the budget while tuning; the closest used {use:.1f} times it")
        return chosen, self.run(chosen, scored)

    def best_forecast(
        self, name: str, changes: dict[Key, Floats], total: int, notes: list[str]
    ) -> tuple[Controller, Replay, Settings]:
        controllers = [ForecastController(settings, name) for settings in grid(total)]
        chosen, outcome = self.best(controllers, notes, self.views(changes))
        assert isinstance(chosen, ForecastController)
        return chosen, outcome, chosen.settings

    def _outcome(self, run: Replay, views: Views) -> tuple[float, float]:
        """Nodes asleep, and the larger of the used shares of the budget."""
        usable, total, _ = self.span(views)
        days = max(usable.sum() / DAY_MIN, 1e-9)
        use = max(
            len(run.wakes) / days / max(self.budget.wakes_per_day, 1e-9),
            float((run.short[usable] > 0).sum()) / days / max(self.budget.short_min_per_day, 1e-9),
        )
        return float((total - run.powered)[usable].mean()) if usable.any() else 0.0, use

    def span(self, views: Views) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """is_usable, total and active of the minutes of these views."""
        rows = slice(views.first * STEP_MIN, (views.first + len(views.views)) * STEP_MIN)
        return self.series.is_usable[rows], self.series.total[rows], self.series.active[rows]


def grid(total: int) -> Iterator[Settings]:
    """Settings to try for a set of so many nodes, without repetition."""
    buffers = sorted({max(1, round(share * total)) for share in BUFFERS})
    margins = sorted({round(share * total) for share in MARGINS})
    for (horizon, quantile), buffer, patience, margin in itertools.product(FORECASTS, buffers, PATIENCES, margins):
        yield Settings(horizon, quantile, buffer, patience, margin)


def _skill_notes(skills: list[Skill]) -> list[str]:
    lost = [skill for skill in skills if not skill.is_model_used]
    if not lost:
        return []
    named = ", ".join(f"{skill.horizon * STEP_MIN // 60} h/{skill.quantile:g}" for skill in lost)
    return [
        f"the model does not beat its baselines at {len(lost)} of {len(skills)} forecasts; a baseline is used ({named})"
    ]


def _summary(
    series: NodeSeries, spans: Spans, bench: _Bench, replays: dict[str, Replay], forecast: DemandForecast,
    ours: Controller, settings: Settings, settings_shuffled: Settings, notes: list[str], rates: Rates,
) -> PowerBacktest:  # fmt: skip
    usable, total, active = bench.span(bench.scored)
    if not usable.any():
        raise RequestError("the scored span has no usable minute", "choose another span with -S and -E")
    days = float(usable.sum() / DAY_MIN)
    scores = [_score(name, run, usable, total, active, rates) for name, run in replays.items()]
    wakes = len(replays[ours.name].wakes)
    asleep = oracle_asleep(active, total, usable, wakes)
    scores.append(
        PowerScore(ORACLE, asleep, wakes, wakes / days, None, 0.0, None, *_saved(asleep * usable.sum() / 60, rates))
    )
    key = (settings.horizon, settings.quantile)
    level = (bench.steps.recent + forecast.used[key])[spans.score // STEP_MIN : spans.end // STEP_MIN]
    return PowerBacktest(
        days=days, utilization_before=float((active[usable] / total[usable]).mean()), scores=scores,
        skills=forecast.skills, settings=settings, settings_shuffled=settings_shuffled, notes=notes, spans=spans,
        timeline={name: run.powered for name, run in replays.items()}, forecast=level,
    )  # fmt: skip


def _score(
    name: str, run: Replay, usable: NDArray[np.bool_], total: Floats, active: Floats, rates: Rates
) -> PowerScore:
    days = float(usable.sum() / DAY_MIN)
    asleep = (total - run.powered)[usable]
    in_use = np.minimum(active, run.powered)[usable] / np.maximum(run.powered[usable], 1)
    return PowerScore(
        controller=name, asleep=float(asleep.mean()), wakes=len(run.wakes), wakes_per_day=len(run.wakes) / days,
        nodes_per_wake=float(np.mean(run.wakes)) if run.wakes else None,
        short_min_per_day=float((run.short[usable] > 0).sum()) / days, utilization=float(in_use.mean()),
        **dict(zip(("kwh", "money", "co2_kg"), _saved(float(asleep.sum()) / 60, rates), strict=True)),
    )  # fmt: skip


def _saved(node_hours: float, rates: Rates) -> tuple[float, float, float]:
    kwh = float(node_hours) * rates.idle_w / 1000 * rates.pue
    return kwh, kwh * rates.price_per_kwh, kwh * rates.co2_kg_per_kwh
