"""Which pending jobs of one slice are raised to an idle larger type now, and which get their own type back. Pure.

A job is raised only if its owner or its partition opted in, if it waits for resources or priority, and if nobody who
may start soon waits for the larger type. `decide_raises` chooses the type; the simulator runs it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from advisor.decisions.mig_raise import PendingSlice, decide_raises
from almanac.actions_config import MigRaise
from almanac.records import Counts
from almanac.units import MOST_USER_TEXT, format_duration
from slurm_hooks.mig.raise_log import RaiseKind, RaiseLine
from slurm_hooks.mig.raise_nodes import IdlePool, has_plain_constraint, waiting_types
from slurm_hooks.mig.raise_types import OneSlice, chains, one_slice
from telemetry.slurm.backend import Reservation
from telemetry.slurm.gres_queue import GresJob, GresNode, GresQueue

OPT_IN, OPT_OUT = "almanac:larger", "almanac:same"
"""Words of a job's --comment."""
WAITS = frozenset({"RESOURCES", "PRIORITY"})
UNDO_S = 600
"""Time until a raised job that still waits gets its own type back: an idle slice starts it within minutes."""
AGAIN_S = 3600
"""Time from then until almanac may raise the same job again."""
SOON_S = 3600
"""Pending jobs that may start within this time count as waiting for their type."""
JOBS_PER_RUN = 20
"""Most jobs that one run raises: each takes three commands, and the next run comes within minutes."""
_SOUND = WAITS | {"NONE", ""}
_IN_FORCE: frozenset[RaiseKind] = frozenset({"raise", "raised", "started", "undo"})


@dataclass(frozen=True)
class RaiseOrder:
    """What to tell Slurm about a pending job. request: its own. new_type: the larger type, in an undo too."""

    what: Literal["raise", "undo", "release"]
    job: GresJob
    request: OneSlice
    new_type: str
    reason: str

    @property
    def text(self) -> str:
        """The request to send."""
        return self.request.of(self.new_type) if self.what == "raise" else self.request.text


@dataclass(frozen=True)
class RaiseNote:
    """What became of an earlier line; Slurm is told nothing."""

    what: RaiseKind
    job: GresJob
    line: RaiseLine
    reason: str


@dataclass(frozen=True)
class RaisePlan:
    """orders: undos first. counts: why the other pending jobs stay as they are."""

    orders: tuple[RaiseOrder, ...]
    notes: tuple[RaiseNote, ...]
    counts: Counts


@dataclass(frozen=True)
class ClusterState:
    """What Slurm says now."""

    queue: GresQueue
    nodes: tuple[GresNode, ...]
    reservations: tuple[Reservation, ...]


def is_opted_in(job: GresJob, partitions: Sequence[str]) -> bool:
    """By its --comment, or by all of its partitions. Only whole words of a comment count."""
    if len(job.comment) > MOST_USER_TEXT:
        return False
    words = set(re.split(r"[\s,;]+", job.comment))
    if OPT_OUT in words:
        return False
    return OPT_IN in words or bool(job.partitions and set(job.partitions) <= set(partitions))


def is_sound(job: GresJob) -> bool:
    """Whether a raised job waits as any other: at no limit, not held, and some node can run it."""
    return job.priority > 0 and (job.reason in _SOUND or job.reason.startswith("REQNODENOTAVAIL"))


def plan_raises(
    state: ClusterState, log: Mapping[int, RaiseLine], settings: MigRaise, now_s: int, is_clearing: bool = False
) -> RaisePlan:
    """Changes to make now. log: as RaiseLog.newest gives it. is_clearing: only give back own types, all of them."""
    orders, notes = _settle(state.queue.jobs, log, settings, now_s, is_clearing)
    counts = Counts(seen=len(state.queue.jobs) + state.queue.unreadable)
    counts.drop("pending job that cannot be read: nothing is raised", state.queue.unreadable)
    busy = {order.job.job_id for order in orders}
    raises = []
    if not is_clearing and not state.queue.unreadable:
        others = [job for job in state.queue.jobs if job.job_id not in busy]
        raises = _raises(state, others, log, settings, now_s, counts)
    counts.kept = len(orders) + len(raises)
    return RaisePlan((*orders, *raises), tuple(notes), counts)


