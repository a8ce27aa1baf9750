"""What one run does with the nodes of a node set. Pure.

First comes what earlier runs began: nodes that did not wake. Then the target: which nodes wake, and which power down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from advisor.decisions.power_nodes import NodeFlag, PowerLimits, PowerNode, may_power_down, select_nodes
from slurm_hooks.power.memory import NodeState, PowerState
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON, RESUME_FAILED, flags_of
from telemetry.slurm.backend import Node

_UNFIT = NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE | NodeFlag.UNKNOWN
_NOT_READY = _UNFIT | NodeFlag.ASLEEP
WAKE_RETRIES = 1
"""Orders to wake a node again before almanac quarantines it: a second boot fails only on a broken node."""
_BELIEVED_S = 3600
_FORGOTTEN, _SILENT = frozenset({"DOWN", "NOT_RESPONDING"}), "Not responding"


@dataclass(frozen=True)
class Rules:
    """Of the configuration."""

    limits: PowerLimits
    nodes_per_run: int = 20


@dataclass(frozen=True)
class Failures:
    """Nodes that almanac powered down and that are not back. again: to be woken again. back: they answer, and Slurm
    calls them down all the same. give_up: to be quarantined. lost: slurmctld restarted and forgot that they were
    powering down (22.05); they are off, and it waits for their answer: repeat the order.
    """

    again: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """The entries of SuspendExcNodes for a node set. always: nodes that stay on whatever the count is. counted: the
    other nodes; Slurm keeps `count` of them on.
    """

    always: tuple[str, ...]
    counted: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class NodeSelection:
    """Nodes to wake and to power down, in the order to act. short: nodes that the target lacks though all wake."""

    wake: tuple[str, ...] = ()
    power_down: tuple[str, ...] = ()
    short: int = 0


def powered_apart(nodes: Sequence[PowerNode]) -> tuple[int, int]:
    """Nodes that are powered and fit for jobs, and busy ones that are not fit (draining, reserved, about to boot)."""
    ready = sum(not node.flags & _NOT_READY for node in nodes)
    apart = sum(bool(node.flags & NodeFlag.BUSY and node.flags & _NOT_READY) for node in nodes)
    return ready, apart


def select(nodes: Sequence[PowerNode], target: int | None, active: int, rules: Rules, now_s: int) -> NodeSelection:
    """The nodes for a target, which counts busy nodes that take no further job, too. At most nodes_per_run power down.

    Without a target nothing powers down, and as many wake as the nodes in use and the warm minimum need.
    """
    wanted = max(active + rules.limits.warm_minimum, target or 0) - powered_apart(nodes)[1]
    plan = select_nodes(nodes, max(0, wanted), rules.limits, now_s)
    down = () if target is None else plan.power_down[: rules.nodes_per_run]
    return NodeSelection(plan.wake, down, plan.short)


def failures_of(names: Sequence[str], nodes: Mapping[str, Node], memory: PowerState) -> Failures:
    """What to do about nodes that did not wake. Only nodes that almanac powered down, and that nobody drained since."""
    again, back, give_up, lost = [], [], [], []
    for name in names:
        node, known = nodes.get(name), memory.of(name)
        if node is not None and _is_left_drained(node):
            back.append(name)
            continue
        if node is None or not known.is_ours:
            continue
        if _is_forgotten(node, known):
            lost.append(name)
        if not _has_failed(node):
            continue
        if not {"POWERED_DOWN", "NOT_RESPONDING"} & node.states:
            back.append(name)
        elif known.retries < WAKE_RETRIES:
            again.append(name)
        else:
            give_up.append(name)
    return Failures(tuple(again), tuple(back), tuple(give_up), tuple(lost))


def _is_forgotten(node: Node, known: NodeState) -> bool:
    """Whether Slurm had heard the order to power down, and the node has not booted since."""
    is_silent = node.states == _FORGOTTEN and node.reason.startswith((_SILENT, REASON))
    is_silent |= node.states == _FORGOTTEN | {"DRAIN"} and node.reason.startswith(REASON)
    return known.is_told and is_silent and not _has_booted(node, known)


def _is_left_drained(node: Node) -> bool:
    """Whether only the drain of our power-down is left: slurmctld restarted before the rest of it was saved."""
    flags = flags_of(node.states)
    is_else = flags & ~(NodeFlag.DRAINED | NodeFlag.BUSY)  # UNKNOWN, until the node answers: Slurm refuses to resume it
    return bool(flags & NodeFlag.DRAINED) and not is_else and node.reason.startswith(REASON)


def _has_booted(node: Node, known: NodeState) -> bool:
    return (node.boot_s or 0) >= max(known.downs_s, default=0)


def _has_failed(node: Node) -> bool:
    flags = flags_of(node.states)
    is_waiting = flags & (NodeFlag.BOOTING | NodeFlag.POWERING_DOWN | NodeFlag.DRAINED | NodeFlag.MAINTENANCE)
    is_down = bool(flags & NodeFlag.DOWN) and not is_waiting
    is_off = "POWERED_DOWN" in node.states and node.reason.startswith(REASON)
    return is_down and (is_off or node.reason.startswith(RESUME_FAILED))


def kept_on(nodes: Sequence[PowerNode], chosen: NodeSelection, limits: PowerLimits, now_s: int) -> Kept:
    """What keeps all nodes on but as many as are to power down. Slurm picks which, so that it can pick only those that
    could be powered down by name: the others stay on by name.
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
    memory: PowerState, node_set: str, nodes: Mapping[str, Node], power: Sequence[PowerNode], now_s: int
) -> PowerState:
    """The memory after a look at Slurm: what came up is no longer almanac's sleeper, and what woke without almanac's
    order was woken by Slurm for a job.
    """
    changed = {each.name: _seen(memory.of(each.name), each, nodes.get(each.name), now_s) for each in power}
    before = memory.set_of(node_set)
    asleep = frozenset(each.name for each in power if each.flags & NodeFlag.ASLEEP)
    is_woken = not asleep.issuperset(name for name in before.asleep if name in changed)
    after = replace(
        before, asleep=tuple(sorted(asleep)), wakes_s=(*before.wakes_s, now_s) if is_woken else before.wakes_s
    )
    return memory.with_nodes(changed).with_set(node_set, after)


