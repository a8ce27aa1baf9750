"""Slurm's nodes as the selection sees them, what almanac remembers of them, and the orders of one run to a node set.

Slurm is asked first: whose sleep it is stands in the node's reason. The state holds what Slurm does not keep: power
cycles of the last day, failed wake-ups, wake-ups of each node set, and what SuspendExcNodes was before almanac wrote
it. Every state is a flag, and what is not known is never acted on. Orders are pure: first what earlier runs began
(nodes that did not wake), then the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from advisor.power.decide import NodeFlag, NodePlan, PowerLimits, PowerNode, may_power_down, select_nodes
from almanac.config import Tier
from almanac.tres import parse_gpus
from almanac.units import DAY_S
from slurm.backend import Reservation
from slurm.nodes import SlurmNode
from slurm.states import (
    MAINTENANCE,
    NODE_BUSY,
    NODE_DRAINED,
    NODE_REBOOTING,
    NODE_TOLD_OFF,
    NODE_UP,
    NODE_WAKING,
    without_fulfilled,
)
from slurm_hooks.nodes.engine import Count, NodesState

MAX_TIMES = 2000
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
REASON = "almanac: power saving"
"""Reason of the nodes that almanac powers down. Slurm keeps it until the node wakes, so that whose sleep it is survives
a lost state file."""
DID_NOT_WAKE = "almanac: did not wake"
"""Begins the reason of a quarantined node."""
_NO_FLAG = NodeFlag(0)
_MEANINGS: tuple[tuple[frozenset[str], NodeFlag], ...] = (
    (frozenset({"IDLE", "CLOUD", "DYNAMIC_NORM"}), _NO_FLAG),
    (NODE_BUSY | {"PLANNED", "BLOCKED"}, NodeFlag.BUSY),
    (frozenset({"RESERVED"}), NodeFlag.RESERVED),
    (MAINTENANCE | NODE_REBOOTING, NodeFlag.MAINTENANCE),
    (NODE_DRAINED | {"FAIL"}, NodeFlag.DRAINED),
    (frozenset({"DOWN", "ERROR", "INVALID_REG", "NOT_RESPONDING"}), NodeFlag.DOWN),
    (frozenset({"POWERED_DOWN"}), NodeFlag.ASLEEP),
    (NODE_TOLD_OFF | {"POWERING_DOWN"}, NodeFlag.ASLEEP | NodeFlag.POWERING_DOWN),
    (NODE_WAKING, NodeFlag.BOOTING),
)
_FLAGS = {state: flag for states, flag in _MEANINGS for state in states}
"""PLANNED: the backfill scheduler means to start a job there. A state that is not listed is UNKNOWN."""
_BASE = NODE_UP | {"DOWN", "ERROR"}
_SLEEP_OR_BOOT = NodeFlag.ASLEEP | NodeFlag.BOOTING


@dataclass(frozen=True)
class NodeState:
    """A node's power record.

    downs_s: power-downs of the last day, unix seconds. changed_s: last order. is_ours: powered down by almanac, and not
    seen up since. is_told: Slurm was also seen to have taken the order. retries: orders to wake it again.
    quarantined_s: time of its quarantine, else None.
    """

    downs_s: tuple[Count, ...] = ()
    changed_s: Count | None = None
    is_ours: bool = False
    retries: Count = 0
    quarantined_s: Count | None = None
    is_told: bool = False

    def cycles(self, now_s: int) -> int:
        return sum(now_s - DAY_S < time_s for time_s in self.downs_s)

    def told_down(self, now_s: int) -> NodeState:
        kept = tuple(time_s for time_s in self.downs_s if now_s - DAY_S < time_s)
        return NodeState((*kept, now_s), now_s, is_ours=True)


NO_MEMORY = NodeState()


@dataclass(frozen=True)
class NodeSetState:
    """A node set's power record.

    wakes_s: each time that nodes were woken, by almanac or by Slurm for a job. boots: nodes of each; those of the first
    times can be missing. short_s: runs that saw more nodes wanted
    than up. asleep: the nodes that slept when the last run ended. target: of the last run; None: no change. forecast:
    of the last run, (quantile, nodes) of the highest demand within the horizon; empty if there was none.
    """

    wakes_s: tuple[Count, ...] = ()
    boots: tuple[Count, ...] = ()
    short_s: tuple[Count, ...] = ()
    asleep: tuple[str, ...] = ()
    target: Count | None = None
    forecast: tuple[tuple[Finite, Finite], ...] = ()

    def woken(self, now_s: int, nodes: int) -> NodeSetState:
        """The record after a wake-up of so many nodes; unchanged by 0."""
        if not nodes:
            return self
        return replace(self, wakes_s=(*self.wakes_s, now_s), boots=(*self.all_boots(), nodes))

    def all_boots(self) -> tuple[Count, ...]:
        """Nodes of each of `wakes_s`; 1 where an older almanac kept no number."""
        known = self.boots[-len(self.wakes_s) :] if self.wakes_s else ()
        return (*[1] * (len(self.wakes_s) - len(known)), *known)


@dataclass(frozen=True)
class PowerState(NodesState):
    """The whole file. since_s: first run. exceptions: SuspendExcNodes without almanac's entries, None while almanac
    never wrote it; told: what almanac wrote there, the newest last.
    """

    DOING = "is powering nodes"
    HINT = "check who wrote it, then remove it; powered-down nodes stay known by their reason in Slurm"
    since_s: Count = 0
    run_s: Count = 0
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    sets: Mapping[str, NodeSetState] = field(default_factory=dict)
    exceptions: str | None = None
    told: tuple[str, ...] = ()

    def of(self, name: str) -> NodeState:
        return self.nodes.get(name, NO_MEMORY)

    def set_of(self, name: str) -> NodeSetState:
        return self.sets.get(name, NodeSetState())

    def with_nodes(self, changed: Mapping[str, NodeState]) -> PowerState:
        """A node with nothing to remember is forgotten."""
        whole = {**self.nodes, **changed}
        return replace(
            self, nodes={name: each for name, each in whole.items() if each is not NO_MEMORY and each != NO_MEMORY}
        )

    def with_set(self, name: str, memory: NodeSetState) -> PowerState:
        short = replace(
            memory, wakes_s=memory.wakes_s[-MAX_TIMES:], boots=memory.all_boots()[-MAX_TIMES:],
            short_s=memory.short_s[-MAX_TIMES:],
        )  # fmt: skip
        return replace(self, sets={**self.sets, name: short})


@lru_cache(maxsize=1024)
def flags_of(states: frozenset[str]) -> NodeFlag:
    """The flags of Slurm's states. A node that sleeps or boots does not respond, which is no fault then."""
    found = _NO_FLAG
    states = without_fulfilled(states)
    for state in states:
        found |= _FLAGS.get(state, NodeFlag.UNKNOWN)
    if len(_BASE.intersection(states)) != 1:
        found |= NodeFlag.UNKNOWN
    if "NOT_RESPONDING" in states and found & _SLEEP_OR_BOOT and not {"DOWN", "ERROR", "INVALID_REG"} & set(states):
        found &= ~NodeFlag.DOWN
    return found


