"""Nodes of a node set, and how many of them Slurm uses, has ready, and has pending jobs for now."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from almanac.actions_config import NodeSet
from almanac.errors import ConfigError
from almanac.tiers import required_features
from almanac.tres import parse_gpus
from slurm.hostlist import expand
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from slurm.states import (
    MAINTENANCE,
    NODE_ASLEEP,
    NODE_BUSY,
    NODE_DOWN,
    NODE_DRAINED,
    NODE_TOLD_OFF,
    NODE_WAKING,
)

_NO_HELP = frozenset({
    "ACCOUNTNOTALLOWED", "ACCOUNTINGPOLICY", "ASSOCIATIONJOBLIMIT", "BADCONSTRAINTS", "BEGINTIME",
    "BURSTBUFFEROPERATION", "BURSTBUFFERRESOURCES", "BURSTBUFFERSTAGEIN", "CLEANING", "DEADLINE", "DEPENDENCY",
    "DEPENDENCYNEVERSATISFIED", "FEDJOBLOCK", "INVALIDACCOUNT", "INVALIDQOS", "JOBARRAYTASKLIMIT", "JOBHELDADMIN",
    "JOBHELDUSER", "JOBHOLDMAXREQUEUE", "LICENSES", "PARTITIONDOWN", "PARTITIONINACTIVE", "PARTITIONNODELIMIT",
    "PARTITIONTIMELIMIT", "RESERVATION", "RESERVATIONDELETED",
})  # fmt: skip
_NO_HELP_STARTS = ("ASSOC", "QOS")
"""Reasons why a job pends that more nodes do not change: AssocGrpGRES, QOSMaxJobsPerUserLimit, ..."""


@dataclass(frozen=True)
class LiveDemand:
    """Nodes of a set now. total: in use or able to serve, powered or not. active: in use. wanted: by pending jobs, at
    most total. asleep: powered down or powering down, and not in use. queued_node_min: node-minutes that the pending
    jobs will likely run for; None where that is not known.
    """

    total: int
    active: int
    wanted: int
    asleep: int
    queued_node_min: float | None = None


def members(node_set: NodeSet, nodes: Sequence[SlurmNode]) -> tuple[str, ...]:
    """Return the names of a node set's nodes, sorted. Excluded nodes, which always stay on, are members too."""
    try:
        listed = frozenset(expand(node_set.nodes))
    except ValueError as error:
        raise ConfigError(
            f"node set {node_set.name}: nodes is not a hostlist: {error}", "write it as gpu[001-064]"
        ) from error
    return tuple(
        sorted(
            {
                node.name
                for node in nodes
                if node.name in listed
                or (node_set.feature and node_set.feature in node.features)
                or not node_set.partitions.isdisjoint(node.partitions)
            }
        )
    )


def is_busy(node: SlurmNode) -> bool:
    """Return True if a job uses the node, or its epilog still runs. A node that is down runs nothing."""
    return bool(node.states & NODE_BUSY) and "DOWN" not in node.states


def is_asleep(node: SlurmNode) -> bool:
    """Return True if it is powered down or on the way there, without a job and not being woken."""
    return bool(node.states & NODE_ASLEEP) and not node.states & NODE_WAKING and not is_busy(node)


def can_serve(node: SlurmNode) -> bool:
    """Return True if jobs can run on it, after a power-up if need be.

    power_down_asap drains a node until it is powered down. A node with any other drain cannot serve, nor one that is
    down, failed, in maintenance, or silent although it is powered.
    """
    states = node.states
    if not states or states & (NODE_DOWN | MAINTENANCE):
        return False
    is_changing = bool(states & (NODE_ASLEEP | NODE_WAKING))
    if "NOT_RESPONDING" in states and not is_changing:
        return False
    return not states & NODE_DRAINED or bool(states & NODE_TOLD_OFF)


def live_demand(
    names: Collection[str], nodes: Sequence[SlurmNode], pending: Sequence[QueuedJob],
    run_s: Mapping[int, float] | None = None,
) -> LiveDemand:  # fmt: skip
    """Demand of the nodes of these names; names that Slurm does not list count as no node.

    run_s: predicted seconds of the pending jobs, by job id. None: not known.
    """
    chosen = frozenset(names)
    own = {node.name: node for node in nodes if node.name in chosen}.values()
    fit = [node for node in own if can_serve(node)]
    active = sum(map(is_busy, own))
    total = active + sum(not is_busy(node) for node in fit)
    wanted, queued_node_min = _pending_demand(fit, pending, run_s)
    return LiveDemand(
        total=total, active=active, wanted=min(total, wanted), asleep=sum(map(is_asleep, fit)),
        queued_node_min=queued_node_min,
    )  # fmt: skip


def wants_nodes(job: QueuedJob) -> bool:
    """Return True if the job could start if there were nodes: it is not held, blocked, limited, or deferred.

    Where Slurm names no reason, or one not known here, it could: a job that waits in vain is worse than a node awake.
    """
    return not (job.is_held or job.reason_key in _NO_HELP or job.reason_key.startswith(_NO_HELP_STARTS))