def _seen(known: NodeState, each: PowerNode, node: Node | None, now_s: int) -> NodeState:
    if node is None or each.flags & NodeFlag.UNKNOWN:
        return known
    if known.quarantined_s is not None:
        is_given_up = bool(each.flags & NodeFlag.DRAINED) and node.reason.startswith(DID_NOT_WAKE)
        return known if is_given_up else replace(known, quarantined_s=None, retries=0)
    is_own_sleep = each.flags & NodeFlag.ASLEEP and not each.flags & (NodeFlag.EXCLUDED | NodeFlag.DOWN)
    if is_own_sleep and not known.is_ours:
        return known.told_down(now_s)
    is_up = not each.flags & (NodeFlag.ASLEEP | NodeFlag.BOOTING | NodeFlag.DOWN)
    if is_up and known.is_told and not _has_booted(node, known) and now_s - (known.changed_s or 0) < _BELIEVED_S:
        return known  # a slurmctld that has just restarted can show a node idle that is off
    return replace(known, is_ours=False, is_told=False, retries=0) if is_up and known.is_ours else known


def intended(
    memory: PowerState, node_set: str, chosen: NodeSelection, failures: Failures, target: int | None, now_s: int
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
    wakes_s = (*before.wakes_s, now_s) if chosen.wake else before.wakes_s
    after = replace(before, asleep=asleep, wakes_s=wakes_s, target=target)
    return memory.with_nodes(changed).with_set(node_set, after)


def confirmed(memory: PowerState, heard: Iterable[str]) -> PowerState:
    """The memory after Slurm was seen to power these nodes down."""
    return memory.with_nodes({name: replace(memory.of(name), is_told=True) for name in heard})
