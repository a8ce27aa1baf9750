"""The GPU type that each job which accepts any would get now, from one look at Slurm. Pure.

All jobs that wait for or hold GPUs of the partitions are in the decision; only those of the callers are ever changed.
A job without usable run times counts with its time limit, on each type that it allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from advisor.types.placement import (
    NEVER_MOVE,
    SOLVER_S,
    WAITS,
    PlacementDecision,
    PlacementRules,
    PlacementView,
    decide_placement,
)
from almanac.actions_config import PlacementSection
from slurm.hostlist import expand
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob, RequestKey
from slurm.states import WAITS_FOR_ROOM
from slurm_hooks.types.request import TypeRequest, names_one, type_request

DAY_S = 86_400.0
MOST_JOBS = 1024
"""Pending jobs that a decision looks at, highest priority first."""
MOST_TASKS, MOST_ROWS = 64, 2048
"""Tasks of one array that count as waiting, and jobs and tasks in all."""


@dataclass(frozen=True)
class RunTime:
    """Seconds of a whole run on one GPU type: the usual time, the interval of a single run, and a long run."""

    gpu_type: str
    run_s: float
    low_s: float
    high_s: float
    longest_s: float


JobSpeeds = Callable[[Sequence[QueuedJob], Sequence[str]], Mapping[int, Sequence[RunTime]]]
"""Run times of jobs on types, by job number; types that are not known, or do not fit, are left out.

