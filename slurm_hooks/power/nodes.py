"""Slurm's nodes as the selection sees them: every state as flags, and what is not known is never acted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from advisor.decisions.power_nodes import NodeFlag, PowerNode
from almanac.config import Tier
from almanac.tres import parse_gpus
from slurm_hooks.power.memory import NO_MEMORY, NodeState
from telemetry.slurm.backend import Node, Reservation
from telemetry.slurm.node_states import without_fulfilled

REASON = "almanac: power saving"
"""Reason of the nodes that almanac powers down. Slurm keeps it until the node wakes, so that whose sleep it is survives
a lost state file."""
DID_NOT_WAKE = "almanac: did not wake"
"""How the reason of a quarantined node begins."""
RESUME_FAILED = "ResumeTimeout reached"
"""Slurm's reason for a node that was down when ResumeTimeout had passed (22.05 to 26.05)."""

_NO_FLAG = NodeFlag(0)
_FLAGS = {
    "IDLE": _NO_FLAG, "CLOUD": _NO_FLAG, "DYNAMIC_NORM": _NO_FLAG,
    "ALLOCATED": NodeFlag.BUSY, "MIXED": NodeFlag.BUSY, "COMPLETING": NodeFlag.BUSY, "PLANNED": NodeFlag.BUSY,
    "BLOCKED": NodeFlag.BUSY,
    "RESERVED": NodeFlag.RESERVED, "MAINT": NodeFlag.MAINTENANCE, "MAINTENANCE": NodeFlag.MAINTENANCE,
    "REBOOT_REQUESTED": NodeFlag.MAINTENANCE, "REBOOT_ISSUED": NodeFlag.MAINTENANCE,
    "DRAIN": NodeFlag.DRAINED, "DRAINING": NodeFlag.DRAINED, "DRAINED": NodeFlag.DRAINED, "FAIL": NodeFlag.DRAINED,
    "DOWN": NodeFlag.DOWN, "ERROR": NodeFlag.DOWN, "INVALID_REG": NodeFlag.DOWN, "NOT_RESPONDING": NodeFlag.DOWN,
    "POWERED_DOWN": NodeFlag.ASLEEP,
    "POWERING_DOWN": NodeFlag.ASLEEP | NodeFlag.POWERING_DOWN, "POWER_DOWN": NodeFlag.ASLEEP | NodeFlag.POWERING_DOWN,
    "POWER_DRAIN": NodeFlag.ASLEEP | NodeFlag.POWERING_DOWN,
    "POWERING_UP": NodeFlag.BOOTING, "POWER_UP": NodeFlag.BOOTING,
}  # fmt: skip
"""PLANNED: the backfill scheduler means to start a job there. A state that is not listed is UNKNOWN."""
_BASE = frozenset({"IDLE", "ALLOCATED", "MIXED", "DOWN", "ERROR"})
_SLEEP_OR_BOOT = NodeFlag.ASLEEP | NodeFlag.BOOTING


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
class Surroundings:
    """What decides, beside its own state, whether a node can be touched.

    excluded: stay on. reserved_soon: a reservation starts before the node could be back. takes_any: nodes that sleep
    without a reason are almanac's, too (Slurm powers them down by almanac's count).
    """

    excluded: frozenset[str] = frozenset()
    reserved_soon: frozenset[str] = frozenset()
    memory: Mapping[str, NodeState] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()
    takes_any: bool = False


def is_ours(node: Node, around: Surroundings) -> bool:
    """Whether almanac powered a sleeping node down, so that it can wake it. Others' sleepers are left alone."""
    if node.reason:
        return node.reason.startswith(REASON)
    return around.takes_any or around.memory.get(node.name, NO_MEMORY).is_ours


def power_nodes(names: Sequence[str], nodes: Mapping[str, Node], around: Surroundings, now_s: int) -> list[PowerNode]:
    """The nodes of these names for `select_nodes`. A name that Slurm does not list is UNKNOWN."""
    ranks = _tier_ranks(around.tiers)
    return [_power_node(name, nodes.get(name), around, ranks, now_s) for name in names]


def _power_node(name: str, node: Node | None, around: Surroundings, ranks: Mapping[int, int], now_s: int) -> PowerNode:
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


def _tier_ranks(tiers: Sequence[Tier]) -> dict[int, int]:
    """GPUs with more memory are the scarcer ones."""
    return {capacity: rank for rank, capacity in enumerate(sorted({tier.capacity_mib for tier in tiers}))}


def _is_of(node: Node, tier: Tier) -> bool:
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