@dataclass(frozen=True)
class PowerSurroundings:
    """Reasons outside a node's own state to leave it alone.

    excluded: stay on. reserved_soon: a reservation starts before the node could be back. takes_any: nodes that sleep
    without a reason are almanac's, too (Slurm powers them down by almanac's count).
    """

    excluded: frozenset[str] = frozenset()
    reserved_soon: frozenset[str] = frozenset()
    memory: Mapping[str, NodeState] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()
    takes_any: bool = False


def is_ours(node: SlurmNode, around: PowerSurroundings) -> bool:
    """Return True if almanac powered a sleeping node down, so that it can wake it. Others' sleepers are left alone."""
    if node.reason:
        return node.reason.startswith(REASON)
    return around.takes_any or around.memory.get(node.name, NO_MEMORY).is_ours


def power_nodes(
    names: Sequence[str], nodes: Mapping[str, SlurmNode], around: PowerSurroundings, now_s: int
) -> list[PowerNode]:
    """The nodes of these names for `select_nodes`. A name that Slurm does not list is UNKNOWN."""
    capacities = sorted({tier.capacity_mib for tier in around.tiers})
    ranks = {capacity: rank for rank, capacity in enumerate(capacities)}  # GPUs with more memory are the scarcer ones
    return [_power_node(name, nodes.get(name), around, ranks, now_s) for name in names]