Raises NoModelError if nothing at all is known about the site's types.
"""
Times = Mapping[int, Mapping[str, RunTime]]
"""Usable run times by job number and GPU type."""


@dataclass(frozen=True)
class TypePool:
    """The GPUs of one type that can start jobs now."""

    total: int
    free: int


@dataclass(frozen=True)
class QueueAndNodes:
    """Slurm at one time. read_s: before the first command."""

    read_s: float
    jobs: tuple[QueuedJob, ...]
    nodes: tuple[SlurmNode, ...] = ()


@dataclass(frozen=True)
class TypeCluster:
    """One look at Slurm with the site's settings."""

    view: QueueAndNodes
    settings: PlacementSection
    pools: Mapping[str, TypePool] = field(default_factory=dict)

    @property
    def types(self) -> tuple[str, ...]:
        """GPU types that some node in service has, in the site's order."""
        return tuple(name for name in dict.fromkeys(self.settings.types) if name in self.pools)

    def request(self, job: QueuedJob) -> TypeRequest | None:
        """Return the part of a job's request that names its type, if almanac can change it."""
        return self.request_in(job.constraints, job.requests)

    def request_in(self, constraints: str, requests: Mapping[RequestKey, str]) -> TypeRequest | None:
        """Return what `request` does, from constraints and requests as text."""
        return type_request(constraints, requests, self.settings.types, self.settings.select_by)

    def reachable(self, job: QueuedJob) -> frozenset[str]:
        """Types that enough nodes of the job's partitions have, with enough GPUs and CPUs on each of them."""
        nodes = max(1, job.node_count)
        gpus, cpus = -(-job.gpu_count // nodes), -(-job.cpu_count // nodes)
        excluded = _names(job.excluded_nodes)
        found: dict[str, int] = {}
        for each in self.view.nodes:
            is_here = set(each.partitions) & set(job.partitions) and each.name not in excluded
            if is_here and each.takes_jobs and (not each.cpu_count or each.cpu_count >= cpus):
                for name, (count, _) in _gpus(each, self.settings).items():
                    found[name] = found.get(name, 0) + (count >= gpus)
        return frozenset(name for name, count in found.items() if count >= nodes)

    def type_of(self, job: QueuedJob) -> str:
        """The one type that a running job has; "" if it has several, or another."""
        if self.settings.select_by == "gres":
            kinds = {name for name, count in job.given.items() if count}
        else:
            by_name = {each.name: each for each in self.view.nodes}
            kinds = {node_type(by_name[name], self.settings) if name in by_name else "" for name in job.nodes}
        return kinds.pop() if len(kinds) == 1 and kinds <= set(self.types) else ""


def cluster_of(view: QueueAndNodes, settings: PlacementSection) -> TypeCluster:
    """The GPUs of the nodes in service that belong to a partition of `settings`."""
    total, free = Counter[str](), Counter[str]()
    for each in view.nodes:
        if not each.takes_jobs or not set(each.partitions) & set(settings.partitions):
            continue
        for name, (count, free_count) in _gpus(each, settings).items():
            total[name] += count
            free[name] += free_count
    pools = {name: TypePool(count, free[name]) for name, count in total.items() if count}
    return TypeCluster(view, settings, pools)


def _names(text: str) -> frozenset[str]:
    """Nodes of a host list; none if it cannot be read."""
    try:
        return frozenset(expand(text)) if text else frozenset()
    except ValueError:
        return frozenset()


def node_type(each: SlurmNode, settings: PlacementSection) -> str:
    """The node's GPU type at a site that asks by features; "" for none, or for two of them."""
    found = set(each.features) & set(settings.types)
    return found.pop() if len(found) == 1 else ""


def _gpus(each: SlurmNode, settings: PlacementSection) -> dict[str, tuple[int, int]]:
    """(GPUs, free GPUs) by type; none is free if Slurm does not tell what is in use."""
    free = each.free_gpus
    if settings.select_by == "gres":
        return {name: (count, free.get(name, 0)) for name, count in each.gpus.items() if name in settings.types}
    kind, count = node_type(each, settings), sum(each.gpus.values())
    return {kind: (count, sum(free.values()))} if kind and count else {}


def usable_times(job: QueuedJob, found: Sequence[RunTime], types: Sequence[str]) -> dict[str, RunTime]:
    """The run times that can be planned with: positive, finite, and even a long run within the job's time limit."""
    limit_s = job.time_limit_s
    return {
        each.gpu_type: each
        for each in found
        if each.gpu_type in types
        and 0 < each.low_s <= each.run_s <= each.high_s < 1e9
        and (limit_s is None or each.longest_s <= limit_s)
    }


def limit_s(job: QueuedJob) -> float:
    """The longest that a job may run; a day without a limit."""
    return float(job.time_limit_s or DAY_S)


PENDING_RULES = replace(NEVER_MOVE, exponent=0.5)
"""Rules for predicted run times, which can be far off."""
MOVE_RULES = PlacementRules(exponent=0.5)


@dataclass(frozen=True)
class Row:
    """A job in the decision. rates: of the whole job, 1/s, by type. left: share of the work that is left."""

    job_id: int
    gpus: int
    rates: Mapping[str, float]
    left: float = 1.0
    placed: str = ""
    waited_s: float = 0.0
    may_move: bool = False


def decide(rows: Sequence[Row], cluster: TypeCluster, rules: PlacementRules) -> dict[int, str]:
    """The type of each job, by number; jobs that wait are left out. Raises ValueError."""
    types = cluster.types
    if not rows or not types:
        return {}
    held = {name: sum(row.gpus for row in rows if row.placed == name) for name in types}
    # GPUs in use by jobs that are not among the rows are not there.
    capacity = [
        max(0, pool.total - max(0, pool.total - pool.free - held[name]))
        for name, pool in ((n, cluster.pools[n]) for n in types)
    ]
    view = PlacementView(
        gpus=np.array([row.gpus for row in rows], dtype=np.int64),
        left=np.array([row.left for row in rows], dtype=float),
        rates=np.array([[row.rates.get(name, 0.0) for name in types] for row in rows], dtype=float),
        placed=np.array([types.index(row.placed) if row.placed else WAITS for row in rows], dtype=np.int64),
        capacity=np.array(capacity, dtype=np.int64),
        waited_s=np.array([row.waited_s for row in rows], dtype=float),
        may_move=np.array([row.may_move for row in rows], dtype=bool),
    )
    made: PlacementDecision = decide_placement(view, replace(rules, solver_s=SOLVER_S))
    return {row.job_id: types[kind] for row, kind in zip(rows, made.types.tolist(), strict=True) if kind != WAITS}


def rows_of(
    cluster: TypeCluster, times: Times, pinned: Mapping[int, str], movable: Mapping[int, float], now_s: float
) -> list[Row]:
    """Every job of the decision. pinned: types of jobs that were placed a short time ago. movable: share of the work
    that is left, of running jobs that may be requeued.
    """
    rows = [
        row for job in cluster.view.jobs if job.is_running and (row := _running(job, cluster, times, movable, now_s))
    ]
    waiting = [job for job in cluster.view.jobs if is_waiting(job, cluster)]
    waiting.sort(key=lambda job: (-job.rank, job.job_id))
    for job in waiting[:MOST_JOBS]:
        row = _pending(job, cluster, times, pinned.get(job.job_id), now_s)
        if row is not None:
            rows += [row] * min(max(1, job.task_count), MOST_TASKS)
    return rows[:MOST_ROWS]


def is_waiting(job: QueuedJob, cluster: TypeCluster) -> bool:
    """Return True if Slurm would start the job on GPUs of the partitions if there were free ones."""
    is_here = bool(set(job.partitions) & set(cluster.settings.partitions))
    return is_here and job.is_pending and job.rank > 0 and job.reason_key in WAITS_FOR_ROOM and job.gpu_count > 0


def _running(
    job: QueuedJob, cluster: TypeCluster, times: Times, movable: Mapping[int, float], now_s: float
) -> Row | None:
    kind = cluster.type_of(job)
    if not kind or not job.gpu_count or job.start_s is None or not _is_in_service(job, cluster):
        return None
    if job.job_id in movable:
        rates = {name: 1 / each.run_s for name, each in times[job.job_id].items()}
        return Row(job.job_id, job.gpu_count, rates, movable[job.job_id], kind, may_move=True)
    left_s = max(60.0, limit_s(job) - (now_s - job.start_s))
    return Row(job.job_id, job.gpu_count, {kind: 1 / limit_s(job)}, left_s / limit_s(job), kind)


def _is_in_service(job: QueuedJob, cluster: TypeCluster) -> bool:
    """Return True if all its nodes are among those that the pools count."""
    partitions = set(cluster.settings.partitions)
    known = {each.name for each in cluster.view.nodes if each.takes_jobs and set(each.partitions) & partitions}
    return bool(job.nodes) and known.issuperset(job.nodes)


def _pending(job: QueuedJob, cluster: TypeCluster, times: Times, pinned: str | None, now_s: float) -> Row | None:
    own = times.get(job.job_id)
    if own:
        rates = {name: 1 / each.run_s for name, each in own.items()}
    else:
        rates = {name: 1 / limit_s(job) for name in allowed_types(job, cluster)}
    if pinned is not None:
        rates = {name: rate for name, rate in rates.items() if name == pinned} or {pinned: 1 / limit_s(job)}
    waited_s = 0.0 if job.restarts else max(0.0, now_s - job.submit_s)
    return Row(job.job_id, job.gpu_count, rates, waited_s=waited_s) if rates else None


def allowed_types(job: QueuedJob, cluster: TypeCluster) -> frozenset[str]:
    """The types that a job asks for as it stands; all, where almanac cannot tell."""
    request = cluster.request(job)
    everything = frozenset(cluster.types)
    if request is None:
        return everything
    named = names_one(request)
    return frozenset({named}) & everything if named else request.allowed & everything