def _settle(
    jobs: Sequence[GresJob], log: Mapping[int, RaiseLine], settings: MigRaise, now_s: int, is_clearing: bool
) -> tuple[list[RaiseOrder], list[RaiseNote]]:
    """What the record's jobs need that wait now."""
    orders, notes = [], []
    for job in jobs:
        line = log.get(job.job_id)
        if line is None or not line.is_about(job):
            continue
        shown = one_slice(job.requests)
        where = (shown.key, shown.type) if shown else None
        if line.what in _IN_FORCE and where == (line.key, line.new_type):
            if why := _why_undo(job, line, settings, now_s, is_clearing):
                orders.append(RaiseOrder("undo", job, line.request, line.new_type, why))
            elif line.what == "raise":
                notes.append(RaiseNote("raised", job, line, "Slurm shows the new type"))
        elif line.what in _IN_FORCE and where != (line.key, line.type):
            notes.append(RaiseNote("owner", job, line, "somebody else changed the request"))
        elif line.what in _IN_FORCE:
            notes.append(_note_own_type(job, line))
        if where == (line.key, line.type) and line.what in ("undo", "undone") and job.reason == "BADCONSTRAINTS":
            orders.append(RaiseOrder("release", job, line.request, line.new_type, "BadConstraints"))
    return orders, notes


def _note_own_type(job: GresJob, line: RaiseLine) -> RaiseNote:
    """Of a job that shows its own type again: who gave it back?"""
    if line.what == "undo":
        return RaiseNote("undone", job, line, "Slurm shows its own type")
    if line.what == "raise":
        return RaiseNote("refused", job, line, "Slurm shows its own type")
    return RaiseNote("owner", job, line, "somebody else changed the request")


def _why_undo(job: GresJob, line: RaiseLine, settings: MigRaise, now_s: int, is_clearing: bool) -> str:
    """ "" while the job may keep the larger type."""
    if line.what == "undo":
        return line.reason
    if is_clearing:
        return "cleared"
    if not is_sound(job):
        return f"Slurm: {job.reason or 'held'}"
    if not is_opted_in(job, settings.partitions):
        return "no longer opted in"
    if now_s - line.time_s >= UNDO_S:
        return f"still waits after {format_duration(now_s - line.time_s)}"
    return ""


def _raises(
    state: ClusterState,
    jobs: Sequence[GresJob],
    log: Mapping[int, RaiseLine],
    settings: MigRaise,
    now_s: int,
    counts: Counts,
) -> list[RaiseOrder]:
    """In the queue's order. jobs: those without an order."""
    known = chains({name for node in state.nodes for name in node.total}, settings.types)
    waiting = waiting_types(state.queue.jobs, now_s, SOON_S)
    pool = IdlePool.of(state.nodes, state.reservations, now_s)
    orders: list[RaiseOrder] = []
    for job in sorted(jobs, key=lambda job: (-job.priority, job.job_id)):
        request = one_slice(job.requests)
        chain = next((each for each in known if request and request.type in each), ())
        why_not = _why_not(job, request, chain, log, settings, now_s)
        if not why_not and len(orders) >= JOBS_PER_RUN:
            why_not = "waits for the next run (20 jobs a run)"
        if why_not or request is None:
            counts.drop(why_not)
            continue
        new = _larger(job, request, chain, pool, waiting)
        if new is None:
            counts.drop("no larger type is idle that nobody waits for, or its own type is")
            continue
        pool.take(job, new, waiting)
        orders.append(RaiseOrder("raise", job, request, new, "idle, nobody waits for it"))
    return orders


def _larger(
    job: GresJob, request: OneSlice, chain: tuple[str, ...], pool: IdlePool, waiting: dict[str, frozenset[str]]
) -> str | None:
    idle = pool.idle_for(job, waiting, request.type)
    [*found] = decide_raises([PendingSlice(job.job_id, request.type)], idle, chain)
    return found[0].new if found else None


def _why_not(
    job: GresJob,
    request: OneSlice | None,
    chain: tuple[str, ...],
    log: Mapping[int, RaiseLine],
    settings: MigRaise,
    now_s: int,
) -> str:
    """Why a job is not looked at; "" if it is."""
    line = log.get(job.job_id)
    if not job.asked_types:
        return "asks for no GPU"
    if not is_opted_in(job, settings.partitions):
        return f"not opted in ({OPT_IN} in --comment)"
    if job.is_array:
        return "an array's common record: only tasks with a record of their own are raised"
    if not job.is_plain or job.node_count != 1 or not has_plain_constraint(job):
        return "several nodes, whole nodes, a reservation, licenses, or a constraint with a choice"
    if request is None:
        return "does not ask for exactly one slice of one type"
    if not chain:
        return "its type is in no order of sizes (mig_raise.types)"
    if line and line.is_about(job):
        return _why_not_again(line, now_s) or _why_not_now(job)
    return _why_not_now(job)


def _why_not_now(job: GresJob) -> str:
    if job.priority == 0:
        return "held"
    return "" if job.reason in WAITS else "does not wait for resources or priority"


def _why_not_again(line: RaiseLine, now_s: int) -> str:
    if line.what == "owner":
        return "somebody changed its request after a raise"
    if line.what in _IN_FORCE:
        return "raised, and still waits"
    is_recent = now_s - line.time_s < AGAIN_S
    return "had its own type back within the last hour" if is_recent else ""
