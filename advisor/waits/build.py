"""A QueueView of what Slurm shows: nodes in service by GPU type, jobs with predicted run times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from advisor.waits.remaining import left_span, run_span
from advisor.waits.view import PoolNode, QueueView, RunningJob, WaitingJob
from almanac.gpu_types import asked_types
from almanac.mig import compute_slices
from almanac.records import Duration
from almanac.submit_config import GpuType
from almanac.tres import parse_gpus
from telemetry.slurm.backend import Node
from telemetry.slurm.queue_snapshot import LiveGpuJob

_SERVING = frozenset(
    {
        "IDLE", "MIXED", "ALLOCATED", "PLANNED", "COMPLETING", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE",
        "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_UP", "POWER_DOWN",
    }
)  # fmt: skip
"""States of nodes that take jobs now, or after Slurm has woken them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


def types_on(nodes: Sequence[Node]) -> tuple[GpuType, ...]:
    """The GRES types of whole GPUs on the nodes, where [[gpu_types]] is empty. MIG slices are left out."""
    found = {kind for node in nodes for kind in _counts(node.gres)}
    return tuple(
        GpuType(name=kind, gres=kind) for kind in sorted(found) if _NAME.fullmatch(kind) and not compute_slices(kind)
    )


def build_view(
    nodes: Sequence[Node],
    jobs: Sequence[LiveGpuJob],
    durations: Sequence[Duration | None],
    types: Sequence[GpuType],
    now_s: int,
) -> QueueView:
    """durations: predicted, one a job. Nodes out of service, and GPUs of no known type, are left out."""
    pool: dict[str, PoolNode] = {}
    for node in nodes:
        own = _pool_node(node, types)
        if own is not None and node.states and node.states <= _SERVING and not node.reservation:
            pool[node.name] = own
    place = {name: index for index, name in enumerate(pool)}
    running, waiting = list[RunningJob](), list[tuple[LiveGpuJob, WaitingJob]]()
    for job, duration in zip(jobs, durations, strict=True):
        if job.start_s is not None:
            running.append(_running(job, duration, place, now_s))
        else:
            waiting.append((job, _waiting(job, duration, types, now_s)))
    waiting.sort(key=lambda each: (-each[0].priority, each[0].request.submit_s))
    held = _most(running, list(pool.values()))
    return QueueView(tuple(pool.values()), tuple(held), tuple(job for _, job in waiting), now_s)


def _counts(gres: str) -> dict[str, int]:
    """GPUs by type of "gpu:a100:4(S:0-1),nvme:1"; "" for those without a type."""
    counts: Counter[str] = Counter()
    for term in re.sub(r"\([^()]*\)", "", gres).split(","):
        if term.split(":")[0] == "gpu":
            found = parse_gpus(term)
            counts[found.type] += found.count
    return dict(counts)


def _pool_node(node: Node, types: Sequence[GpuType]) -> PoolNode | None:
    """A node of several known types, or of none, is in no pool: what a job would get there is not known."""
    counts = _counts(node.gres)
    total = sum(counts.values())
    named = [kind for kind in types if _is_on(kind, node, counts)]
    if len(named) != 1 or not total:
        return None
    gpus = counts[named[0].gres] if named[0].gres else total
    return PoolNode(named[0].name, gpus, frozenset(node.partitions))


def _is_on(kind: GpuType, node: Node, counts: Mapping[str, int]) -> bool:
    if kind.gres:
        return counts.get(kind.gres, 0) > 0
    return kind.constraint in node.features if kind.constraint else kind.partition in node.partitions


def _running(job: LiveGpuJob, duration: Duration | None, place: Mapping[str, int], now_s: int) -> RunningJob:
    limit_s, elapsed_s = job.request.time_limit_s, max(now_s - (job.start_s or now_s), 0)
    each, more = divmod(job.request.gpu_count, max(len(job.nodes), 1))
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


def _waiting(job: LiveGpuJob, duration: Duration | None, types: Sequence[GpuType], now_s: int) -> WaitingJob:
    request = job.request
    return WaitingJob(
        gpus=request.gpu_count,
        nodes=min(request.node_count, request.gpu_count),
        types=asked_types(request, types),
        run=run_span(duration, request.time_limit_s),
        submitted_s=float(now_s - request.submit_s),
        partitions=frozenset(name for name in request.partition.split(",") if name),
        limit_s=request.time_limit_s,
        is_ready=job.is_ready,
        count=job.count,
    )
