"""The plan of one run, from Slurm's nodes, the remembered state, and the forecast. Nothing is written or sent.

Node sets that cannot be decided hold: nothing of them powers down, and the nodes in use and the warm minimum stay on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from advisor.power.decide import NodeFlag, NodePlan, PowerLimits, PowerNode
from advisor.power.forecast import HORIZON, STEP_MIN
from advisor.power.lifecycle import usable_demand
from advisor.power.model import TAIL_MIN, PowerDecision, Spent
from almanac.actions_config import ActuatorName
from almanac.config import Config, NodeSet
from almanac.errors import CommandError, ConfigError, StoreError
from almanac.records import Counts
from almanac.units import format_duration
from slurm.backend import SlurmBackend
from slurm.hostlist import expand
from slurm.node_sets import LiveDemand, live_demand, members
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from slurm_hooks.nodes.engine import NodeEngine
from slurm_hooks.power.failures import failures_of
from slurm_hooks.power.nodes import (
    Failures,
    Kept,
    PowerState,
    PowerSurroundings,
    intended,
    kept_on,
    observed,
    power_nodes,
    powered_apart,
    reserved_before,
    select,
)
from slurm_hooks.power.settings import (
    KeptOn,
    PowerSettings,
    exceptions_by_count,
    joined,
    others,
    parse_exceptions,
    read_settings,
)
from telemetry.power.demand import append_counts, demand_series
from telemetry.power.series import NodeSeries
from telemetry.power.waits import pending_run_s
from telemetry.store.store import ClusterStore

RESERVED_AHEAD_S = 3600
"""A node whose reservation starts within this time, and that of a boot, stays on; a sleeping one wakes."""
HORIZON_MIN = HORIZON * STEP_MIN
MINUTE_S = 60
STALE_S = 1800
"""Age of demand data above which nothing powers down: three power runs without a count."""


class DemandSource(Protocol):
    """A source of decisions."""

    def run_times_s(self, pending: Sequence[QueuedJob], now_s: int) -> Mapping[int, float]:
        """Return predicted run times (s) by job id; jobs without a prediction are left out. Raises StoreError."""
        ...

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        """Record the demand of this minute. Raises StoreError."""
        ...

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        """The number of nodes to keep. Without a model or fresh demand: no target, and why. Raises StoreError."""
        ...


@dataclass(frozen=True)
class SetPlan:
    """The orders of a run for one node set. powered: nodes up or booting, busy ones included. target: None keeps
    what is on, for the reason given. quarantined: given up by an earlier run.
    forecast: (quantile, nodes) of the highest demand within the horizon. forecaster: the one in use, and why.
    """

    node_set: str
    demand: LiveDemand
    powered: int
    target: int | None
    reason: str
    chosen: NodePlan
    failures: Failures
    quarantined: tuple[str, ...]
    kept: Kept
    limits: PowerLimits
    forecast: tuple[tuple[float, float], ...] = ()
    forecaster: str = ""

    def orders(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes of each order, by its word in the record; orders about no node are left out."""
        chosen, failed = self.chosen, self.failures
        found = {
            "quarantine": failed.give_up, "power down again": failed.lost, "wake again": failed.again,
            "resume": failed.back, "wake": chosen.wake, "power down": chosen.power_down,
        }  # fmt: skip
        return {what: names for what, names in found.items() if names}

    @property
    def acts(self) -> bool:
        return bool(self.orders())


@dataclass(frozen=True)
class PowerPlan:
    """The orders of one run. exceptions: the new SuspendExcNodes; None: it stays. memory: the state after the run.

    around: what the nodes were judged by. nodes: as Slurm showed them. held: why an operator holds almanac; "": not.
    """

    now_s: int
    actuator: ActuatorName
    settings: PowerSettings
    sets: tuple[SetPlan, ...]
    memory: PowerState
    around: PowerSurroundings
    exceptions: str | None
    fault: str = ""
    nodes: Mapping[str, SlurmNode] = field(default_factory=dict)
    held: str = ""


