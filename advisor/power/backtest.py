"""Power controllers side by side on a node series: trained, then tuned, then scored, each on later minutes.

The scores: nodes asleep, energy saved, delayed jobs, and the best that was possible (the oracle).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from advisor.backtest import Ints, MethodComparison, compare_methods, training_times
from advisor.power.decide import Budget, Controller, ForecastController, ForecastSettings, level_at, views_of
from advisor.power.forecast import (
    DAY,
    MODEL,
    PERSISTENCE,
    SHUFFLED,
    STEP_MIN,
    Floats,
    Skill,
    coming,
    expected_demand,
    fit_forecaster,
    rolling_forecasts,
    shuffled,
    steps_of,
)
from advisor.power.model import FIRST_DAYS, RETRAIN_STEPS, DemandModel, trained_demand
from advisor.power.replay import (
    DAY_MIN,
    KeepWarm,
    PaperConstants,
    PaperController,
    Plant,
    PowerReplay,
    Vanilla,
    best_within,
    forecast_controllers,
    replay,
)
from almanac.errors import NoModelError, RequestError
from telemetry.power.series import MINUTE_S, NodeRuns, NodeSeries, merged

OURS, KEEP_WARM, ORACLE = "almanac", "keep warm", "oracle"
PAPER, TEXT, LEAKY = "CES (paper)", "CES (text)", "CES (leaky)"
"""The paper's algorithm with the constants of the authors' code, with those of the paper's text, and with the former
told the demand that really came. In the authors' code the forecast of the next hours uses demand up to an hour before
each of them, so after the decision."""
LEAST_TUNE_DAYS, LEAST_SCORE_DAYS = 3, 1

MOST_CELLS = 4500
WARM = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2)

Bools = NDArray[np.bool_]
Tick = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Spans:
    """Indices of minutes, multiples of 10: train from 0, tune, score; each ends where the next begins."""

    tune: int
    score: int
    end: int


@dataclass(frozen=True)
class PowerBacktest:
    """The result of a replay of power control on a record of nodes in use.

    scores: one for each controller. timeline: powered nodes per minute of the scored span, by controller. shortage:
    nodes in use above those powered, likewise. notes: remarks for the reader, such as a budget that nothing kept on the
    tuning span.
    """

    days: float
    utilization_before: float
    scores: list[PowerScore]
    skills: list[Skill]
    settings: ForecastSettings
    notes: list[str]
    spans: Spans
    timeline: dict[str, NDArray[np.int64]] = field(repr=False)
    shortage: dict[str, NDArray[np.int64]] = field(repr=False)
    forecast: Floats = field(repr=False)
    comparison: MethodComparison

    def score_of(self, controller: str) -> PowerScore:
        return next(score for score in self.scores if score.controller == controller)


def spans_of(
    series: NodeSeries, train_until: np.datetime64 | None = None, tune_until: np.datetime64 | None = None,
    start: np.datetime64 | None = None, end: np.datetime64 | None = None,
) -> Spans:  # fmt: skip
    """Split the record into spans; by default, half to train on, a quarter to tune on, and the rest to score.

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
        first = min(tune, FIRST_DAYS[1] * DAY)
        model, origins = trained_demand(series, steps, budget, plant, seed, days, first, score)
        expected = {size: expected_demand(steps, size, score, seed, days) for size in sizes}
    except ValueError as error:
        raise NoModelError(f"nothing can be trained: {error}", "train on a longer span of the record") from error
    notes = [*_skill_notes(model.forecaster.skills), *model.notes]
    tick(1, 3, "forecasting")
    forecasters = [(score, model.forecaster)]
    for step in map(int, training_times(score, end - DAY, RETRAIN_STEPS)[1:]):
        refit = fit_forecaster(steps, step, seed, days)
        forecasters.append((step, refit.with_skills(model.forecaster.skills)))
    run = partial(replay, series, budget=budget, plant=plant)
    used = rolling_forecasts(steps, forecasters, end=end)
    own = rolling_forecasts(steps, forecasters, MODEL, end)
    plain = rolling_forecasts(steps, [*origins, *forecasters], PERSISTENCE, end)
    tick(2, 3, "replaying")
    told = {size: coming(steps.highest, size, np.mean) for size in expected}
    scored = views_of(steps, used, score, end, expected)
    tuned = [views_of(steps, plain, *span) for span in ((origins[0][0], score), (score, end))]

    def best(controllers: Sequence[Controller]) -> PowerReplay:
        """The scored span under the controller that was best within the budget before it."""
        return run(tuned[1], best_within(series, tuned[0], controllers, budget, plant, notes))

    replays = {
        "vanilla": run(scored, Vanilla()),
        KEEP_WARM: best([KeepWarm(max(1, round(w * total))) for w in reversed(WARM)]),
        PAPER: run(scored, PaperController(paper)),
        TEXT: run(scored, PaperController(text, TEXT)),
        LEAKY: run(views_of(steps, used, score, end, told), PaperController(paper)),
        PERSISTENCE: best(forecast_controllers(total, PERSISTENCE)),
        SHUFFLED: run(
            views_of(steps, shuffled(own, seed), score, end), ForecastController(model.settings, SHUFFLED)
        ),
        OURS: run(scored, ForecastController(model.settings, OURS)),
    }  # fmt: skip
    tick(3, 3, "scoring")
    tail = model.settings.tail
    level = np.array([float("nan") if view.levels is None else level_at(view.levels, tail) for view in scored.views])
    return _summary(series, spans, replays, level, model, notes, rates or Rates())


