"""The next step in the change of one node's layout, from the steps done and the node in Slurm. Pure.

    drain -> wait -> apply -> gres -> reconfigure -> verify -> resume
             wait -> verify (of the old layout) -> resume        if a job that came before the drain does not end
                      gres -> register -> settle -> verify       a dynamic node: deleted, and registered again

A dynamic node loses its drain when it is deleted. So its slurmd first learns to register with State=DRAIN, and the
drain gets its reason back before anything else.

A node that is drained while it is busy (is_patient) waits for its jobs as long as they take, from run to run.

A stage is on disk before its first order is given, so that a run that is killed is taken up at the same stage. Every
order can be given again. Where one fails, the node stays drained and its reason says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from almanac.tres import gpu_types, named_types, with_gpus
from slurm.states import NODE_ASLEEP, NODE_DOWN, NODE_DRAINED, NODE_REBOOTING, NODE_WAKING
from slurm_hooks.mig.layouts import Layout, shown
from slurm_hooks.nodes.engine import Count, NodesState

Stage = Literal["drain", "wait", "apply", "gres", "reconfigure", "register", "settle", "verify", "resume"]
PREFIX = "almanac mig:"
FAILED = "almanac mig failed:"
"""Begins the reason of a node that stays drained."""
NEW_REASON = "almanac-mig"
"""The reason that a dynamic node registers with; 22.05 drops it."""
SLURM_REASON = "gres/"
"""Begins Slurm's own reason, in place of ours, if slurmd has other Gres than slurmctld (24.11)."""
NO_COMMAND = "it is a dynamic node, and mig.register_command is empty (docs/mig-layouts.md)"
_SOCKETS = re.compile(r"\([^()]*\)")
MOST_REASON = 240
JOB_WAIT_S = 300
"""Seconds to wait for a job that reached the node before the drain; then the node is resumed."""
VERIFY_S = 180
"""Seconds until Slurm must show the new layout: slurmd restarts and registers within one."""
_STRANGE = NODE_DOWN | NODE_ASLEEP | NODE_WAKING | NODE_REBOOTING | {"NOT_RESPONDING"}
"""States that a node must not have to be resumed."""


@dataclass(frozen=True)
class NodeChange:
    """The change of one node, as it is remembered. begun_s: when it was decided; stage_s: when the stage began.

    old_gpus, new_gpus: GPUs of each GRES type. is_undone: the old layout stays, and nothing was ordered on the node.
    fault: why it failed; "" if it has not. A failed change is remembered until the node is resumed. is_patient: the
    node was drained with jobs on it, which may take as long as they like. dynamic_gres: a dynamic node's Gres
    as it was; "" for a node of slurm.conf.
    """

    node: str
    model: str
    old: Layout
    new: Layout
    old_gpus: Mapping[str, Count]
    new_gpus: Mapping[str, Count]
    begun_s: Count
    stage: Stage = "drain"
    stage_s: Count = 0
    is_undone: bool = False
    fault: str = ""
    is_patient: bool = False
    dynamic_gres: str = ""

    @property
    def waits_for_jobs(self) -> bool:
        """True if the node only takes no more jobs so far, and can be given back at once."""
        return self.is_patient and self.stage in ("drain", "wait") and not self.is_undone and not self.fault

    @property
    def reason(self) -> str:
        """The reason of the drain: nodes with another one are not resumed."""
        return f"{PREFIX} {shown(self.old)} -> {shown(self.new)}"[:MOST_REASON]

    @property
    def failed_reason(self) -> str:
        return f"{FAILED} {self.fault}"[:MOST_REASON]

    @property
    def goal(self) -> Layout:
        """The layout that must be verified."""
        return self.old if self.is_undone else self.new

    @property
    def goal_gpus(self) -> Mapping[str, int]:
        return self.old_gpus if self.is_undone else self.new_gpus

    def at(self, stage: Stage, now_s: int) -> NodeChange:
        return replace(self, stage=stage, stage_s=now_s)


@dataclass(frozen=True)
class MigState(NodesState):
    """The state file of layout changes.

    changes: by node, those under way and those that failed. changed_s: time of the last order to change each node's
    layout, unix seconds. released_s: time at which each job that waited for a vanished type was last released.
    """

    DOING = "is changing MIG layouts"
    HINT = 'check who wrote it, and nodes whose reason begins with "almanac mig"; then remove it'
    changes: Mapping[str, NodeChange] = field(default_factory=dict)
    changed_s: Mapping[str, Count] = field(default_factory=dict)
    released_s: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(name != each.node for name, each in self.changes.items()):
            raise ValueError("a change of another node than its name")

    def with_change(self, change: NodeChange) -> MigState:
        return replace(self, changes={**self.changes, change.node: change})

    def without(self, node: str) -> MigState:
        return replace(self, changes={name: each for name, each in self.changes.items() if name != node})


