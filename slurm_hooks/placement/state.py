"""What is known of the jobs and GPUs at one time, as the placement decision takes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from almanac.actions_config import Placement
from slurm_hooks.placement.request import TypeRequest, type_request
from telemetry.slurm.gres_queue import GresNode, RequestKey, in_service
from telemetry.slurm.hostlist import expand
from telemetry.slurm.placement_queue import QueueJob, QueueNode, QueueView

WAITS_FOR = frozenset({"RESOURCES", "PRIORITY"})
"""Reasons of jobs that Slurm would start if there were free GPUs."""
DAY_S = 86_400.0
MOST_JOBS = 1024
"""Pending jobs that a decision looks at, highest priority first."""
MOST_TASKS, MOST_ROWS = 64, 2048
"""Tasks of one array that count as waiting, and jobs and tasks in all."""


@dataclass(frozen=True)
class RunTime:
    """How long a whole run takes on one GPU type, s: the usual time, the interval of a single run, and a long run."""

    gpu_type: str
    run_s: float
    low_s: float
    high_s: float
    longest_s: float


class SpeedTable(Protocol):
    """Run times by GPU type. Raises NoModelError where nothing at all is known of the site's types."""

    def __call__(self, jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        """By job number; types that are not known, or do not fit, are left out."""


Times = Mapping[int, Mapping[str, RunTime]]
"""Usable run times by job number and GPU type."""


@dataclass(frozen=True)
class TypePool:
    """The GPUs of one type that can start jobs now."""

    total: int
    free: int


@dataclass(frozen=True)
class Cluster:
    """One look at Slurm with the site's settings."""

    view: QueueView
    settings: Placement
    pools: Mapping[str, TypePool] = field(default_factory=dict)

    @property
    def types(self) -> tuple[str, ...]:
        """GPU types that some node in service has, in the site's order."""
        return tuple(name for name in dict.fromkeys(self.settings.types) if name in self.pools)

    def request(self, job: QueueJob) -> TypeRequest | None:
        """What says the type of a job, if almanac can change it."""
        return self.request_in(job.gres.constraints, job.gres.requests)

    def request_in(self, constraints: str, requests: Mapping[RequestKey, str]) -> TypeRequest | None:
        """The same of texts."""
        return type_request(constraints, requests, self.settings.types, self.settings.select_by)

    def reachable(self, job: QueueJob) -> frozenset[str]:
        """Types that enough nodes of the job's partitions have, with enough GPUs and CPUs on each of them."""
        nodes = max(1, job.gres.node_count)
        gpus, cpus = -(-job.record.gpu_count // nodes), -(-job.gres.cpus // nodes)
        excluded = _names(job.gres.excluded_nodes)
        found: dict[str, int] = {}
        for each in self.view.nodes:
            is_here = set(each.node.partitions) & set(job.gres.partitions) and each.node.name not in excluded
            if is_here and takes_jobs(each) and (not each.node.cpu_count or each.node.cpu_count >= cpus):
                for name, (count, _) in _gpus(each, self.settings).items():
                    found[name] = found.get(name, 0) + (count >= gpus)
        return frozenset(name for name, count in found.items() if count >= nodes)

    def type_of(self, job: QueueJob) -> str:
        """The one type that a running job has; "" where it has several, or another."""
        if self.settings.select_by == "gres":
            kinds = {name for name, count in job.given.items() if count}
        else:
            by_name = {each.node.name: each for each in self.view.nodes}
            kinds = {node_type(by_name[name], self.settings) if name in by_name else "" for name in job.nodes}
        return kinds.pop() if len(kinds) == 1 and kinds <= set(self.types) else ""


def cluster_of(view: QueueView, settings: Placement) -> Cluster:
    """The GPUs of the nodes in service that belong to a partition of `settings`."""
    total: dict[str, int] = {}
    used: dict[str, int] = {}
    for each in view.nodes:
        if not takes_jobs(each) or not set(each.node.partitions) & set(settings.partitions):
            continue
        for name, (count, busy) in _gpus(each, settings).items():
            total[name], used[name] = total.get(name, 0) + count, used.get(name, 0) + busy
    pools = {name: TypePool(count, max(0, count - used[name])) for name, count in total.items() if count}
    return Cluster(view, settings, pools)


def takes_jobs(each: QueueNode) -> bool:
    """Whether the node is up and open, and Slurm says what it uses."""
    return bool(in_service([GresNode(each.node)]))


def _names(text: str) -> frozenset[str]:
    """Nodes of a host list; none where it cannot be read."""
    try:
        return frozenset(expand(text)) if text else frozenset()
    except ValueError:
        return frozenset()


def node_type(each: QueueNode, settings: Placement) -> str:
    """The node's GPU type at a site that asks by features; "" for none, or for two of them."""
    found = set(each.node.features) & set(settings.types)
    return found.pop() if len(found) == 1 else ""


def _gpus(each: QueueNode, settings: Placement) -> dict[str, tuple[int, int]]:
    """(GPUs, GPUs in use) by type; all count as used where Slurm does not tell."""
    used = each.used
    if settings.select_by == "gres":
        names = set(each.total) & set(settings.types)
        return {name: (each.total[name], each.total[name] if used is None else used.get(name, 0)) for name in names}
    kind, count = node_type(each, settings), sum(each.total.values())
    return {kind: (count, count if used is None else sum(used.values()))} if kind and count else {}


def usable_times(job: QueueJob, found: Sequence[RunTime], types: Sequence[str]) -> dict[str, RunTime]:
    """The run times that can be planned with: positive, finite, and even a long run within the job's time limit."""
    limit_s = job.gres.time_limit_s
    return {
        each.gpu_type: each
        for each in found
        if each.gpu_type in types
        and 0 < each.low_s <= each.run_s <= each.high_s < 1e9
        and (limit_s is None or each.longest_s <= limit_s)
    }


def limit_s(job: QueueJob) -> float:
    """The longest that a job may run; a day where it has no limit."""
    return float(job.gres.time_limit_s or DAY_S)
