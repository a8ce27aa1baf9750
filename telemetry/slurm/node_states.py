"""Which states of a node mean that it is in service."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

_BASE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
_FLAGS = frozenset({"COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
"""Flags that keep no job away."""
_UNDER_WAY = frozenset({
    "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWER_DRAIN", "POWERING_UP", "NOT_RESPONDING", "DOWN", "UNKNOWN",
})  # fmt: skip
"""POWER_UP beside none of these is stale: a node that was told to power up while it booted keeps it for good, is up,
and takes jobs (tried on 22.05)."""


def without_fulfilled(states: AbstractSet[str]) -> frozenset[str]:
    """The states without requests to change the power that stand beside their fulfillment.

    POWER_DOWN and POWER_DRAIN stay on a node after power_down_force (aws-parallelcluster-node, pull 402).
    """
    done = set[str]()
    if "POWERED_DOWN" in states and "POWERING_DOWN" not in states:
        done |= {"POWER_DOWN", "POWER_DRAIN"}
    if not states & _UNDER_WAY:
        done.add("POWER_UP")
    return frozenset(states - done)


def is_in_service(states: AbstractSet[str]) -> bool:
    """Whether the node is up, powered, and neither drained nor in maintenance: it is idle or has jobs, without another
    flag. states: as in `Node`.
    """
    return bool(states & _BASE) and states <= _BASE | _FLAGS