class _Kind(NamedTuple):
    """Properties of nodes by which pending jobs tell them apart."""

    partitions: frozenset[str]
    features: frozenset[str]
    gres: str
    cpu_count: int


class _Need(NamedTuple):
    """Properties of pending jobs by which they fit nodes."""

    partitions: frozenset[str]
    features: frozenset[str]
    gpu_type: str
    gpu_count: int
    gpus_per_node: int
    shares: tuple[tuple[str, int], ...]
    cpu_count: int
    node_count: int
    is_exclusive: bool


def _pending_demand(
    nodes: Iterable[SlurmNode], pending: Iterable[QueuedJob], run_s: Mapping[int, float] | None
) -> tuple[int, float | None]:
    """Return the nodes that the pending jobs could fill if all nodes were free, and the node-minutes of these jobs.

    A job counts where a node is in one of its partitions, has the features that it requires and enough GPUs of its
    type; so it counts in each node set that it fits. A job of one node counts as its share of it: one over the number
    of such jobs that fit a node by GPUs, by parts of GPUs, or by CPUs, whichever is more. Jobs that fit the same nodes
    count at most as these nodes.

    The node-minutes are each job's nodes, at most those that it fits, times its run time.
    """
    needs, minutes = Counter[_Need](), defaultdict[_Need, float](float)
    for job in pending:
        if wants_nodes(job):
            need, tasks = _need(job), max(1, job.task_count)
            needs[need] += tasks
            minutes[need] += tasks * (math.nan if run_s is None else run_s.get(job.job_id, math.nan)) / 60
    named = (frozenset[str]().union(*(need.partitions for need in needs)),
             frozenset[str]().union(*(need.features for need in needs)))  # fmt: skip
    kinds = Counter(
        _Kind(named[0].intersection(node.partitions), named[1].intersection(node.features), node.gres, node.cpu_count)
        for node in nodes
    )
    shares: defaultdict[tuple[_Kind, ...], float] = defaultdict(float)
    queued_node_min = 0.0 if run_s is not None else math.nan
    ordered = [kind for kind, _ in kinds.most_common()]
    for need, number in needs.items():
        fitting = tuple(kind for kind in ordered if _fits(need, kind))
        if fitting:
            filled = _filled(need, fitting[0])
            shares[fitting] += number * filled
            queued_node_min += minutes[need] * min(filled, sum(map(kinds.__getitem__, fitting)))
    wanted = sum(
        min(sum(map(kinds.__getitem__, fitting)), math.ceil(share - 1e-6)) for fitting, share in shares.items()
    )
    return wanted, None if math.isnan(queued_node_min) else queued_node_min


def _need(job: QueuedJob) -> _Need:
    return _Need(
        frozenset(filter(None, job.partition.split(","))), required_features(job.constraints), job.gpu_type,
        max(0, job.gpu_count), max(0, job.gpus_per_node), job.shares, max(0, job.cpu_count), max(1, job.node_count),
        job.is_exclusive,
    )  # fmt: skip


def _fits(need: _Need, kind: _Kind) -> bool:
    if (need.partitions and not need.partitions & kind.partitions) or not need.features <= kind.features:
        return False
    gpus = _gpus(kind.gres, need.gpu_type)
    if not all(_shares_fitting(kind.gres, name, -(-count // need.node_count)) for name, count in need.shares):
        return False
    return gpus >= max(need.gpus_per_node, min(1, need.gpu_count))


@lru_cache(maxsize=4096)
def _gpus(gres: str, gpu_type: str, name: str = "gpu") -> int:
    """GPUs of a type, or of any, of "gpu:a100:4(S:0-1),gpu:v100:2". name: of another GRES."""
    terms = [parse_gpus(term, name) for term in re.sub(r"\([^()]*\)", "", gres).split(",")]
    return sum(gpus.count for gpus in terms if not gpu_type or gpus.type == gpu_type)


@lru_cache(maxsize=4096)
def _shares_fitting(gres: str, name: str, count: int) -> int:
    """Number of jobs with so many shards of one GPU on a node. Slurm gives out mps on one GPU of a node at a time."""
    gpus = max(1, _gpus(gres, ""))
    return (1 if name == "mps" else gpus) * (_gpus(gres, "", name) // gpus // max(1, count))


def _filled(need: _Need, kind: _Kind) -> float:
    """Nodes of this kind that one job fills: whole ones if it takes several, else its share."""
    gpus, cpus = _gpus(kind.gres, need.gpu_type), kind.cpu_count
    whole = need.node_count
    if need.gpu_count:
        whole = max(whole, -(-need.gpu_count // (need.gpus_per_node or gpus)))
    if cpus:
        whole = max(whole, -(-need.cpu_count // cpus))
    if whole > 1 or need.is_exclusive:
        return float(whole)
    shares = [1 / max(1, _shares_fitting(kind.gres, name, count)) for name, count in need.shares]
    return max(_share(need.gpu_count, gpus), _share(need.cpu_count, cpus), *shares) or 1.0


def _share(used: int, size: int) -> float:
    """Share of a node that a job of this size blocks among others of its size; 0 if unknown."""
    return 1 / max(1, size // used) if size and used else 0.0