def _skill_notes(skills: list[Skill]) -> list[str]:
    lost = [skill for skill in skills if not skill.is_model_used]
    if not lost:
        return []
    named = ", ".join(f"{skill.horizon * STEP_MIN // 60} h/{skill.quantile:g}" for skill in lost)
    return [
        f"the model does not beat its baselines at {len(lost)} of {len(skills)} forecasts; a baseline is used ({named})"
    ]


def _summary(
    series: NodeSeries, spans: Spans, replays: dict[str, PowerReplay], level: Floats, model: DemandModel,
    notes: list[str], rates: Rates,
) -> PowerBacktest:  # fmt: skip
    rows = slice(spans.score, spans.end)
    usable, total, active = series.is_usable[rows], series.total[rows], series.active[rows]
    if not usable.any():
        raise RequestError("the scored span has no usable minute", "choose another span with -S and -E")
    days = float(usable.sum() / DAY_MIN)
    slept = {name: (total - replays[name].powered)[usable] for name in (OURS, KEEP_WARM, PERSISTENCE, SHUFFLED)}
    scores = [score_replay(name, run, usable, total, active, rates) for name, run in replays.items()]
    wakes = len(replays[OURS].wakes)
    asleep = oracle_asleep(active, total, usable, wakes)
    scores.append(
        PowerScore(ORACLE, asleep, wakes, wakes / days, None, 0.0, None, *saved(asleep * usable.sum() / 60, rates))
    )
    return PowerBacktest(
        days=days, utilization_before=float((active[usable] / total[usable]).mean()), scores=scores,
        skills=model.forecaster.skills, settings=model.settings, notes=notes, spans=spans,
        timeline={name: run.powered for name, run in replays.items()}, forecast=level,
        shortage={name: run.short for name, run in replays.items()},
        comparison=compare_methods("nodes asleep", OURS, slept, np.flatnonzero(usable) * MINUTE_S, (SHUFFLED,)),
    )  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """The cost of an idle node: watts, power usage effectiveness, money and kg of CO2 per kWh."""

    idle_w: float = 800.0
    pue: float = 1.5
    price_per_kwh: float = 0.15
    co2_kg_per_kwh: float = 0.4


