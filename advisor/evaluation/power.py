"""Power controllers side by side on a node series: trained, then tuned, then scored, each on later minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.decisions.power import (
    Budget,
    Controller,
    DemandView,
    ForecastController,
    KeepWarm,
    PaperConstants,
    PaperController,
    Settings,
    Vanilla,
    level_at,
)
from advisor.decisions.power_views import Views, views_of
from advisor.demand.features import DAY, STEP_MIN, Floats, Steps, coming, steps_of
from advisor.demand.forecast import (
    MODEL,
    PERSISTENCE,
    SHUFFLED,
    Forecasts,
    Skill,
    expected_demand,
    fit_forecaster,
    rolling_forecasts,
    shuffled,
)
from advisor.demand.model import FIRST_DAYS, RETRAIN_STEPS, DemandModel, trained_demand
from advisor.evaluation.power_oracle import oracle_asleep
from advisor.evaluation.power_replay import Plant, PowerReplay, replay
from advisor.evaluation.power_tune import DAY_MIN, best_within, forecast_controllers
from almanac.errors import NoModelError, RequestError
from telemetry.nodes.series import NodeSeries

OURS, ORACLE = "almanac", "oracle"
PAPER, TEXT, LEAKY = "CES (paper)", "CES (text)", "CES (leaky)"
"""The paper's algorithm with the constants of the authors' code, with those of the paper's text, and with the former
told the demand that really came. In the authors' code the forecast of the next hours uses demand up to an hour before
each of them, so after the decision."""
LEAST_TUNE_DAYS, LEAST_SCORE_DAYS = 3, 1

WARM = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2)

Tick = Callable[[float, float, str], None]


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
    """scores: one of each controller. timeline: powered nodes per minute of the scored span by controller. shortage:
    nodes in use above those up, likewise.

    notes: what a reader has to know, such as a budget that nothing kept on the tuning span.
    """

    days: float
    utilization_before: float
    scores: list[PowerScore]
    skills: list[Skill]
    settings: Settings
    notes: list[str]
    spans: Spans
    timeline: dict[str, NDArray[np.int64]] = field(repr=False)
    shortage: dict[str, NDArray[np.int64]] = field(repr=False)
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
                "give --train-until, --tune-until, -S, and -E in this order, within the record",
            )
    return Spans(tune, score, last)


def backtest_power(
    series: NodeSeries, spans: Spans, budget: Budget, *, seed: int = 0, plant: Plant | None = None,
    rates: Rates | None = None, holidays: Iterable[np.datetime64] = (), tick: Tick = lambda done, total, note: None,
) -> PowerBacktest:  # fmt: skip
    """Train before spans.tune, tune up to spans.score, score up to spans.end. Raises NoModelError."""
    steps, plant, days = steps_of(series), plant or Plant(), frozenset(holidays)
    tune, score, end = spans.tune // STEP_MIN, spans.score // STEP_MIN, spans.end // STEP_MIN
    total = int(np.nanmedian(series.total[: spans.score]))
    paper, text = PaperConstants.for_total(total), PaperConstants.as_written(total)
    sizes = (paper.future, 2 * paper.future, text.future)
    tick(0, 3, "training and tuning")
    try:
        training = trained_demand(series, steps, budget, plant, seed, days, min(tune, FIRST_DAYS[1] * DAY), score)
        expected = {size: expected_demand(steps, size, score, seed, days) for size in sizes}
    except ValueError as error:
        raise NoModelError(f"nothing can be trained: {error}", "train on a longer span of the record") from error
    model, notes = training.model, [*_skill_notes(training.model.forecaster.skills), *training.model.notes]
    tick(1, 3, "forecasting")
    forecasters = [(score, model.forecaster)]
    for step in range(score + RETRAIN_STEPS, end - DAY, RETRAIN_STEPS):
        refit = fit_forecaster(steps, step, seed, days)
        forecasters.append((step, refit.with_skills(model.forecaster.skills)))
    bench = _Bench(series, steps, (training.origins[0][0], score, end), budget, plant)
    used = rolling_forecasts(steps, forecasters, end=end)
    own = rolling_forecasts(steps, forecasters, MODEL, end)
    plain = rolling_forecasts(steps, [*training.origins, *forecasters], PERSISTENCE, end)
    tick(2, 3, "replaying")
    ours = ForecastController(model.settings, OURS)
    told = {size: coming(steps.highest, size, np.mean) for size in expected}
    scored = bench.views(used, expected)
    replays = {
        "vanilla": bench.run(Vanilla(), scored),
        "keep warm": bench.best([KeepWarm(max(1, round(w * total))) for w in reversed(WARM)], plain, notes),
        PAPER: bench.run(PaperController(paper), scored),
        TEXT: bench.run(PaperController(text, TEXT), scored),
        LEAKY: bench.run(PaperController(paper), bench.views(used, told)),
        PERSISTENCE: bench.best(forecast_controllers(total, PERSISTENCE), plain, notes),
        SHUFFLED: bench.run(ForecastController(model.settings, SHUFFLED), bench.views(shuffled(own, seed))),
        OURS: bench.run(ours, scored),
    }  # fmt: skip
    tick(3, 3, "scoring")
    level = np.array([level_of(ours, view) for view in scored.views])
    return _summary(bench, spans, replays, level, model, notes, rates or Rates())


def level_of(controller: ForecastController, view: DemandView) -> float:
    """Forecast highest demand at the settings' tail, without credit or debt; NaN without a forecast."""
    return float("nan") if view.levels is None else level_at(view.levels, controller.settings.tail)


