"""Where an idle instance of a larger type is, for one job after another. Pure but for its own counts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from telemetry.slurm.backend import Reservation
from telemetry.slurm.gres_queue import ANY_TYPE, GresJob, GresNode, in_service
from telemetry.slurm.hostlist import expand

_PLAIN = re.compile(r"[\w.-]*(?:[&,][\w.-]+)*", re.ASCII)
_NEVER = frozenset({
    "BADCONSTRAINTS", "DEPENDENCYNEVERSATISFIED", "INVALIDACCOUNT", "INVALIDQOS", "JOBHELDADMIN", "JOBHELDUSER",
    "JOBHOLDMAXREQUEUE",
})  # fmt: skip
"""Reasons of jobs that wait for nothing until somebody changes them."""


def has_plain_constraint(job: GresJob) -> bool:
    """Whether --constraint is nothing but features that a node must have."""
    return bool(_PLAIN.fullmatch(job.constraints))


def waiting_types(jobs: Sequence[GresJob], now_s: int, soon_s: float) -> dict[str, frozenset[str]]:
    """By GPU type, the partitions of the pending jobs that ask for it and may start within soon_s.

    ANY_TYPE: of those that take any. Jobs with a dependency or at a limit count: it can end at any time.
    """
    found: dict[str, set[str]] = {}
    for job in jobs:
        is_later = job.reason == "BEGINTIME" and job.eligible_s > now_s + soon_s
        if job.reason not in _NEVER and not is_later:
            for name in job.asked_types:
                found.setdefault(name, set()).update(job.partitions)
    return {name: frozenset(partitions) for name, partitions in found.items()}


@dataclass
class IdlePool:
    """Free instances of the nodes that can start a job now; `take` counts the ones given away in this run."""

    nodes: list[GresNode]
    reservations: Sequence[Reservation]
    now_s: int
    _fitting: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    _idle: dict[Hashable, Counter[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Sequence[GresNode], reservations: Sequence[Reservation], now_s: int) -> IdlePool:
        """Of all nodes of the cluster. Nodes without a free typed instance are left out."""
        return cls([node for node in in_service(nodes) if any(node.free.values())], reservations, now_s)

    def idle_for(self, job: GresJob, waiting: dict[str, frozenset[str]], own: str) -> Counter[str]:
        """Free instances by type on the nodes that can take the job, but for types that others wait for there.

        own: the job's type, which is counted in any case. waiting: the same in all calls.
        """
        key = (_place(job), job.cpus, job.memory_mib, own)
        if key not in self._idle:
            idle: Counter[str] = Counter()
            for number in self._places(job):
                node = self.nodes[number]
                if _has_room(node, job):
                    for name, count in node.free.items():
                        if name == own or not _is_wanted(name, node, waiting):
                            idle[name] += count
            self._idle[key] = idle
        return self._idle[key]

    def take(self, job: GresJob, name: str, waiting: dict[str, frozenset[str]]) -> None:
        """One instance of a type less, on the first node that can take the job."""
        self._idle.clear()
        for number in self._places(job):
            node = self.nodes[number]
            if node.free.get(name, 0) and _has_room(node, job) and not _is_wanted(name, node, waiting):
                self.nodes[number] = _without(node, job, name)
                return

    def _places(self, job: GresJob) -> tuple[int, ...]:
        """Nodes that can take the job, whatever is free there; as far as can be told: Slurm decides."""
        key = _place(job)
        if key not in self._fitting:
            homes, features = set(job.partitions), _features(job)
            self._fitting[key] = tuple(
                number
                for number, each in enumerate(self.nodes)
                if homes & set(each.node.partitions)
                and features <= set(each.node.features)
                and self._is_allowed(each.node.name, job)
            )
        return self._fitting[key]

    def _is_allowed(self, name: str, job: GresJob) -> bool:
        """By --nodelist, --exclude, and reservations that begin before the job must end."""
        try:
            required, excluded = expand(job.required_nodes), expand(job.excluded_nodes)
        except ValueError:
            return False
        end_s = math.inf if job.time_limit_s is None else self.now_s + job.time_limit_s
        is_reserved = any(
            name in each.nodes and each.start_s < end_s and each.end_s > self.now_s for each in self.reservations
        )
        return required in ((), (name,)) and name not in excluded and not is_reserved


def _place(job: GresJob) -> Hashable:
    """What says where a job can run."""
    return (job.partitions, job.constraints, job.required_nodes, job.excluded_nodes, job.time_limit_s)


def _has_room(node: GresNode, job: GresJob) -> bool:
    if node.free_cpus is not None and node.free_cpus < job.cpus:
        return False
    return node.free_memory_mib is None or node.free_memory_mib >= _memory_mib(job, node)


def _without(node: GresNode, job: GresJob, name: str) -> GresNode:
    """The node with the job on one instance of a type."""
    return replace(
        node,
        free={**node.free, name: node.free[name] - 1},
        free_cpus=None if node.free_cpus is None else node.free_cpus - job.cpus,
        free_memory_mib=None if node.free_memory_mib is None else node.free_memory_mib - _memory_mib(job, node),
    )


def _is_wanted(name: str, node: GresNode, waiting: dict[str, frozenset[str]]) -> bool:
    partitions = set(node.node.partitions)
    return any(partitions & waiting.get(each, frozenset()) for each in (name, ANY_TYPE))


def _features(job: GresJob) -> set[str]:
    return {name for name in re.split("[&,]", job.constraints) if name}


def _memory_mib(job: GresJob, node: GresNode) -> int:
    """Memory that the job takes of the node; 0 asks for all of it, and what is not known counts as none."""
    if job.memory_mib == 0:
        return node.memory_mib or 0
    return job.memory_mib or 0
