"""Train the demand model of a node set, and judge it later: its age, its forecasts since, and the budget spent."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from advisor.duration.model import SEED
from advisor.from_store import MAX_AGE_DAYS
from advisor.power.decide import Budget
from advisor.power.forecast import (
    DAY,
    QUANTILE,
    STEP_MIN,
    Floats,
    Steps,
    changes_of,
    load_holidays,
    pinball,
    steps_of,
)
from advisor.power.model import DemandModel, train_demand
from advisor.power.replay import Plant
from advisor.power.versions import TrainedDemand, demand_versions, load_demand, save_demand, selection_of
from advisor.version_folders import KEEP_VERSIONS
from almanac.config import NodeSet, Power
from almanac.errors import AlmanacError, NoModelError
from almanac.units import DAY_S
from telemetry.power.demand import NodeUse, demand_series, load_node_use
from telemetry.power.series import NodeSeries
from telemetry.site import Site

TRAIN_DAYS = 120
"""Older demand is not trained on: sites change."""
WINDOW_DAYS = 7
"""Days whose forecasts and wake-ups are judged."""
LEAST_STEPS = 3 * DAY
"""Fewer judged decisions: nothing is said."""
DRIFT_BY = 2.0
MAX_LOST_COVERAGE = 0.15
LEAST_LOSS = 0.25
"""Nodes. A smaller loss at the training counts as this much: demand that did not change proves little. A smaller loss
since is no harm.
"""
OVER_BUDGET = 1.5
FEW_BOOTS, FEW_WAKES, FEW_SHORT_MIN = 5, 3, 30
"""A budget exceeded by less is no alarm: a count every 10 minutes knows short minutes in tens."""


def faults_of_demand(trained: TrainedDemand, node_set: NodeSet, now_s: int) -> list[str]:
    """Say why a demand model must not be used at now_s, in words; empty if it may."""
    faults = []
    age_days = (now_s - trained.trained_s) / DAY_S
    if age_days < -1:
        faults.append(f"trained {-age_days:.0f} days in the future, by a clock that was ahead")
    if age_days > MAX_AGE_DAYS:
        faults.append(f"trained {age_days:.0f} days ago, the limit is {MAX_AGE_DAYS}")
    if trained.selection != selection_of(node_set):
        faults.append(f"trained for {trained.selection}, and the node set is now {selection_of(node_set)}")
    return faults


def usable_demand(models_dir: Path, node_set: NodeSet, now_s: int) -> tuple[TrainedDemand | None, str]:
    """The model to decide by, or None and why there is none, with what to do."""
    try:
        trained = load_demand(models_dir, node_set.name)
    except AlmanacError as error:
        return None, f"{error}; {error.hint}"
    if trained is None:
        return None, f"no model is trained for node set {node_set.name} (`almanac doctor` says why)"
    faults = faults_of_demand(trained, node_set, now_s)
    return (None, f"{'; '.join(faults)}; run `almanac train`") if faults else (trained, "")


@dataclass(frozen=True)
class DemandDrift:
    """The accuracy of the forecasts since they were made. days: decisions judged.

    loss: mean pinball loss, nodes. expected_loss: that of the validation spans. coverage: share of the demand at or
    below the forecast, which is of the quantile QUANTILE. alarms: in words; empty if all is well.
    """

    days: float
    loss: float
    expected_loss: float
    coverage: float
    alarms: tuple[str, ...]


def drift_of_demand(versions: Sequence[TrainedDemand], series: NodeSeries, now_s: int) -> DemandDrift | None:
    """Judge the forecasts of the last WINDOW_DAYS, each by the version that was the newest then.

    series: demand of the node set up to now, from WINDOW_DAYS and the longest lag before. None if less than three days
    can be judged.
    """
    if not versions:
        return None
    steps = steps_of(series)
    forecasts, expected = _as_made(versions, steps, now_s)
    actual = changes_of(steps)
    is_known = ~np.isnan(actual - forecasts)
    if is_known.sum() < LEAST_STEPS:
        return None
    loss, before = pinball(actual[is_known], forecasts[is_known]), float(np.nanmean(expected[is_known]))
    coverage = float((actual <= forecasts)[is_known].mean())
    return DemandDrift(float(is_known.sum() / DAY), loss, before, coverage, tuple(_alarms(loss, before, coverage)))


def _as_made(versions: Sequence[TrainedDemand], steps: Steps, now_s: int) -> tuple[Floats, Floats]:
    """Forecasts of each step by the newest version of its time, NaN outside the window; and their expected losses."""
    ordered = sorted(versions, key=lambda one: one.trained_s)
    times_s = steps.start.astype("datetime64[s]").astype(np.int64) + np.arange(len(steps)) * STEP_MIN * 60
    forecasts, expected = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    ends_s = [*(one.trained_s for one in ordered[1:]), now_s]
    for trained, end_s in zip(ordered, ends_s, strict=True):
        begin_s = max(trained.trained_s, now_s - WINDOW_DAYS * DAY_S)
        is_own = (times_s >= begin_s) & (times_s < min(end_s, now_s))
        if is_own.any():
            forecasts[is_own] = trained.model.forecaster.changes(steps)[is_own]
            expected[is_own] = trained.model.used.loss
    return forecasts, expected


def _alarms(loss: float, before: float, coverage: float) -> list[str]:
    found = []
    if loss > DRIFT_BY * max(before, LEAST_LOSS):
        found.append(
            f"the forecast's pinball loss was {loss:.2f} nodes in the last {WINDOW_DAYS} days, {before:.2f} at training"
        )
    if coverage < QUANTILE - MAX_LOST_COVERAGE and loss > LEAST_LOSS:
        found.append(f"demand stayed within the {QUANTILE:.0%} forecast {coverage:.0%} of the time")
    return found


def budget_of(power: Power, nodes: int) -> Budget:
    """The budget of [power] for a node set of so many nodes."""
    wakes = power.wakes_per_day
    return Budget(power.boots_per_node * nodes, power.short_min_per_day, None if wakes < 0 else wakes)


def typical_nodes(series: NodeSeries) -> int:
    """Median number of nodes of the set."""
    return round(float(np.nanmedian(series.total)))


def budget_alarms(use: NodeUse, power: Power) -> list[str]:
    """Name what exceeds the budget of [power] by far, in words, over the known time of these counts."""
    found = []
    nodes = use.total_hours * 3600 / use.known_s if use.known_s else 0.0
    budget = budget_of(power, round(nodes))
    for spent, a_day, few, words in (
        (use.boots, budget.boots_per_day, FEW_BOOTS, "node boots"),
        (len(use.wake_times_s), budget.wakes_per_day, FEW_WAKES, "wake-ups"),
        (use.short_min, budget.short_min_per_day, FEW_SHORT_MIN, "short minutes"),
    ):
        allowed = math.inf if a_day is None else a_day * use.known_days
        if spent > OVER_BUDGET * allowed and spent - allowed >= few:
            found.append(f"{spent:.0f} {words} in {use.known_days:.1f} days, the budget is {a_day:g} a day")
    return found


def trimmed(series: NodeSeries) -> NodeSeries:
    """The series without unusable minutes at its begin and end: before the record began nothing is known."""
    known = np.flatnonzero(series.is_usable)
    first, end = (int(known[0]), int(known[-1]) + 1) if len(known) else (0, 0)
    return series.part(first, end)


@dataclass(frozen=True)
class DemandTraining:
    """The result of training one node set. since_s, until_s: span of the record.

    drift: alarms about the forecasts and the budget of the last days, in words. lines: how good the new model is.
    """

    node_set: str
    version: str
    since_s: int
    until_s: int
    drift: tuple[str, ...]
    lines: tuple[str, ...]


def train_node_set(site: Site, node_set: NodeSet, names: Collection[str]) -> DemandTraining:
    """Train, and save a new version. names: nodes of the set.

    Raises NoModelError, which says how much data is needed, and StoreError.
    """
    if not names:
        raise NoModelError("it has no nodes", "correct its nodes, feature, or partition")
    store, config, now_s = site.store, site.config, site.now_s()
    models_dir = store.models_dir
    series = demand_series(store, node_set, names, now_s - TRAIN_DAYS * DAY_S, now_s)
    versions = _usable(models_dir, node_set)
    found = drift_of_demand(versions, series, now_s)
    drift = found.alarms if found else ()
    record = trimmed(series)
    if len(record) and not np.nanmax(record.active):
        raise NoModelError(
            f"none of its {len(names)} nodes ({min(names)}, ...) was in use in {len(record) / 1440:.1f} days",
            "compare their names with those of `sacct -a -X -o NodeList`",
        )
    usable = [each for each in versions if not faults_of_demand(each, node_set, now_s)]
    try:
        model = train_demand(
            record, budget_of(config.power, len(names)), seed=SEED, plant=Plant.configured(config.power),
            holidays=load_holidays(config.power.holidays), before=usable[-1].model if usable else None,
        )  # fmt: skip
    except ValueError as error:
        raise NoModelError(
            str(error), "its model is trained once there is more; until then, no node is powered down"
        ) from error
    since_s = int(record.start.astype("datetime64[s]").astype(np.int64))
    span_s = since_s, since_s + 60 * len(record)
    version = save_demand(models_dir, node_set, model, now_s, span_s, drift, KEEP_VERSIONS)
    use = load_node_use(store, (now_s - WINDOW_DAYS * DAY_S, now_s)).get(node_set.name)
    alarms = *drift, *(budget_alarms(use, config.power) if use else ())
    return DemandTraining(node_set.name, version, *span_s, alarms, tuple(describe(model)))


def _usable(models_dir: Path, node_set: NodeSet) -> list[TrainedDemand]:
    """The versions on disk that can be read; damaged ones are replaced without a word."""
    try:
        return [each.trained for each in demand_versions(models_dir, node_set.name) if each.trained]
    except AlmanacError:
        return []


def describe(model: DemandModel) -> list[str]:
    """Describe a model for a reader: its forecast and why, its budget, and its notes."""
    return [f"forecast: {model.reason()}; {model.used.use:.0%} of the budget used", *model.notes]
