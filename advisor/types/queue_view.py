"""A snapshot of the queue for wait estimates: nodes in service by GPU type, running and waiting jobs. No names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from almanac.hardware import compute_slices
from almanac.records import Duration
from almanac.submit_config import GpuType
from almanac.tiers import asked_types
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from slurm.states import IN_SERVICE, NODE_OFF, NODE_WAKING, WAITS_FOR_ROOM


@dataclass(frozen=True)
class Span:
    """A time from now, seconds: likely, and its interval."""

    low_s: float
    likely_s: float
    high_s: float


@dataclass(frozen=True)
class PoolNode:
    """A node in service. gpus: that it has, of one type."""

    gpu_type: str
    gpus: int
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunningJob:
    """A job that holds GPUs. gpus: by index of the node. left: until it ends; limit_s: until its time limit."""

    gpus: Mapping[int, int]
    left: Span
    limit_s: float | None = None


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits, or tasks of an array that do (count).

    nodes: over which its gpus are spread evenly. types: that it accepts; empty: any. partitions: empty: any.
    is_ready: only priority and resources keep it from starting. submitted_s: seconds ago.
    """

    gpus: int
    nodes: int
    types: frozenset[str]
    run: Span
    submitted_s: float
    partitions: frozenset[str] = frozenset()
    limit_s: float | None = None
    is_ready: bool = True
    count: int = 1


@dataclass(frozen=True)
class QueueView:
    """A snapshot of the cluster. waiting: by Slurm's priority, first to start first. as_of_s: unix seconds."""

    nodes: tuple[PoolNode, ...]
    running: tuple[RunningJob, ...]
    waiting: tuple[WaitingJob, ...]
    as_of_s: int


MOST_S = 7 * 86_400.0
"""Stands for the time limit of a job without one."""
LEAST_S = 1.0
OVERRUN_SHARE = 0.5
"""Share of its elapsed time that a job may still need once it has run longer than its interval."""


def run_span(duration: Duration | None, limit_s: float | None) -> Span:
    """The run time of a job that has not started. Without a prediction it is anything up to the limit."""
    most_s = limit_s or MOST_S
    if duration is None:
        return Span(min(LEAST_S, most_s), most_s / 2, most_s)
    low_s = duration.low_s if duration.low_s is not None else duration.duration_s / 4
    high_s = duration.high_s if duration.high_s is not None else duration.duration_s * 4
    return _ordered(low_s, duration.duration_s, high_s, most_s)


def left_span(run: Span, elapsed_s: float, limit_s: float | None) -> Span:
    """Return the rest of a run after elapsed_s. A job that outlived its prediction has half of what it ran still ahead.

    limit_s: of the whole run. A job past its limit ends now.
    """
    most_s = math.inf if limit_s is None else max(limit_s - elapsed_s, 0.0)
    longer_s = OVERRUN_SHARE * elapsed_s
    if elapsed_s < run.likely_s:
        likely_s = run.likely_s - elapsed_s
    elif elapsed_s < run.high_s:
        likely_s = (run.high_s - elapsed_s) / 2
    else:
        likely_s = longer_s
    high_s = run.high_s - elapsed_s if elapsed_s < run.high_s else 2 * longer_s
    return _ordered(max(run.low_s - elapsed_s, 0.0), likely_s, high_s, most_s)


def _ordered(low_s: float, likely_s: float, high_s: float, most_s: float) -> Span:
    likely_s = min(max(likely_s, LEAST_S), most_s)
    return Span(min(low_s, likely_s), likely_s, min(max(high_s, likely_s), most_s))


