"""What comes next in the change of one node's layout, from what was done and what Slurm shows. Pure.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from slurm_hooks.mig.layouts import Layout, gpu_types, named_types, shown

Stage = Literal["drain", "wait", "apply", "gres", "reconfigure", "register", "settle", "verify", "resume"]
PREFIX = "almanac mig:"
FAILED = "almanac mig failed:"
"""How the reason of a node begins that stays drained."""
NEW_REASON = "almanac-mig"
"""The reason that a dynamic node registers with; 22.05 drops it."""
SLURM_REASON = "gres/"
"""How Slurm's own reason begins, in place of ours, where slurmd has other Gres than slurmctld (24.11)."""
MOST_REASON = 240
_STRANGE = frozenset(
    {"DOWN", "ERROR", "INVALID_REG", "INVAL", "UNKNOWN", "NOT_RESPONDING", "FUTURE", "FAIL", "POWERED_DOWN",
     "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
)  # fmt: skip
"""States that a node must not have to be resumed."""


@dataclass(frozen=True)
class NodeChange:
    """The change of one node, as it is remembered. begun_s: when it was decided; stage_s: when the stage began.

    old_gpus, new_gpus: GPUs of each GRES type. is_undone: the old layout stays, and nothing was ordered on the node.
    fault: why it failed; "" where it has not. A failed change is remembered until the node is resumed. is_patient: the
    node was drained with jobs on it, which may take as long as they like. dynamic_gres: a dynamic node's Gres
    as it was; "" for a node of slurm.conf.
    """

    node: str
    model: str
    old: Layout
    new: Layout
    old_gpus: Mapping[str, int]
    new_gpus: Mapping[str, int]
    begun_s: int
    stage: Stage = "drain"
    stage_s: int = 0
    is_undone: bool = False
    fault: str = ""
    is_patient: bool = False
    dynamic_gres: str = ""

    @property
    def waits_for_jobs(self) -> bool:
        """Whether the node only takes no more jobs so far, and can be given back at once."""
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
class NodeSight:
    """What Slurm shows of a node. gres: as configured; gres_used: by type as slurmctld counts it, "" where not shown.

    refusal: why a change must not begin now, "" where it may: see gate.py.
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
        return bool(self.states & {"DRAIN", "DRAINING", "DRAINED"})


@dataclass(frozen=True)
class StepLimits:
    """Seconds: job_wait_s for jobs that came before the drain, verify_s for Slurm to show the new layout."""

    job_wait_s: int
    verify_s: int


class Action(Enum):
    """What to do next. KEEP: the node stays drained as it is. LEAVE: it is somebody else's now, and forgotten.

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


def next_step(change: NodeChange, seen: NodeSight | None, now_s: int, limits: StepLimits) -> Step:
    """What to do next with a node. seen: None where Slurm does not list it."""
    if change.fault:
        return _failed(change, seen)
    if change.stage in ("register", "settle"):
        return _registering(change, seen, now_s, limits)
    if seen is None and change.dynamic_gres and change.stage in ("apply", "gres"):
        return Step(Action.APPLY if change.stage == "apply" else Action.WRITE_GRES)  # no job runs on a deleted node
    if seen is None:
        return _unlisted(change, now_s, limits)
    is_prepared = change.stage == "gres" and is_own_drain(change, seen)
    if not (is_prepared or (seen.is_drained and seen.reason.startswith(change.reason))):
        return _not_ours(change, seen)
    if change.stage in ("drain", "wait"):
        return _waiting(change, seen, now_s, limits)
    if seen.has_jobs and not change.is_undone:
        return Step(Action.FAIL, f"a job is on the node, which was drained, at stage {change.stage}")
    if change.stage == "apply":
        return Step(Action.APPLY)
    if change.stage == "gres":
        return Step(Action.WRITE_GRES)
    if change.stage == "reconfigure":
        return Step(Action.RECONFIGURE)
    wrong = unlike(change, seen)
    is_late = now_s - change.stage_s > limits.verify_s
    if not wrong and not (change.stage == "resume" and is_late):
        return Step(Action.VERIFY)
    wrong = wrong or "Slurm did not resume the node"
    if is_late:
        return Step(Action.FAIL, wrong)
    return Step(Action.WAIT, wrong)


def unlike(change: NodeChange, seen: NodeSight) -> str:
    """Why Slurm does not show the layout that the node must have; "" where it does."""
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
    """Whether the drain is this change's, and no failure is written on it."""
    if not seen.is_drained or seen.reason.startswith(change.reason):
        return seen.is_drained
    is_other = seen.reason.startswith(SLURM_REASON) and change.stage in ("gres", "register", "settle")
    return bool(change.dynamic_gres) and (seen.reason in ("", NEW_REASON) or is_other)


def _registering(change: NodeChange, seen: NodeSight | None, now_s: int, limits: StepLimits) -> Step:
    """Of a dynamic node that is deleted and comes back drained, with its new Gres."""
    is_late = now_s - change.stage_s > limits.verify_s
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


def _unlisted(change: NodeChange, now_s: int, limits: StepLimits) -> Step:
    if change.stage == "drain":
        return Step(Action.DROP, "Slurm does not list the node")
    if now_s - change.stage_s > limits.verify_s:
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


def _waiting(change: NodeChange, seen: NodeSight, now_s: int, limits: StepLimits) -> Step:
    if seen.is_reserved:
        return Step(Action.UNDO, "the node was reserved meanwhile")
    if change.is_patient and seen.refusal:
        return Step(Action.UNDO, seen.refusal)
    if not seen.has_jobs:
        return Step(Action.APPLY)
    if change.stage == "wait" and not change.is_patient and now_s - change.stage_s > limits.job_wait_s:
        return Step(Action.UNDO, f"a job that began before the drain runs for more than {limits.job_wait_s} s")
    return Step(Action.WAIT, "a job that began before the drain is running")


def _listed(gpus: Mapping[str, int]) -> str:
    return ",".join(f"{name or 'gpu'}:{number}" for name, number in sorted(gpus.items())) or "no GPU"