@dataclass(frozen=True)
class PowerPlanner:
    """Everything that a plan needs."""

    engine: NodeEngine[PowerState]
    config: Config
    source: DemandSource

    @property
    def backend(self) -> SlurmBackend:
        return self.engine.backend

    def plan(self) -> PowerPlan:
        """Plan a run; nothing is written or sent. Raises CommandError, ConfigError."""
        now_s, folder = self.engine.now_s(), self.engine.folder
        memory, fault = folder.load_or_fault(self.engine.cluster)
        settings = read_settings(self.backend)
        listed = self.backend.nodes()
        exceptions = self._site_exceptions(settings, memory, listed)
        actuator = settings.actuator(self.config.power.actuator)
        around = self._surroundings(settings, exceptions, listed, now_s)
        around = replace(around, memory=memory.nodes, tiers=self.config.tiers, takes_any=actuator == "count")
        held = folder.hold_reason()
        hold = held or fault or self._accounting_fault()
        pending = self.backend.pending(Counts())
        nodes = {node.name: node for node in listed}
        sets: list[SetPlan] = []
        sets_of: dict[str, str] = {}
        for node_set in self.config.node_sets:
            names = members(node_set, listed)
            self._require_apart(names, sets_of, node_set)
            demand = live_demand(names, listed, pending)
            power = power_nodes(names, nodes, around, now_s)
            memory = observed(memory, node_set.name, nodes, power, now_s)
            plan = self._plan_set(node_set, demand, power, nodes, memory, around, hold, bool(fault), now_s)
            # By count, Slurm picks the nodes: they are counted when they are seen asleep.
            told = plan.chosen if actuator == "names" else replace(plan.chosen, power_down=())
            memory = intended(memory, node_set.name, told, plan.failures, plan.target, now_s)
            memory = memory.with_set(node_set.name, replace(memory.set_of(node_set.name), forecast=plan.forecast))
            sets.append(plan)
        wanted = exceptions_by_count(exceptions, (each.kept for each in sets)) if actuator == "count" else None
        memory = replace(memory, run_s=now_s, since_s=memory.since_s or now_s)
        if wanted is not None:
            memory = replace(memory, exceptions=joined(exceptions), told=(*memory.told[-1:], wanted))
        return PowerPlan(now_s, actuator, settings, tuple(sets), memory, around, wanted, fault, nodes, held)

    def surroundings_now(self, plan: PowerPlan) -> PowerSurroundings:
        """Surroundings of a plan's nodes, with Slurm's exceptions and reservations of now. Raises CommandError."""
        settings, listed = read_settings(self.backend), list(plan.nodes.values())
        exceptions = self._site_exceptions(settings, plan.memory, listed)
        now = self._surroundings(settings, exceptions, listed, self.engine.now_s())
        return replace(plan.around, excluded=now.excluded, reserved_soon=now.reserved_soon)

    def _surroundings(
        self, settings: PowerSettings, exceptions: tuple[KeptOn, ...], listed: Sequence[SlurmNode], now_s: int
    ) -> PowerSurroundings:
        ahead_s = RESERVED_AHEAD_S + settings.suspend_timeout_s + settings.resume_timeout_s
        return PowerSurroundings(
            excluded=replace(settings, exceptions=exceptions).excluded(listed) | self._excluded(),
            reserved_soon=reserved_before(self.backend.reservations(), now_s, now_s + ahead_s),
        )

    def _accounting_fault(self) -> str:
        try:
            self.backend.require_accounting()
        except CommandError as error:
            return f"slurmdbd does not answer: {error}"
        return ""

    def _site_exceptions(
        self, settings: PowerSettings, memory: PowerState, nodes: Sequence[SlurmNode]
    ) -> tuple[KeptOn, ...]:
        """SuspendExcNodes without almanac's entries: as before almanac wrote there, or as it stands where slurmctld has
        read slurm.conf again, or an operator has changed it.
        """
        is_ours = memory.exceptions is not None and joined(settings.exceptions) in memory.told
        found = parse_exceptions(memory.exceptions or "") if is_ours else settings.exceptions
        own = {name for each in self.config.node_sets for name in members(each, nodes)}
        return others(found, own)

    def _excluded(self) -> frozenset[str]:
        """Raises ConfigError where `exclude` is no host list."""
        found: set[str] = set()
        for each in self.config.node_sets:
            try:
                found.update(expand(each.exclude))
            except ValueError as error:
                raise ConfigError(f"node_sets.{each.name}.exclude: {error}", "give a host list") from error
        return frozenset(found)

    @staticmethod
    def _require_apart(names: Sequence[str], sets_of: dict[str, str], node_set: NodeSet) -> None:
        """Raises ConfigError where a node is in two node sets: each would undo what the other does."""
        for name in names:
            if (other := sets_of.setdefault(name, node_set.name)) != node_set.name:
                raise ConfigError(
                    f"node {name} is in the node sets {other} and {node_set.name}", "put each node in one node set"
                )

    def _plan_set(
        self,
        node_set: NodeSet,
        demand: LiveDemand,
        power: Sequence[PowerNode],
        nodes: Mapping[str, SlurmNode],
        memory: PowerState,
        around: PowerSurroundings,
        hold: str,
        is_memory_lost: bool,
        now_s: int,
    ) -> SetPlan:
        names = [each.name for each in power]
        power_config = self.config.power
        limits = PowerLimits(
            node_set.warm_minimum, power_config.cycles_per_day, power_config.cooldown_s, power_config.nodes_per_run
        )
        ready, apart = powered_apart(power)
        decision = PowerDecision(None, hold)
        if not hold:
            past = memory.set_of(node_set.name)
            spent = Spent(past.wakes_s, past.all_boots(), past.short_s)
            decision = self._decision(node_set, names, ready + apart, spent, now_s)
        chosen = select(power, decision.target, demand.active, limits, now_s)
        chosen = replace(chosen, wake=_with_due(chosen.wake, power, around))
        failures = Failures() if is_memory_lost else failures_of(names, nodes, memory, now_s)
        return SetPlan(
            node_set=node_set.name,
            demand=demand,
            powered=ready + apart,
            target=decision.target,
            reason=decision.reason,
            chosen=chosen,
            failures=failures,
            quarantined=tuple(name for name in names if memory.of(name).quarantined_s is not None),
            kept=kept_on(power, chosen, limits, now_s),
            limits=limits,
            forecaster=decision.used,
            forecast=tuple(
                (quantile, nodes) for (minutes, quantile), nodes in decision.forecast.items() if minutes == HORIZON_MIN
            ),
        )

    def _decision(
        self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int
    ) -> PowerDecision:
        """The source's decision. A store that cannot be read holds."""
        try:
            return self.source.decide(node_set, names, powered, spent, now_s)
        except StoreError as error:
            return PowerDecision(None, f"{error}; {error.hint}")


