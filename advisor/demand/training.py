"""Train the demand model of one node set on the store, and say how good it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from advisor.decisions.power import Budget
from advisor.demand.features import STEP_MIN, load_holidays
from advisor.demand.forecast import Skill
from advisor.demand.lifecycle import WINDOW_DAYS, budget_alarms, drift_of_demand, trimmed
from advisor.demand.model import DemandModel, train_demand
from advisor.demand.versions import TrainedDemand, demand_versions, save_demand
from advisor.duration.trees import SEED
from advisor.evaluation.power_replay import Plant
from advisor.version_folders import KEEP_VERSIONS
from almanac.config import Config, NodeSet
from almanac.errors import AlmanacError, NoModelError
from almanac.units import DAY_S
from telemetry.nodes.counts import demand_series
from telemetry.nodes.use import load_node_use
from telemetry.store.cluster_store import ClusterStore

TRAIN_DAYS = 120
"""Older demand is not trained on: sites change."""


@dataclass(frozen=True)
class DemandTraining:
    """What the training of one node set came to. since_s, until_s: span of the record.

    drift: alarms about the forecasts and the budget of the last days, in words. lines: how good the new model is.
    """

    node_set: str
    version: str
    since_s: int
    until_s: int
    drift: tuple[str, ...]
    lines: tuple[str, ...]


def train_node_set(
    store: ClusterStore, node_set: NodeSet, names: Collection[str], config: Config, now_s: int
) -> DemandTraining:
    """Train, and save a new version. names: nodes of the set.

    Raises NoModelError, which says how much data is needed, and StoreError.
    """
    if not names:
        raise NoModelError("it has no nodes", "correct its nodes, feature, or partition")
    models_dir = store.models_dir
    series = demand_series(store, node_set, names, now_s - TRAIN_DAYS * DAY_S, now_s)
    found = drift_of_demand(_usable(models_dir, node_set), series, now_s)
    drift = found.alarms if found else ()
    record = trimmed(series)
    if len(record) and not np.nanmax(record.active):
        raise NoModelError(
            f"none of its {len(names)} nodes ({min(names)}, ...) was in use in {len(record) / 1440:.1f} days",
            "compare their names with those of `sacct -a -X -o NodeList`",
        )
    budget = Budget(config.power.wakeups_per_day, config.power.short_min_per_day)
    try:
        model = train_demand(
            record, budget, seed=SEED, plant=Plant.configured(config.power),
            holidays=load_holidays(config.power.holidays),
        )  # fmt: skip
    except ValueError as error:
        raise NoModelError(
            str(error), "its model is trained once there is more; until then, no node is powered down"
        ) from error
    since_s = int(record.start.astype("datetime64[s]").astype(np.int64))
    span_s = since_s, since_s + 60 * len(record)
    version = save_demand(models_dir, node_set, model, now_s, span_s, drift, KEEP_VERSIONS)
    alarms = *drift, *_over_budget(store, node_set, config, now_s)
    return DemandTraining(node_set.name, version, *span_s, alarms, tuple(describe(model)))


def _over_budget(store: ClusterStore, node_set: NodeSet, config: Config, now_s: int) -> list[str]:
    use = load_node_use(store, (now_s - WINDOW_DAYS * DAY_S, now_s)).get(node_set.name)
    return budget_alarms(use, config.power) if use else []


def _usable(models_dir: Path, node_set: NodeSet) -> list[TrainedDemand]:
    """The versions on disk that can be read; damaged ones are replaced without a word."""
    try:
        return [each.trained for each in demand_versions(models_dir, node_set.name) if each.trained]
    except AlmanacError:
        return []


def describe(model: DemandModel) -> list[str]:
    """What a reader has to know of a model: whether its forecast is used, its losses, and its notes."""
    skills = model.forecaster.skills
    lost = [skill for skill in skills if not skill.is_model_used]
    losses = ", ".join(f"{name} {_mean(skills, name):.2f}" for name in ("persistence", "seasonal", "shuffled"))
    compared = f"mean pinball loss {_mean(skills, 'model'):.2f} nodes, {losses}"
    if not lost:
        return [f"the forecast beats its baselines: {compared}", *model.notes]
    named = ", ".join(f"{skill.horizon * STEP_MIN / 60:g} h at {skill.quantile:g}: {skill.used}" for skill in lost)
    said = f"the forecast does not beat its baselines at {len(lost)} of {len(skills)} horizons and quantiles"
    return [f"{said}, and a baseline is used there ({named}); {compared}", *model.notes]


def _mean(skills: Sequence[Skill], name: str) -> float:
    return float(np.nanmean([getattr(skill, name) for skill in skills]))