class _Bench:
    """One record, prepared to run many controllers over its past and its scored span."""

    def __init__(
        self, series: NodeSeries, steps: Steps, bounds: tuple[int, int, int], budget: Budget, plant: Plant
    ) -> None:
        self.series, self.steps, self.bounds, self.budget, self.plant = series, steps, bounds, budget, plant

    def views(self, changes: Forecasts, expected: dict[int, Floats] | None = None) -> Views:
        return views_of(self.steps, changes, self.bounds[1], self.bounds[2], expected)

    def run(self, controller: Controller, views: Views) -> PowerReplay:
        return replay(self.series, views, controller, self.budget, self.plant)

    def best(self, controllers: Sequence[Controller], changes: Forecasts, notes: list[str]) -> PowerReplay:
        """What the controller that was best within the budget before does on the scored span."""
        past = views_of(self.steps, changes, self.bounds[0], self.bounds[1])
        chosen = best_within(self.series, past, controllers, self.budget, self.plant, notes)
        return self.run(chosen, self.views(changes))


def _skill_notes(skills: list[Skill]) -> list[str]:
    lost = [skill for skill in skills if not skill.is_model_used]
    if not lost:
        return []
    named = ", ".join(f"{skill.horizon * STEP_MIN // 60} h/{skill.quantile:g}" for skill in lost)
    return [
        f"the model does not beat its baselines at {len(lost)} of {len(skills)} forecasts; a baseline is used ({named})"
    ]


def _summary(
    bench: _Bench, spans: Spans, replays: dict[str, PowerReplay], level: Floats, model: DemandModel, notes: list[str],
    rates: Rates,
) -> PowerBacktest:  # fmt: skip
    rows = slice(spans.score, spans.end)
    usable, total, active = bench.series.is_usable[rows], bench.series.total[rows], bench.series.active[rows]
    if not usable.any():
        raise RequestError("the scored span has no usable minute", "choose another span with -S and -E")
    days = float(usable.sum() / DAY_MIN)
    scores = [_score(name, run, usable, total, active, rates) for name, run in replays.items()]
    wakes = len(replays[OURS].wakes)
    asleep = oracle_asleep(active, total, usable, wakes)
    scores.append(
        PowerScore(ORACLE, asleep, wakes, wakes / days, None, 0.0, None, *_saved(asleep * usable.sum() / 60, rates))
    )
    return PowerBacktest(
        days=days, utilization_before=float((active[usable] / total[usable]).mean()), scores=scores,
        skills=model.forecaster.skills, settings=model.settings, notes=notes, spans=spans,
        timeline={name: run.powered for name, run in replays.items()}, forecast=level,
        shortage={name: run.short for name, run in replays.items()},
    )  # fmt: skip


def _score(
    name: str, run: PowerReplay, usable: NDArray[np.bool_], total: Floats, active: Floats, rates: Rates
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