def _with_due(wake_first: Sequence[str], power: Sequence[PowerNode], around: PowerSurroundings) -> tuple[str, ...]:
    """And almanac's sleepers that have to be on: excluded since, or about to be reserved."""
    due = around.excluded | around.reserved_soon
    more = [each.name for each in power if each.flags == NodeFlag.ASLEEP and each.name in due]
    return tuple(dict.fromkeys((*wake_first, *more)))


@dataclass(frozen=True)
class StoredDemand:
    """A DemandSource on a store."""

    store: ClusterStore
    config: Config

    def run_times_s(self, pending: Sequence[QueuedJob], now_s: int) -> Mapping[int, float]:
        return pending_run_s(self.store, pending, now_s)

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        append_counts(self.store, node_set.name, now_s, demand)

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        trained, why_not = usable_demand(self.store.models_dir, node_set, now_s)
        if trained is None:
            return PowerDecision(None, why_not)
        end_s = (now_s // MINUTE_S + 1) * MINUTE_S
        start_s = end_s - TAIL_MIN * MINUTE_S
        series = demand_series(self.store, node_set, names, start_s, end_s)
        if stale := stale_reason(series, end_s):
            return PowerDecision(None, stale)
        return replace(trained.model.decide(series, powered, spent), used=trained.model.reason())


def stale_reason(series: NodeSeries, end_s: int) -> str:
    """Return why demand is too old to power down by; "" if it is fresh."""
    usable = np.flatnonzero(series.is_usable)
    if not len(usable):
        return "no demand is known: run `almanac ingest`"
    begin_s = int(series.start.astype("datetime64[s]").astype(np.int64))
    age_s = end_s - (begin_s + (int(usable[-1]) + 1) * MINUTE_S)
    if age_s <= STALE_S:
        return ""
    return f"demand is {format_duration(age_s)} old, the limit is {format_duration(STALE_S)}: run `almanac ingest`"
