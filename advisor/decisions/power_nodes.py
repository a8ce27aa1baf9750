"""Which nodes of a node set to power up and down for a target. Pure and deterministic."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class NodeFlag(enum.IntFlag):
    """State of a node as a set of flags. ASLEEP: powered down or powering down. BOOTING: powering up.

    POWERING_DOWN: not down yet; Slurm drops an order to wake it. EXCLUDED: stays as it is, on or asleep.
    UNKNOWN: Slurm's answer could not be read or understood.
    """

    BUSY = enum.auto()
    RESERVED = enum.auto()
    DRAINED = enum.auto()
    DOWN = enum.auto()
    MAINTENANCE = enum.auto()
    EXCLUDED = enum.auto()
    ASLEEP = enum.auto()
    BOOTING = enum.auto()
    UNKNOWN = enum.auto()
    POWERING_DOWN = enum.auto()


_UNFIT = int(
    NodeFlag.RESERVED | NodeFlag.DRAINED | NodeFlag.DOWN | NodeFlag.MAINTENANCE | NodeFlag.UNKNOWN
    | NodeFlag.POWERING_DOWN
)  # fmt: skip
_NOT_POWERED_DOWN = _UNFIT | int(NodeFlag.BUSY | NodeFlag.EXCLUDED | NodeFlag.ASLEEP | NodeFlag.BOOTING)
_ASLEEP, _BUSY, _BOOTING = int(NodeFlag.ASLEEP), int(NodeFlag.BUSY), int(NodeFlag.BOOTING)


@dataclass(frozen=True, slots=True)
class PowerNode:
    """A node. tier_rank: 0 is the least scarce tier. idle_since_s, last_change_s: unix seconds, None where unknown.

    last_change_s: last power-up or power-down. cycles_today: power-downs of the last 24 hours.
    """

    name: str
    tier_rank: int
    flags: NodeFlag
    idle_since_s: int | None = None
    last_change_s: int | None = None
    cycles_today: int = 0


@dataclass(frozen=True)
class PowerLimits:
    """warm_minimum: powered nodes fit for jobs that are always kept, and idle ones that power-downs leave.

    cooldown_s: a node stays as it is for so long after a change and after it became idle.
    """

    warm_minimum: int = 1
    cycles_per_day: int = 2
    cooldown_s: int = 1800


@dataclass(frozen=True)
class NodePlan:
    """Names in the order to act. short: nodes that the target lacks though every fit one is woken."""

    wake: tuple[str, ...]
    power_down: tuple[str, ...]
    short: int
    is_hold: bool


def select_nodes(nodes: Sequence[PowerNode], target: int | None, limits: PowerLimits, now_s: int) -> NodePlan:
    """Nodes to wake and to power down, so that `target` nodes fit for jobs are powered.

    target: None holds: nothing is powered down, and only the warm minimum is woken. Only nodes that are idle, known for
    how long, and off cool-down are powered down: least scarce tier first, then the longest idle, then by name. The
    scarcest tier is woken first, then the node with the fewest power cycles. Waking heeds no cool-down or cycle cap:
    jobs come first. Raises ValueError if a name occurs twice.
    """
    if len({node.name for node in nodes}) != len(nodes):
        raise ValueError("a node name occurs twice in the node set")
    ready = [node for node in nodes if not int(node.flags) & (_UNFIT | _ASLEEP)]
    gap = max(target or 0, limits.warm_minimum) - len(ready)
    if gap > 0:
        asleep = _wakeable(nodes)
        return NodePlan(tuple(asleep[:gap]), (), max(0, gap - len(asleep)), target is None)
    if target is None:
        return NodePlan((), (), 0, True)
    idle = sum(1 for node in ready if not int(node.flags) & (_BUSY | _BOOTING))
    most = max(0, min(-gap, idle - limits.warm_minimum))
    return NodePlan((), tuple(_restable(nodes, limits, now_s)[:most]), 0, False)


def _wakeable(nodes: Iterable[PowerNode]) -> list[str]:
    """Asleep and nothing else: one that is busy or booting as well is being woken by Slurm already."""
    fit = [node for node in nodes if int(node.flags) == _ASLEEP]
    return [node.name for node in sorted(fit, key=lambda n: (-n.tier_rank, n.cycles_today, n.name))]


def _restable(nodes: Iterable[PowerNode], limits: PowerLimits, now_s: int) -> list[str]:
    fit = [node for node in nodes if may_power_down(node, limits, now_s)]
    return [node.name for node in sorted(fit, key=lambda n: (n.tier_rank, n.idle_since_s, n.name))]


def may_power_down(node: PowerNode, limits: PowerLimits, now_s: int) -> bool:
    """Whether a node is idle, not spared, off cool-down, and has a power cycle of the day left."""
    if int(node.flags) & _NOT_POWERED_DOWN or node.idle_since_s is None:
        return False
    latest = max(node.idle_since_s, node.last_change_s or node.idle_since_s)
    return node.cycles_today < limits.cycles_per_day and now_s - latest >= limits.cooldown_s
