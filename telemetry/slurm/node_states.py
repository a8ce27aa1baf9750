"""Which states of a node mean that it is in service."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

_BASE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
_FLAGS = frozenset({"COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
"""Flags that keep no job away."""


def is_in_service(states: AbstractSet[str]) -> bool:
    """Whether the node is up, powered, and neither drained nor in maintenance: it is idle or has jobs, without another
    flag. states: as in `Node`.
    """
    return bool(states & _BASE) and states <= _BASE | _FLAGS
