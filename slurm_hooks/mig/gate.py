"""Which nodes may begin a change now, and why others may not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_hooks.mig.layouts import gpu_types
from slurm_hooks.power.nodes import flags_of
from telemetry.slurm import node_states
from telemetry.slurm.backend import Node

HAS_A_JOB = "it has a job"
PAUSE_S = 86_400
"""Between two changes of one node: demand differs by the hour, and each change drains the node."""


@dataclass(frozen=True)
class Surroundings:
    """What decides whether a node may begin a change.

    managed: nodes of mig.nodes without mig.exclude. busy: with a job. reserved: now or soon. under_change: by almanac.
    changed_s: last change of each node. wanted: GPU types that jobs ask for, or asked for lately.
    """

    managed: Collection[str] = ()
    busy: Collection[str] = ()
    reserved: Collection[str] = ()
    under_change: Collection[str] = ()
    changed_s: Mapping[str, int] = field(default_factory=dict)
    wanted: Collection[str] = ()


def refusal(node: Node, nodes: Sequence[Node], around: Surroundings, now_s: int, may_be_busy: bool = False) -> str:
    """Why no change of this node may begin; "" where it may. may_be_busy: its jobs will be waited for."""
    changed_s, is_free = around.changed_s.get(node.name), not flags_of(node.states)
    checks = (
        (node.name not in around.managed, "it is not in mig.nodes, or it is excluded"),
        (node.name in around.under_change, "it is under change already"),
        (changed_s is not None and now_s - changed_s < PAUSE_S, "it was changed within a day"),
        (node.name in around.busy and not may_be_busy, HAS_A_JOB),
        (node.name in around.reserved or bool(node.reservation), "it is reserved, or soon will be"),
        (not is_free and not (may_be_busy and is_in_service(node)), f"it is {'+'.join(sorted(node.states))}"),
    )
    for applies, why in checks:
        if applies:
            return why
    return lost_types_text(node, nodes, around)


def lost_types_text(node: Node, nodes: Sequence[Node], around: Surroundings) -> str:
    """Why the node must not go out of service; "" where all types in demand stay."""
    gone = lost_types(node, nodes, around)
    return f"no other node in service has {', '.join(gone)}, which jobs ask for" if gone else ""


def lost_types(node: Node, nodes: Sequence[Node], around: Surroundings) -> list[str]:
    """Types in demand that no node would have in service while this one is under change."""
    others = {name for other in nodes if other.name != node.name for name in types_in_service(other, around)}
    return sorted((gpu_types(node.gres).keys() & set(around.wanted)) - others)


def types_in_service(node: Node, around: Surroundings) -> Collection[str]:
    """GPU types of a node that takes jobs now; a busy node does."""
    return gpu_types(node.gres).keys() if is_in_service(node) and node.name not in around.under_change else ()


def is_in_service(node: Node) -> bool:
    """Whether the node takes jobs, if not right now: a job of an exclusive topology can block it for a while."""
    return node_states.is_in_service(node.states - {"BLOCKED"})


def is_open(node: Node) -> bool:
    """Whether Slurm means to start jobs there: for some seconds after its restart (22.05) it waits for an answer."""
    return is_in_service(replace(node, states=node.states - {"NOT_RESPONDING"}))