def _power_node(
    name: str, node: SlurmNode | None, around: PowerSurroundings, ranks: Mapping[int, int], now_s: int
) -> PowerNode:
    if node is None:
        return PowerNode(name, 0, NodeFlag.UNKNOWN)
    flags = flags_of(node.states)
    if node.reservation:
        flags |= NodeFlag.RESERVED
    is_kept = name in around.excluded or name in around.reserved_soon
    if not is_ours(node, around) if flags & NodeFlag.ASLEEP else is_kept:
        flags |= NodeFlag.EXCLUDED
    known = around.memory.get(name, NO_MEMORY)
    changes = [time_s for time_s in (node.boot_s, known.changed_s) if time_s is not None]
    capacity = max((tier.capacity_mib for tier in around.tiers if _is_of(node, tier)), default=None)
    return PowerNode(
        name=name,
        tier_rank=0 if capacity is None else ranks[capacity],
        flags=flags,
        idle_since_s=node.last_busy_s,
        last_change_s=max(changes, default=None),
        cycles_today=known.cycles(now_s),
    )


def _is_of(node: SlurmNode, tier: Tier) -> bool:
    if tier.constraint:
        return tier.constraint in node.features
    if tier.partition:
        return tier.partition in node.partitions
    return any(parse_gpus(term.partition("(")[0]).type == tier.gres for term in node.gres.split(",") if tier.gres)


def reserved_before(reservations: Sequence[Reservation], now_s: int, until_s: int) -> frozenset[str]:
    """Nodes of the reservations that are active now, or start before until_s."""
    return frozenset(
        name for each in reservations if each.start_s <= until_s and each.end_s > now_s for name in each.nodes
    )


_UNFIT = NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE | NodeFlag.UNKNOWN
_NOT_READY = _UNFIT | NodeFlag.ASLEEP
_BELIEVED_S = 3600


@dataclass(frozen=True)
class Failures:
    """Nodes that almanac powered down and that are not back. again: to be woken again. back: they answer, and Slurm
    calls them down all the same. give_up: to be quarantined. lost: slurmctld restarted and forgot that they were
    powering down (22.05); they are off, and it waits for their answer: repeat the order. later: the cloud had no
    capacity, and is asked again after a pause.
    """

    again: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """The entries of SuspendExcNodes for a node set. always: nodes that stay on whatever the count is. counted: the
    other nodes; Slurm keeps `count` of them on.
    """

    always: tuple[str, ...]
    counted: tuple[str, ...]
    count: int


def powered_apart(nodes: Sequence[PowerNode]) -> tuple[int, int]:
    """Nodes that are powered and fit for jobs, and busy ones that are not fit (draining, reserved, about to boot)."""
    ready = sum(not node.flags & _NOT_READY for node in nodes)
    apart = sum(bool(node.flags & NodeFlag.BUSY and node.flags & _NOT_READY) for node in nodes)
    return ready, apart


def select(nodes: Sequence[PowerNode], target: int | None, active: int, limits: PowerLimits, now_s: int) -> NodePlan:
    """The nodes for a target, which counts busy nodes that take no further job, too.

    Without a target nothing powers down, and as many wake as the nodes in use and the warm minimum need.
    """
    wanted = max(active + limits.warm_minimum, target or 0) - powered_apart(nodes)[1]
    plan = select_nodes(nodes, max(0, wanted), limits, now_s)
    return replace(plan, power_down=()) if target is None else plan


def has_booted(node: SlurmNode, known: NodeState) -> bool:
    return (node.boot_s or 0) >= max(known.downs_s, default=0)


