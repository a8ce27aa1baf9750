"""Power controllers side by side on a node series: trained, then tuned, then scored, each on later minutes.

The scores: nodes asleep, energy saved, delayed jobs, and the best that was possible (the oracle).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from advisor.backtest import Ints, MethodComparison, compare_methods, training_times
from advisor.power.choice import REFIT_STEPS, ForecastTrial, best_within
from advisor.power.decide import Budget, Controller, ForecastController, ForecastSettings, views_of
from advisor.power.forecast import (
    DAY,
    PERSISTENCE,
    SHUFFLED,
    STEP_MIN,
    Floats,
    coming,
    expected_demand,
    fit_forecaster,
    rolling_forecasts,
    shuffled,
    steps_of,
)
from advisor.power.model import FIRST_DAYS, DemandModel, fitted_model, trained_trials
from advisor.power.replay import (
    DAY_MIN,
    KeepWarm,
    PaperConstants,
    PaperController,
    Plant,
    PowerReplay,
    Vanilla,
    replay,
)
from almanac.errors import NoModelError, RequestError
from telemetry.power.series import MINUTE_S, NodeRuns, NodeSeries, merged

OURS, KEEP_WARM, ORACLE = "almanac", "keep warm", "oracle"
PAPER, TEXT, LEAKY = "CES (paper)", "CES (text)", "CES (leaky)"
"""The paper's algorithm with the constants of the authors' code, with those of the paper's text, and with the former
told the demand that really came. In the authors' code the forecast of the next hours uses demand up to an hour before
each of them, so after the decision."""
OWN_START = ", warm"
"""Ends the name of a CES that begins as its authors' code does: with its buffer above the nodes in use."""
LEAST_TUNE_DAYS, LEAST_SCORE_DAYS = 3, 1

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
    nodes in use above those powered, likewise. trials: the kinds of forecast before the scored span; used, reason: the
    kind that almanac uses, and why. forecast: of the highest demand ahead, nodes, one a step. notes: remarks for the
    reader, such as a budget that nothing kept on the tuning span.
    """

    days: float
    utilization_before: float
    scores: list[PowerScore]
    trials: list[ForecastTrial]
    used: str
    reason: str
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
        trials = trained_trials(series, steps, budget, plant, seed, days, first=first, end=score)
        model = fitted_model(steps, score, budget, trials, seed, days)
        expected = {size: expected_demand(steps, size, score, seed, days) for size in sizes}
    except ValueError as error:
        raise NoModelError(f"nothing can be trained: {error}", "train on a longer span of the record") from error
    tick(1, 3, "forecasting")
    run = partial(replay, series, budget=budget, plant=plant)
    refits = [int(step) for step in training_times(score, end - DAY, REFIT_STEPS)]
    forecasts = {
        each.kind: rolling_forecasts(
            steps, [(step, fit_forecaster(steps, step, seed, each.kind, days)) for step in refits], end
        )
        for each in trials
    }  # fmt: skip
    tick(2, 3, "replaying")
    still = 0 * steps.recent
    told = {size: coming(steps.highest, size, np.mean) for size in expected}
    scored, leaky = (views_of(steps, still, score, end, each) for each in (expected, told))
    warm: list[Controller] = [KeepWarm(max(1, round(w * total))) for w in WARM]
    replays = {
        "vanilla": run(scored, Vanilla()),
        KEEP_WARM: run(scored, best_within(series, views_of(steps, still, first, score), warm, budget, plant)),
    }
    for name, views, constants in ((PAPER, scored, paper), (TEXT, scored, text), (LEAKY, leaky, paper)):
        replays[name] = run(views, PaperController(constants, name))
        replays[name + OWN_START] = run(views, PaperController(constants, name), spare=constants.buffer)
    for each in trials:
        views = views_of(steps, forecasts[each.kind][1], score, end)
        replays[each.kind] = run(views, ForecastController(each.settings, each.kind))
    used = model.used.kind
    changes, moves = forecasts[used]
    if used != PERSISTENCE:
        views = views_of(steps, shuffled(moves, seed), score, end)
        replays[SHUFFLED] = run(views, ForecastController(model.settings, SHUFFLED))
    replays[OURS] = replays[used]
    tick(3, 3, "scoring")
    return _summary(
        series, spans, replays, (steps.recent + changes)[score:end], model, list(model.notes), rates or Rates()
    )


def _summary(
    series: NodeSeries, spans: Spans, replays: dict[str, PowerReplay], level: Floats, model: DemandModel,
    notes: list[str], rates: Rates,
) -> PowerBacktest:  # fmt: skip
    rows = slice(spans.score, spans.end)
    usable, total, active = series.is_usable[rows], series.total[rows], series.active[rows]
    if not usable.any():
        raise RequestError("the scored span has no usable minute", "choose another span with -S and -E")
    days = float(usable.sum() / DAY_MIN)
    slept = {name: (total - replays[name].powered)[usable] for name in compared(replays)}
    scores = [score_replay(name, run, usable, total, active, rates) for name, run in replays.items()]
    boots = sum(replays[OURS].wakes)
    asleep = oracle_asleep(active, total, usable, boots)
    scores.append(
        PowerScore(
            ORACLE, asleep, boots, boots / days, None, None, 0.0, None, *saved(asleep * usable.sum() / 60, rates)
        )
    )
    return PowerBacktest(
        days=days, utilization_before=float((active[usable] / total[usable]).mean()), scores=scores,
        trials=list(model.trials), used=model.used.kind,
        reason=model.reason(), settings=model.settings, notes=notes, spans=spans,
        timeline={name: run.powered for name, run in replays.items()}, forecast=level,
        shortage={name: run.short for name, run in replays.items()},
        comparison=compare_methods("nodes asleep", OURS, slept, np.flatnonzero(usable) * MINUTE_S,
                                   tuple({SHUFFLED} & set(slept))),
    )  # fmt: skip


def compared(replays: Collection[str]) -> tuple[str, ...]:
    """Controllers that almanac is compared with, itself first: keep warm, and persistence and the shuffled forecast
    where another forecast is used.
    """
    return (OURS, KEEP_WARM, *((PERSISTENCE, SHUFFLED) if SHUFFLED in replays else ()))


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

    asleep: nodes, on average. boots: nodes booted. wakes: None for the oracle, which knows no wake-ups. utilization:
    nodes in use / nodes powered, mean over minutes. kwh, money and co2_kg are of the whole span, saved against all
    nodes on.
    """

    controller: str
    asleep: float
    boots: int
    boots_per_day: float
    wakes: int | None
    wakes_per_day: float | None
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
        controller=name, asleep=float(asleep.mean()), boots=sum(run.wakes), boots_per_day=sum(run.wakes) / days,
        wakes=len(run.wakes), wakes_per_day=len(run.wakes) / days,
        short_min_per_day=float((run.short[usable] > 0).sum()) / days, utilization=float(in_use.mean()),
        **dict(zip(("kwh", "money", "co2_kg"), saved(float(asleep.sum()) / 60, rates), strict=True)),
    )  # fmt: skip