@dataclass(frozen=True)
class NodeSight:
    """A node in Slurm. gres: as configured; gres_used: by type as slurmctld counts it, "" if not shown.

    refusal: why a change must not begin now, "" if it may: see planning.ChangeGate.
    """

    states: frozenset[str]
    reason: str
    gres: str
    has_jobs: bool
    is_reserved: bool
    gres_used: str = ""
    refusal: str = ""

    @property
    def is_drained(self) -> bool:
        return bool(self.states & NODE_DRAINED)


class Action(Enum):
    """The next thing to do. KEEP: the node stays drained as it is. LEAVE: it is somebody else's now, and forgotten.

    Of dynamic nodes: MARK gives a new drain its reason, SETTLE ends the registration as drained.
    """

    DRAIN = "drain"
    WAIT = "wait"
    APPLY = "apply"
    WRITE_GRES = "write gres"
    RECONFIGURE = "reconfigure"
    DELETE = "delete"
    REGISTER = "register"
    MARK = "mark"
    SETTLE = "settle"
    VERIFY = "verify"
    DONE = "done"
    FAIL = "fail"
    KEEP = "keep"
    UNDO = "undo"
    LEAVE = "leave"
    DROP = "drop"


@dataclass(frozen=True)
class Step:
    """An action and why, for the log and for people."""

    action: Action
    why: str = ""


def next_step(change: NodeChange, seen: NodeSight | None, now_s: int) -> Step:
    """Return the next step for a node. seen: None if Slurm does not list it."""
    if change.fault:
        return _failed(change, seen)
    if change.stage in ("register", "settle"):
        return _registering(change, seen, now_s)
    if seen is None and change.dynamic_gres and change.stage in ("apply", "gres"):
        return Step(Action.APPLY if change.stage == "apply" else Action.WRITE_GRES)  # no job runs on a deleted node
    if seen is None:
        return _unlisted(change, now_s)
    is_prepared = change.stage == "gres" and is_own_drain(change, seen)
    if not (is_prepared or (seen.is_drained and seen.reason.startswith(change.reason))):
        return _not_ours(change, seen)
    if change.stage in ("drain", "wait"):
        return _waiting(change, seen, now_s)
    if seen.has_jobs and not change.is_undone:
        return Step(Action.FAIL, f"a job is on the node, which was drained, at stage {change.stage}")
    if change.stage == "apply":
        return Step(Action.APPLY)
    if change.stage == "gres":
        return Step(Action.WRITE_GRES)
    if change.stage == "reconfigure":
        return Step(Action.RECONFIGURE)
    wrong = unlike(change, seen)
    is_late = now_s - change.stage_s > VERIFY_S
    if not wrong and not (change.stage == "resume" and is_late):
        return Step(Action.VERIFY)
    wrong = wrong or "Slurm did not resume the node"
    if is_late:
        return Step(Action.FAIL, wrong)
    return Step(Action.WAIT, wrong)


def unlike(change: NodeChange, seen: NodeSight) -> str:
    """Return the difference between the node in Slurm and the layout that it must have; "" without one."""
    if strange := sorted(seen.states & _STRANGE):
        return f"Slurm shows {'+'.join(strange)}"
    gpus = gpu_types(seen.gres)
    if gpus != dict(change.goal_gpus):
        return f"Slurm shows {_listed(gpus)}, expected {_listed(change.goal_gpus)}"
    used = named_types(seen.gres_used)
    if used and used != dict(change.goal_gpus).keys():
        return f"slurmd registered {', '.join(sorted(used))}, expected {', '.join(sorted(change.goal_gpus))}"
    return ""


def _failed(change: NodeChange, seen: NodeSight | None) -> Step:
    if seen is not None and not seen.is_drained:
        return Step(Action.DROP, "the node was resumed by hand")
    if seen is not None and is_own_drain(change, seen):
        return Step(Action.FAIL, change.fault)  # killed before the reason was written
    return Step(Action.KEEP, change.fault)


def is_own_drain(change: NodeChange, seen: NodeSight) -> bool:
    """Return True if the drain is this change's, and no failure is written on it."""
    if not seen.is_drained or seen.reason.startswith(change.reason):
        return seen.is_drained
    is_other = seen.reason.startswith(SLURM_REASON) and change.stage in ("gres", "register", "settle")
    return bool(change.dynamic_gres) and (seen.reason in ("", NEW_REASON) or is_other)


