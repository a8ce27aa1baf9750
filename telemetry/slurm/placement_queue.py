"""Pending and running GPU jobs, and nodes, with what placement needs of both: one look at Slurm, any release.

From JSON: no name or comment can forge a record.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from almanac.errors import CommandError
from telemetry.slurm.backend import Node, PendingJob
from telemetry.slurm.commands import Runner
from telemetry.slurm.gres_queue import GresJob, gres_record
from telemetry.slurm.hostlist import expand
from telemetry.slurm.queue_json import queue_of, queue_record, queued
from telemetry.sources.sacct_json import number, words

RUNNING = "RUNNING"
_GPU = re.compile(r"gpu(?::(?P<type>[\w.+-]{1,64}|\(null\)))?:(?P<count>[0-9]{1,9})", re.ASCII)
_MOST_NODES = 10_000
_ENDED_STATES = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)


@dataclass(frozen=True)
class QueueJob:
    """A record of slurmctld that has not ended. gres: its request. record: the submission.

    states: upper case, RUNNING and COMPLETING among them. start_s: None while it waits. given: GPUs by GRES type that
    it holds ("" for no type). nodes: that it holds. waits_for_jobs: it has a dependency that is not fulfilled.
    """

    gres: GresJob
    record: PendingJob
    states: frozenset[str]
    start_s: int | None = None
    given: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    can_requeue: bool = False
    is_batch: bool = False
    waits_for_jobs: bool = False

    @property
    def job_id(self) -> int:
        return self.gres.job_id

    @property
    def is_pending(self) -> bool:
        return self.states == {"PENDING"}

    @property
    def is_running(self) -> bool:
        return self.states == {RUNNING}


@dataclass(frozen=True)
class QueueNode:
    """A node and its GPUs by GRES type. used: None where Slurm does not tell."""

    node: Node
    total: Mapping[str, int]
    used: Mapping[str, int] | None


@dataclass(frozen=True)
class QueueView:
    """Slurm at one time. read_s: before the first command. unreadable: records left out."""

    read_s: float
    jobs: tuple[QueueJob, ...]
    nodes: tuple[QueueNode, ...] = ()
    unreadable: int = 0

    def find(self, job_id: int) -> QueueJob | None:
        return next((job for job in self.jobs if job.job_id == job_id), None)


def read_queue(commands: Runner, cluster: str) -> tuple[tuple[QueueJob, ...], int]:
    """The jobs of a cluster that have not ended, and the number of records that cannot be read. Raises CommandError."""
    return queue_jobs(queue_of(commands, ()), cluster)


def read_jobs(commands: Runner, cluster: str, job_ids: Collection[int]) -> dict[int, QueueJob]:
    """Those of some jobs that have not ended. Raises CommandError, also where a record cannot be read."""
    jobs, unreadable = queue_jobs(queue_of(commands, job_ids), cluster)
    require_readable(unreadable)
    return {job.job_id: job for job in jobs if job.job_id in job_ids}


def queue_jobs(data: bytes, cluster: str) -> tuple[tuple[QueueJob, ...], int]:
    """Of `squeue -a --json`. 22.05 lists jobs that have ended, too. Raises CommandError."""
    jobs, unreadable = [], 0
    for row in queued(data):
        if str(row.get("cluster") or cluster).lower() != cluster.lower():
            continue
        states = frozenset(word.upper() for word in words(row.get("job_state")) or ())
        if states & _ENDED_STATES and "COMPLETING" not in states:
            continue
        try:
            jobs.append(_job(row, states))
        except (KeyError, TypeError, ValueError):
            unreadable += 1
    return tuple(sorted(jobs, key=lambda job: job.job_id)), unreadable


def _job(row: Mapping[str, Any], states: frozenset[str]) -> QueueJob:
    """Raises KeyError, TypeError, or ValueError."""
    if not states:
        raise ValueError("no state")
    is_pending = "PENDING" in states
    given: dict[str, int] = {}
    for part in row.get("gres_detail") or ():
        for kind, count in gpu_counts(str(part)).items():
            given[kind] = given.get(kind, 0) + count
    return QueueJob(
        gres=gres_record(row),
        record=queue_record(row),
        states=states,
        start_s=None if is_pending else number(row.get("start_time")) or None,
        given={} if is_pending else given,
        nodes=() if is_pending else _hosts(str(row.get("nodes") or "")),
        can_requeue=_is_true(row.get("requeue")),
        is_batch=_is_true(row.get("batch_flag")),
        waits_for_jobs=bool(str(row.get("dependency") or "").strip()),
    )


def _is_true(value: Any) -> bool:
    """A flag that 22.05 writes as 0 or 1, or true."""
    return value is True or number(value) == 1


def _hosts(text: str) -> tuple[str, ...]:
    """Raises ValueError."""
    found = expand(text) if text else ()
    if len(found) > _MOST_NODES:
        raise ValueError("too many nodes")
    return found


def queue_nodes(nodes: Sequence[Node]) -> tuple[QueueNode, ...]:
    """Nodes with their GPUs."""
    return tuple(QueueNode(node, gpu_counts(node.gres), _used(node.gres_used)) for node in nodes)


def _used(text: str) -> dict[str, int] | None:
    return {("" if kind == "(null)" else kind): count for kind, count in gpu_counts(text).items()} if text else None


def gpu_counts(text: str) -> dict[str, int]:
    """GPUs by type of "gpu:a100:3(S:0-1),gpu:h100:1(IDX:0)"; "" for no type. Other GRES are passed over."""
    counts: dict[str, int] = {}
    for term in re.sub(r"\((?!null\))[^()]*\)", "", text).split(","):
        match = _GPU.fullmatch(term.strip())
        if match:
            kind = match["type"] or ""
            counts[kind] = counts.get(kind, 0) + int(match["count"])
    return counts


def require_readable(unreadable: int) -> None:
    """Raises CommandError where a record could not be read: almanac would then count its GPUs as idle."""
    if unreadable:
        raise CommandError(f"{unreadable} records of squeue --json cannot be read", "run `squeue -a --json` yourself")