def saved(node_hours: float, rates: Rates) -> tuple[float, float, float]:
    kwh = float(node_hours) * rates.idle_w / 1000 * rates.pue
    return kwh, kwh * rates.price_per_kwh, kwh * rates.co2_kg_per_kwh


def oracle_asleep(demand: Floats, total: Floats, is_usable: Bools, boots: int) -> float:
    """Most nodes asleep on average over the usable minutes, without shortage and with at most so many boots; exact.

    demand, total: (n_minutes,) nodes. All nodes are on at first, and boot before they are needed, at no cost. The k-th
    node is needed while demand is at least k. It can sleep in each gap between, for one boot, and after the last for
    none. So the best is to sleep in the longest gaps of all nodes.
    """
    if not is_usable.any():
        return float("nan")
    needed = np.where(is_usable, np.minimum(np.ceil(demand), total), 0.0)
    free, gaps = 0, [np.empty(0, dtype=np.int64)]
    for node in range(1, int(np.nanmax(total[is_usable])) + 1):
        passed = np.concatenate([[0], np.cumsum(is_usable & (total >= node))])
        at = np.flatnonzero(needed >= node)
        if len(at):
            gaps.append(passed[at] - passed[np.concatenate([[0], at[:-1] + 1])])
        free += int(passed[-1] - (passed[at[-1] + 1] if len(at) else 0))
    longest = np.sort(np.concatenate(gaps))[::-1][: max(0, boots)]
    return float((free + longest.sum()) / is_usable.sum())


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