def _registering(change: NodeChange, seen: NodeSight | None, now_s: int) -> Step:
    """Of a dynamic node that is deleted and comes back drained, with its new Gres."""
    is_late = now_s - change.stage_s > VERIFY_S
    if seen is None:
        return Step(Action.FAIL, "the node did not register again") if is_late else Step(Action.REGISTER)
    if not seen.is_drained:
        return Step(Action.FAIL, "the node registered without State=DRAIN, or was resumed; check its layout")
    if not is_own_drain(change, seen):
        return _not_ours(change, seen)
    if seen.has_jobs:
        return Step(Action.FAIL, "a job is on the node, which was drained, at stage register")
    has_reason, gpus = seen.reason.startswith(change.reason), gpu_types(seen.gres)
    is_old = has_reason or seen.reason.startswith(SLURM_REASON)  # whatever Gres it shows by now
    if is_old and change.stage == "register":
        return _deletion(seen, is_late)
    if gpus != dict(change.new_gpus):
        return Step(Action.FAIL, f"slurmd registered {_listed(gpus)}, expected {_listed(change.new_gpus)}")
    return Step(Action.SETTLE if has_reason else Action.MARK)


def _deletion(seen: NodeSight, is_late: bool) -> Step:
    if seen.is_reserved:
        return Step(Action.FAIL, "the node was reserved meanwhile, and the reservation would lose it")
    why = f"Slurm did not delete the node, or slurmd registers otherwise: {seen.reason}"
    return Step(Action.FAIL, why) if is_late else Step(Action.DELETE)


def _unlisted(change: NodeChange, now_s: int) -> Step:
    if change.stage == "drain":
        return Step(Action.DROP, "Slurm does not list the node")
    if now_s - change.stage_s > VERIFY_S:
        return Step(Action.FAIL, "Slurm does not list the node")
    return Step(Action.WAIT, "Slurm does not list the node")


def _not_ours(change: NodeChange, seen: NodeSight) -> Step:
    """The node is not drained by this change."""
    if change.stage == "drain":
        if seen.is_drained and (seen.reason.startswith(FAILED) or is_own_drain(change, seen)):
            return Step(Action.DRAIN)  # an operator asked to take a failed change up again
        if seen.is_drained:
            return Step(Action.DROP, f"drained by somebody else: {seen.reason}")
        has_jobs = seen.has_jobs and not change.is_patient
        refusal = seen.refusal or ("it has a job" if has_jobs else "it is reserved" if seen.is_reserved else "")
        return Step(Action.DROP, refusal) if refusal else Step(Action.DRAIN)
    if change.stage == "resume" and not seen.is_drained:
        return Step(Action.DONE)
    who = f"drained by somebody else: {seen.reason}" if seen.is_drained else "resumed by somebody else"
    return Step(Action.LEAVE, f"{who}, at stage {change.stage}; check its layout and its Gres")


def _waiting(change: NodeChange, seen: NodeSight, now_s: int) -> Step:
    if seen.is_reserved:
        return Step(Action.UNDO, "the node was reserved meanwhile")
    if change.is_patient and seen.refusal:
        return Step(Action.UNDO, seen.refusal)
    if not seen.has_jobs:
        return Step(Action.APPLY)
    if change.stage == "wait" and not change.is_patient and now_s - change.stage_s > JOB_WAIT_S:
        return Step(Action.UNDO, f"a job that began before the drain runs for more than {JOB_WAIT_S} s")
    return Step(Action.WAIT, "a job that began before the drain is running")


def _listed(gpus: Mapping[str, int]) -> str:
    return ",".join(f"{name or 'gpu'}:{number}" for name, number in sorted(gpus.items())) or "no GPU"


def with_new_gpus(change: NodeChange) -> str:
    """Gres= of the node with its new GPUs; other GRES stay, without the sockets that Slurm shows in parentheses."""
    return with_gpus(_SOCKETS.sub("", change.dynamic_gres), change.new_gpus)


def parameters(change: NodeChange, is_drained: bool = True) -> str:
    """Return the words that slurmd adds to its own `--conf`.

    is_drained: a node that Slurm does not know comes up drained, so no job can start before it is verified.
    """
    gres = f"Gres={with_new_gpus(change)}"
    return f"{gres} State=DRAIN Reason={NEW_REASON}" if is_drained else gres
