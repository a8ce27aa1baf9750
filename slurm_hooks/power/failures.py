"""Nodes that almanac powered down and that did not wake, sorted by what helps.

A node that fails twice is given up, for an operator to repair. A cloud node lacks capacity instead: it is woken again
after growing pauses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from advisor.power.decide import NodeFlag
from slurm.nodes import SlurmNode
from slurm_hooks.power.nodes import REASON, Failures, NodeState, PowerState, flags_of, has_booted

RESUME_FAILED = "ResumeTimeout reached"
"""Slurm's reason for a node that was down when ResumeTimeout had passed (22.05 to 26.05)."""

WAKE_RETRIES = 1
"""Orders to wake a node again before almanac quarantines it: a second boot fails only on a broken node."""
PAUSE_S, MOST_PAUSE_S = 600, 6 * 3600
"""A cloud without capacity is asked again at once, then after 10 minutes, and after twice as long each time."""
_LACKS_CAPACITY = re.compile(
    r"capacity|quota|RESOURCE_POOL_EXHAUSTED|STOCKOUT|AllocationFailed|SkuNotAvailable|LimitExceeded", re.IGNORECASE
)
"""Words of AWS, Google Cloud, and Azure that their resume programs leave as a node's reason."""
_FORGOTTEN, _SILENT = frozenset({"DOWN", "NOT_RESPONDING"}), "Not responding"


def failures_of(names: Sequence[str], nodes: Mapping[str, SlurmNode], memory: PowerState, now_s: int) -> Failures:
    """Sort the nodes that did not wake by what helps. Only almanac's sleepers that nobody drained since."""
    again, back, give_up, lost, later = (list[str]() for _ in range(5))
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
        elif is_of_cloud(node):
            (again if now_s - (known.changed_s or 0) >= pause_s(known.retries) else later).append(name)
        elif known.retries < WAKE_RETRIES:
            again.append(name)
        else:
            give_up.append(name)
    return Failures(*map(tuple, (again, back, give_up, lost, later)))


def is_of_cloud(node: SlurmNode) -> bool:
    """Return True if a node that did not wake lacks capacity, not repair: a cloud node, or by the reason it has."""
    return "CLOUD" in node.states or bool(_LACKS_CAPACITY.search(node.reason))


def pause_s(retries: int) -> int:
    """Seconds from an order to wake a cloud node to the next one, after so many that failed."""
    return 0 if retries < 1 else min(MOST_PAUSE_S, PAUSE_S * 2 ** min(retries - 1, 10))


def _is_forgotten(node: SlurmNode, known: NodeState) -> bool:
    """Return True if Slurm had heard the order to power down, and the node has not booted since."""
    is_silent = node.states == _FORGOTTEN and node.reason.startswith((_SILENT, REASON))
    is_silent |= node.states == _FORGOTTEN | {"DRAIN"} and node.reason.startswith(REASON)
    return known.is_told and is_silent and not has_booted(node, known)


def _is_left_drained(node: SlurmNode) -> bool:
    """Return True if only the drain of our power-down is left: slurmctld restarted before the rest of it was saved."""
    flags = flags_of(node.states)
    is_else = flags & ~(NodeFlag.DRAINED | NodeFlag.BUSY)  # UNKNOWN, until the node answers: Slurm refuses to resume it
    return bool(flags & NodeFlag.DRAINED) and not is_else and node.reason.startswith(REASON)


def _has_failed(node: SlurmNode) -> bool:
    flags = flags_of(node.states)
    is_waiting = flags & (NodeFlag.BOOTING | NodeFlag.POWERING_DOWN | NodeFlag.DRAINED | NodeFlag.MAINTENANCE)
    is_down = bool(flags & NodeFlag.DOWN) and not is_waiting
    is_off = "POWERED_DOWN" in node.states and node.reason.startswith(REASON)
    return is_down and (is_off or node.reason.startswith(RESUME_FAILED) or bool(_LACKS_CAPACITY.search(node.reason)))
