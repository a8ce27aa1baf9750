"""Which node states mean in service: one list for MIG and placement."""

from __future__ import annotations

import pytest

from slurm_hooks.mig import gate
from telemetry.slurm.backend import Node
from telemetry.slurm.gres_queue import GresNode, in_service
from telemetry.slurm.node_states import is_in_service


@pytest.mark.parametrize(
    ("states", "is_in"),
    [
        ({"IDLE"}, True),
        ({"MIXED", "COMPLETING", "PLANNED"}, True),
        ({"IDLE", "CLOUD", "DYNAMIC_NORM"}, True),
        ({"ALLOCATED", "DYNAMIC_FUTURE"}, True),
        ({"IDLE", "DRAIN"}, False),
        ({"IDLE", "POWERED_DOWN"}, False),
        ({"IDLE", "RESERVED"}, False),
        ({"DOWN"}, False),
        ({"PLANNED"}, False),
        ({"UNKNOWN_OF_A_LATER_RELEASE", "IDLE"}, False),
        (set(), False),
    ],
)
def test_one_list_of_states(states: set[str], is_in: bool) -> None:
    node = Node("n1", frozenset(states), (), "gpu:a100:4", ())
    assert is_in_service(states) is gate.is_in_service(node) is bool(in_service([GresNode(node)])) is is_in
