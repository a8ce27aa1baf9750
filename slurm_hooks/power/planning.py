"""What one run is to do, from what Slurm says, what is remembered, and what is forecast. Nothing is written or told.

Node sets that cannot be decided hold: nothing of them powers down, and the nodes in use and the warm minimum stay on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from advisor.decisions.power_nodes import NodeFlag, PowerLimits, PowerNode
from advisor.demand.features import STEP_MIN
from advisor.demand.forecast import HORIZON
from advisor.demand.model import PowerDecision, Spent
from almanac.actions_config import ActuatorName
from almanac.config import Config, NodeSet
from almanac.errors import CommandError, ConfigError, StoreError
from almanac.records import Counts
from slurm_hooks.power.actuators import exceptions_by_count
from slurm_hooks.power.folder import PowerFolder
from slurm_hooks.power.memory import PowerState
from slurm_hooks.power.nodes import Surroundings, power_nodes, reserved_before
from slurm_hooks.power.plan import (
    Failures,
    Kept,
    NodeSelection,
    Rules,
    failures_of,
    intended,
    kept_on,
    observed,
    powered_apart,
    select,
)
from slurm_hooks.power.settings import KeptOn, PowerSettings, joined, others, parse_exceptions, read_settings
from telemetry.slurm.backend import Node, PendingJob, SlurmBackend
from telemetry.slurm.hostlist import expand
from telemetry.slurm.node_sets import LiveDemand, live_demand, members

RESERVED_AHEAD_S = 3600
"""A node whose reservation starts within this time, and that of a boot, stays on; a sleeping one wakes."""
HORIZON_MIN = HORIZON * STEP_MIN


class DemandSource(Protocol):
    """Where decisions come from."""

    def run_times_s(self, pending: Sequence[PendingJob], now_s: int) -> Mapping[int, float]:
        """Return predicted run times (s) by job id; jobs without a prediction are left out. Raises StoreError."""
        ...

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        """Record the demand of this minute. Raises StoreError."""
        ...

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        """How many nodes to keep. No target, and why, where there is no model or no fresh demand. Raises StoreError."""
        ...


@dataclass(frozen=True)
class SetPlan:
    """What a run does with one node set. powered: nodes up or booting, busy ones included. target: None keeps what is
    on. is_hold: nothing may power down, for the reason given. quarantined: given up by an earlier run.
    forecast: (quantile, nodes) of the highest demand within the horizon.
    """

    node_set: str
    demand: LiveDemand
    powered: int
    target: int | None
    reason: str
    is_hold: bool
    chosen: NodeSelection
    failures: Failures
    quarantined: tuple[str, ...]
    kept: Kept
    limits: PowerLimits
    forecast: tuple[tuple[float, float], ...] = ()

    @property
    def acts(self) -> bool:
        failed = self.failures
        return bool(
            self.chosen.wake or self.chosen.power_down or failed.again or failed.back or failed.give_up or failed.lost
        )


@dataclass(frozen=True)
class PowerPlan:
    """What one run does. exceptions: the new SuspendExcNodes; None: it stays. memory: the state after the run.

    around: what the nodes were judged by. nodes: as Slurm showed them. held: why an operator holds almanac; "": not.
    """

    now_s: int
    actuator: ActuatorName
    settings: PowerSettings
    sets: tuple[SetPlan, ...]
    memory: PowerState
    around: Surroundings
    exceptions: str | None
    fault: str = ""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    held: str = ""


@dataclass(frozen=True)
class Planner:
    """Everything that a plan needs. clock: unix seconds."""

    backend: SlurmBackend
    config: Config
    folder: PowerFolder
    cluster: str
    source: DemandSource
    clock: Callable[[], float]

    def plan(self) -> PowerPlan:
        """What a run would do now; nothing is written, nobody is told. Raises CommandError, ConfigError."""
        now_s = int(self.clock())
        memory, fault = self.folder.load_or_fault(self.cluster)
        settings = read_settings(self.backend)
        listed = self.backend.nodes()
        exceptions = self._site_exceptions(settings, memory, listed)
        actuator = settings.actuator(self.config.power.actuator)
        around = self._surroundings(settings, exceptions, listed, now_s)
        around = replace(around, memory=memory.nodes, tiers=self.config.tiers, takes_any=actuator == "count")
        held = self.folder.hold_reason()
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

    def surroundings_now(self, plan: PowerPlan) -> Surroundings:
        """Surroundings of a plan's nodes, with Slurm's exceptions and reservations of now. Raises CommandError."""
        settings, listed = read_settings(self.backend), list(plan.nodes.values())
        exceptions = self._site_exceptions(settings, plan.memory, listed)
        now = self._surroundings(settings, exceptions, listed, int(self.clock()))
        return replace(plan.around, excluded=now.excluded, reserved_soon=now.reserved_soon)

    def _surroundings(
        self, settings: PowerSettings, exceptions: tuple[KeptOn, ...], listed: Sequence[Node], now_s: int
    ) -> Surroundings:
        ahead_s = RESERVED_AHEAD_S + settings.suspend_timeout_s + settings.resume_timeout_s
        return Surroundings(
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
        self, settings: PowerSettings, memory: PowerState, nodes: Sequence[Node]
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
        nodes: Mapping[str, Node],
        memory: PowerState,
        around: Surroundings,
        hold: str,
        is_memory_lost: bool,
        now_s: int,
    ) -> SetPlan:
        names = [each.name for each in power]
        rules = self._rules(node_set)
        ready, apart = powered_apart(power)
        decision = PowerDecision(None, hold)
        if not hold:
            past = memory.set_of(node_set.name)
            spent = Spent(memory.since_s or now_s, past.wakes_s, past.short_s)
            decision = self._decision(node_set, names, ready + apart, spent, now_s)
        chosen = select(power, decision.target, demand.active, rules, now_s)
        chosen = replace(chosen, wake=_with_due(chosen.wake, power, around))
        failures = Failures() if is_memory_lost else failures_of(names, nodes, memory)
        return SetPlan(
            node_set=node_set.name,
            demand=demand,
            powered=ready + apart,
            target=decision.target,
            reason=decision.reason,
            is_hold=bool(hold) or decision.target is None,
            chosen=chosen,
            failures=failures,
            quarantined=tuple(name for name in names if memory.of(name).quarantined_s is not None),
            kept=kept_on(power, chosen, rules.limits, now_s),
            limits=rules.limits,
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

    def _rules(self, node_set: NodeSet) -> Rules:
        power = self.config.power
        limits = PowerLimits(node_set.warm_minimum, power.cycles_per_day, power.cooldown_s)
        return Rules(limits, power.nodes_per_run)


def _with_due(wake_first: Sequence[str], power: Sequence[PowerNode], around: Surroundings) -> tuple[str, ...]:
    """And almanac's sleepers that have to be on: excluded since, or about to be reserved."""
    due = around.excluded | around.reserved_soon
    more = [each.name for each in power if each.flags == NodeFlag.ASLEEP and each.name in due]
    return tuple(dict.fromkeys((*wake_first, *more)))