def kept_on(nodes: Sequence[PowerNode], chosen: NodePlan, limits: PowerLimits, now_s: int) -> Kept:
    """Return the exceptions that keep all nodes on but as many as are to power down.

    Slurm picks them, among nodes that could be powered down by name: the others stay on by name.
    """
    is_free = {
        node.name: bool(node.flags & (NodeFlag.ASLEEP | NodeFlag.BUSY | NodeFlag.BOOTING)) and not node.flags & _UNFIT
        for node in nodes
    }
    counted = [node for node in nodes if is_free[node.name] or may_power_down(node, limits, now_s)]
    names = {node.name for node in counted}
    up = sum(not node.flags & NodeFlag.ASLEEP for node in counted)
    return Kept(
        always=tuple(node.name for node in nodes if node.name not in names),
        counted=tuple(node.name for node in counted),
        count=up + len(chosen.wake) - len(chosen.power_down),
    )


def observed(
    memory: PowerState, node_set: str, nodes: Mapping[str, SlurmNode], power: Sequence[PowerNode], now_s: int
) -> PowerState:
    """Return the state after a look at Slurm.

    A node that came up no longer counts as powered down by almanac. A node that woke without almanac's order was woken
    by Slurm for a job.
    """
    changed = {each.name: _seen(memory.of(each.name), each, nodes.get(each.name), now_s) for each in power}
    before = memory.set_of(node_set)
    asleep = frozenset(each.name for each in power if each.flags & NodeFlag.ASLEEP)
    woken = sum(name in changed and name not in asleep for name in before.asleep)
    after = replace(before.woken(now_s, woken), asleep=tuple(sorted(asleep)))
    return memory.with_nodes(changed).with_set(node_set, after)


def _seen(known: NodeState, each: PowerNode, node: SlurmNode | None, now_s: int) -> NodeState:
    if node is None or each.flags & NodeFlag.UNKNOWN:
        return known
    if known.quarantined_s is not None:
        is_given_up = bool(each.flags & NodeFlag.DRAINED) and node.reason.startswith(DID_NOT_WAKE)
        return known if is_given_up else replace(known, quarantined_s=None, retries=0)
    is_own_sleep = each.flags & NodeFlag.ASLEEP and not each.flags & (NodeFlag.EXCLUDED | NodeFlag.DOWN)
    if is_own_sleep and not known.is_ours:
        return known.told_down(now_s)
    is_up = not each.flags & (NodeFlag.ASLEEP | NodeFlag.BOOTING | NodeFlag.DOWN)
    if is_up and known.is_told and not has_booted(node, known) and now_s - (known.changed_s or 0) < _BELIEVED_S:
        return known  # a slurmctld that has just restarted can show a node idle that is off
    return replace(known, is_ours=False, is_told=False, retries=0) if is_up and known.is_ours else known


def intended(
    memory: PowerState, node_set: str, chosen: NodePlan, failures: Failures, target: int | None, now_s: int
) -> PowerState:
    """The memory before a run acts: a run that is killed then has counted its orders, heard or not."""
    changed = {name: memory.of(name).told_down(now_s) for name in (*chosen.power_down, *failures.lost)}
    changed |= {name: replace(memory.of(name), changed_s=now_s, is_told=False) for name in chosen.wake}
    for name in failures.again:
        known = memory.of(name)
        changed[name] = replace(known, changed_s=now_s, is_told=False, retries=known.retries + 1)
    changed |= {name: replace(memory.of(name), quarantined_s=now_s) for name in failures.give_up}
    before = memory.set_of(node_set)
    asleep = tuple(sorted((set(before.asleep) | set(chosen.power_down)) - set(chosen.wake)))
    after = replace(before.woken(now_s, len(chosen.wake)), asleep=asleep, target=target)
    return memory.with_nodes(changed).with_set(node_set, after)


def confirmed(memory: PowerState, heard: Iterable[str]) -> PowerState:
    """The memory after Slurm was seen to power these nodes down."""
    return memory.with_nodes({name: replace(memory.of(name), is_told=True) for name in heard})
