"""Decisions from the store: the demand of the last days, and the trained model of each node set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.demand.lifecycle import usable_demand
from advisor.demand.model import TAIL_MIN, PowerDecision, Spent
from almanac.config import Config, NodeSet
from almanac.units import format_duration
from telemetry.nodes.counts import append_counts, demand_series
from telemetry.nodes.series import NodeSeries
from telemetry.run_times import pending_run_s
from telemetry.slurm.backend import PendingJob
from telemetry.slurm.node_sets import LiveDemand
from telemetry.store.cluster_store import ClusterStore

MINUTE_S = 60
STALE_S = 1800
"""Age of demand data above which nothing powers down: three power runs without a count."""


@dataclass(frozen=True)
class StoredDemand:
    """A DemandSource on a store."""

    store: ClusterStore
    config: Config

    def run_times_s(self, pending: Sequence[PendingJob], now_s: int) -> Mapping[int, float]:
        return pending_run_s(self.store, pending, now_s)

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        append_counts(self.store, node_set.name, now_s, demand)

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        trained, why_not = usable_demand(self.store.models_dir, node_set, self.config, now_s)
        if trained is None:
            return PowerDecision(None, why_not)
        end_s = (now_s // MINUTE_S + 1) * MINUTE_S
        start_s = end_s - TAIL_MIN * MINUTE_S
        series = demand_series(self.store, node_set, names, start_s, end_s)
        if stale := stale_reason(series, end_s):
            return PowerDecision(None, stale)
        return trained.model.decide(series, powered, spent)


def stale_reason(series: NodeSeries, end_s: int) -> str:
    """Why demand is too old to power down by; "" where it is fresh."""
    usable = np.flatnonzero(series.is_usable)
    if not len(usable):
        return "no demand is known: run `almanac ingest`"
    begin_s = int(series.start.astype("datetime64[s]").astype(np.int64))
    age_s = end_s - (begin_s + (int(usable[-1]) + 1) * MINUTE_S)
    if age_s <= STALE_S:
        return ""
    return f"demand is {format_duration(age_s)} old, the limit is {format_duration(STALE_S)}: run `almanac ingest`"