_SERVING = IN_SERVICE | NODE_OFF | NODE_WAKING | {"POWER_DOWN"}
"""States of nodes that take jobs now, or after Slurm has woken them."""
_READY = WAITS_FOR_ROOM | {"", "NONE", "NODEDOWN", "REQNODENOTAVAIL"}
"""Reasons of a job that only priority and resources keep from starting."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


def types_on(nodes: Sequence[SlurmNode]) -> tuple[GpuType, ...]:
    """The GRES types of whole GPUs on the nodes, where [[gpu_types]] is empty. MIG slices are left out."""
    found = {kind for node in nodes for kind in node.gpus}
    return tuple(
        GpuType(name=kind, gres=kind) for kind in sorted(found) if _NAME.fullmatch(kind) and not compute_slices(kind)
    )


def build_view(
    nodes: Sequence[SlurmNode],
    jobs: Sequence[QueuedJob],
    durations: Sequence[Duration | None],
    types: Sequence[GpuType],
    now_s: int,
) -> QueueView:
    """Build the view of nodes and queue on which placement decides.

    durations: predicted, one a job. Nodes out of service, and GPUs of no known type, are left out.
    """
    pool: dict[str, PoolNode] = {}
    for node in nodes:
        own = _pool_node(node, types)
        if own is not None and node.states and node.states <= _SERVING and not node.reservation:
            pool[node.name] = own
    place = {name: index for index, name in enumerate(pool)}
    own_nodes = tuple(pool.values())
    running, waiting = list[RunningJob](), list[tuple[QueuedJob, WaitingJob]]()
    for job, duration in zip(jobs, durations, strict=True):
        if job.holds_nodes:
            running.append(_running(job, duration, place, now_s))
        elif (found := _waiting(job, duration, types, own_nodes, now_s)).gpus:
            waiting.append((job, found))
    waiting.sort(key=lambda each: (-each[0].rank, each[0].submit_s))
    held = _most(running, own_nodes)
    return QueueView(own_nodes, tuple(held), tuple(job for _, job in waiting), now_s)


def _pool_node(node: SlurmNode, types: Sequence[GpuType]) -> PoolNode | None:
    """A node of several known types, or of none, is in no pool: what a job would get there is not known."""
    counts = node.gpus
    total = sum(counts.values())
    named = [kind for kind in types if _is_on(kind, node, counts)]
    if len(named) != 1 or not total:
        return None
    gpus = counts[named[0].gres] if named[0].gres else total
    return PoolNode(named[0].name, gpus, frozenset(node.partitions))


def _is_on(kind: GpuType, node: SlurmNode, counts: Mapping[str, int]) -> bool:
    if kind.gres:
        return counts.get(kind.gres, 0) > 0
    return kind.constraint in node.features if kind.constraint else kind.partition in node.partitions


def _running(job: QueuedJob, duration: Duration | None, place: Mapping[str, int], now_s: int) -> RunningJob:
    limit_s, elapsed_s = job.time_limit_s, max(now_s - (job.start_s or now_s), 0)
    each, more = divmod(job.gpu_count, max(len(job.nodes), 1))
    spread = [each + (index < more) for index in range(len(job.nodes))]
    counts = job.node_gpus if len(job.node_gpus) == len(job.nodes) else spread
    gpus = {place[name]: count for name, count in zip(job.nodes, counts, strict=True) if name in place}
    return RunningJob(
        {node: count for node, count in gpus.items() if count},
        left_span(run_span(duration, limit_s), elapsed_s, limit_s),
        None if limit_s is None else max(limit_s - elapsed_s, 0.0),
    )


def _most(running: Sequence[RunningJob], pool: Sequence[PoolNode]) -> list[RunningJob]:
    """The jobs with no more GPUs on a node than it has: their split over nodes may be a guess."""
    free, found = [node.gpus for node in pool], []
    for job in running:
        gpus = {node: min(count, free[node]) for node, count in job.gpus.items()}
        for node, count in gpus.items():
            free[node] -= count
        found.append(RunningJob({node: count for node, count in gpus.items() if count}, job.left, job.limit_s))
    return found


def _waiting(
    job: QueuedJob, duration: Duration | None, types: Sequence[GpuType], pool: Sequence[PoolNode], now_s: int
) -> WaitingJob:
    """A job that waits for whole nodes gets all their GPUs, whatever it asks for; 0 if no node of the pool is its."""
    asked, partitions, gpus = asked_types(job.request(), types), frozenset(job.partitions), job.gpu_count
    if job.is_exclusive:
        own = [
            node.gpus
            for node in pool
            if (not asked or node.gpu_type in asked) and (not partitions or node.partitions & partitions)
        ]
        gpus = max(gpus, job.node_count * min(own, default=0))
    return WaitingJob(
        gpus=gpus,
        nodes=min(job.node_count, gpus),
        types=asked,
        run=run_span(duration, job.time_limit_s),
        submitted_s=float(now_s - job.submit_s),
        partitions=partitions,
        limit_s=job.time_limit_s,
        is_ready=job.reason_key in _READY,
        count=job.task_count,
    )