@dataclass(frozen=True)
class PowerScore:
    """The results of one controller over the usable minutes of the scored span.

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


def score_replay(name: str, run: PowerReplay, usable: Bools, total: Floats, active: Floats, rates: Rates) -> PowerScore:
    days = float(usable.sum() / DAY_MIN)
    asleep = (total - run.powered)[usable]
    in_use = np.minimum(active, run.powered)[usable] / np.maximum(run.powered[usable], 1)
    return PowerScore(
        controller=name, asleep=float(asleep.mean()), wakes=len(run.wakes), wakes_per_day=len(run.wakes) / days,
        nodes_per_wake=float(np.mean(run.wakes)) if run.wakes else None,
        short_min_per_day=float((run.short[usable] > 0).sum()) / days, utilization=float(in_use.mean()),
        **dict(zip(("kwh", "money", "co2_kg"), saved(float(asleep.sum()) / 60, rates), strict=True)),
    )  # fmt: skip


def saved(node_hours: float, rates: Rates) -> tuple[float, float, float]:
    kwh = float(node_hours) * rates.idle_w / 1000 * rates.pue
    return kwh, kwh * rates.price_per_kwh, kwh * rates.co2_kg_per_kwh


def oracle_powered(demand: Floats, weight: Floats, wakes: int) -> tuple[Floats, float]:
    """Fewest powered node-steps without shortage and with at most `wakes` wake-ups; by dynamic programming, exact.

    demand: (n_steps,) highest of each step. weight: (n_steps,) what a powered node costs there, 0 where not scored.
    Between two wake-ups the best is to keep on, at each step, the highest demand up to the next wake-up. So the record
    is cut into wakes + 1 segments; costs of all segments that end at a step follow from one pass of running maxima.
    Returns the powered nodes of each possible number of wake-ups (wakes + 1,), and that of the last.
    """
    size = len(demand)
    best = np.full((wakes + 1, size + 1), np.inf)
    best[:, 0] = 0.0
    peaks = np.zeros(size)
    for end in range(1, size + 1):
        np.maximum(peaks[:end], demand[end - 1], out=peaks[:end])
        cost = np.cumsum((peaks[:end] * weight[:end])[::-1])[::-1]
        best[0, end] = cost[0]
        if wakes:
            best[1:, end] = (best[:-1, :end] + cost).min(axis=1)
            best[:, end] = np.minimum.accumulate(best[:, end])
    return best[:, size], float(best[-1, size])


def oracle_asleep(demand: Floats, total: Floats, is_usable: Bools, wakes: int) -> float:
    """Nodes asleep on average over the usable minutes, for one who knows the demand and wakes at most so often.

    demand, total: (n_minutes,) nodes. It never lets demand wait, and changes its mind every 5 minutes, or more rarely
    on a span of more than two weeks (so that there are at most 4,500 steps). With free choice of the minute, and with
    the shortage that others are allowed, slightly more could sleep. Nodes boot before they are needed, at no cost.
    """
    if not is_usable.any():
        return float("nan")
    width = 5 if len(demand) <= 5 * MOST_CELLS else STEP_MIN * max(1, -(-len(demand) // (STEP_MIN * MOST_CELLS)))
    size = -(-len(demand) // width)
    padded = np.zeros(size * width)
    padded[: len(demand)] = np.where(is_usable, np.minimum(np.ceil(demand), total), 0.0)
    weight = np.zeros(size * width)
    weight[: len(demand)] = is_usable
    _, powered = oracle_powered(padded.reshape(size, width).max(axis=1), weight.reshape(size, width).sum(axis=1), wakes)
    return float((total[is_usable].sum() - powered) / is_usable.sum())


@dataclass(frozen=True)
class JobDelays:
    """Delays by waking nodes. jobs: started in the scored minutes. delayed: how many of these, and for how long."""

    jobs: int
    delayed: int
    mean_min: float | None
    longest_min: int | None


def starts_of(runs: NodeRuns, start_s: int, end_s: int) -> tuple[Ints, Ints]:
    """Starts in [start_s, end_s), whole minutes, that took a node that was not in use, in order of time.

    Returns the minute of each, and the nodes in use right after. Part by part, so that memory is bounded.
    """
    minutes, levels = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for low_s, high_s in runs.windows(start_s, end_s):
        run, node, begin, until = runs.pairs(low_s - 1, high_s)  # a node that is free from low_s on was in use before
        begin, until, first = merged(node, begin, until)
        taken = np.unique(run[first])
        at_s = runs.start_s[taken[runs.start_s[taken] >= low_s]]
        begin, until = np.sort(begin), np.sort(until)
        levels.append(np.searchsorted(begin, at_s, side="right") - np.searchsorted(until, at_s, side="right"))
        minutes.append((at_s - start_s) // MINUTE_S)
    return np.concatenate(minutes), np.concatenate(levels)


def delays_of(jobs: int, starts: tuple[Ints, Ints], demand: Ints, short: Ints) -> JobDelays:
    """Delay the starts by the shortage. demand: (n_minutes,) nodes in use; short: of these, nodes that were not up.

    A run that takes a node is delayed while fewer nodes are up than were in use right after its start, until there are
    so many, or no shortage is left. It then runs as long as it did; nobody else is delayed by that.
    """
    up, ends, waits = demand - short, np.append(np.flatnonzero(short == 0), len(short)), []
    for minute, level in zip(*(values.tolist() for values in starts), strict=True):
        if short[minute] and level > up[minute]:
            end = int(ends[np.searchsorted(ends, minute)])
            enough = np.flatnonzero(up[minute:end] >= level)
            waits.append(int(enough[0]) if len(enough) else end - minute)
    return JobDelays(jobs, len(waits), float(np.mean(waits)) if waits else None, max(waits, default=None))


def delays_in(runs: NodeRuns, series: NodeSeries, rows: slice, shortage: Mapping[str, Ints]) -> dict[str, JobDelays]:
    """Delayed jobs of each controller over these minutes of the series; the oracle delays none."""
    usable = series.is_usable[rows]
    begin_s = int(series.start.astype("datetime64[s]").astype(np.int64)) + rows.start * MINUTE_S
    end_s = begin_s + len(usable) * MINUTE_S
    began = runs.start_s[(runs.start_s >= begin_s) & (runs.start_s < end_s)]
    jobs = int(usable[(began - begin_s) // MINUTE_S].sum())
    minute, level = starts_of(runs, begin_s, end_s)
    starts = minute[usable[minute]], level[usable[minute]]
    nodes = np.minimum(np.ceil(series.active[rows]), series.total[rows])
    demand = np.where(usable, nodes, 0).astype(np.int64)
    every = {**shortage, ORACLE: np.zeros_like(demand)}
    return {name: delays_of(jobs, starts, demand, np.where(usable, short, 0)) for name, short in every.items()}
