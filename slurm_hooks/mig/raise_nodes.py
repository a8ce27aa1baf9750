"""Where an idle instance of a larger type is, for one job after another. Pure but for its own counts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    @classmethod
    def of(cls, nodes: Sequence[GresNode], reservations: Sequence[Reservation], now_s: int) -> IdlePool:
        """Of all nodes of the cluster. Nodes without a free typed instance are left out."""
        return cls([node for node in in_service(nodes) if any(node.free.values())], reservations, now_s)

    def idle_for(self, job: GresJob, waiting: dict[str, frozenset[str]], own: str) -> Counter[str]:
        """Free instances by type on the nodes that can take the job, but for types that others wait for there.

        own: the job's type, which is counted in any case.
        """
        idle: Counter[str] = Counter()
        for node in self.nodes:
            if self._fits(node, job):
                for name, count in node.free.items():
                    if name == own or not _is_wanted(name, node, waiting):
                        idle[name] += count
        return idle

    def take(self, job: GresJob, name: str, waiting: dict[str, frozenset[str]]) -> None:
        """One instance of a type less, on the first node that can take the job."""
        for place, node in enumerate(self.nodes):
            if node.free.get(name, 0) and self._fits(node, job) and not _is_wanted(name, node, waiting):
                self.nodes[place] = replace(
                    node,
                    free={**node.free, name: node.free[name] - 1},
                    free_cpus=None if node.free_cpus is None else node.free_cpus - job.cpus,
                    free_memory_mib=None
                    if node.free_memory_mib is None
                    else node.free_memory_mib - _memory_mib(job, node),
                )
                return

    def _fits(self, node: GresNode, job: GresJob) -> bool:
        """As far as can be told; Slurm decides."""
        if not set(job.partitions) & set(node.node.partitions) or not _features(job) <= set(node.node.features):
            return False
        if node.free_cpus is not None and node.free_cpus < job.cpus:
            return False
        if node.free_memory_mib is not None and node.free_memory_mib < _memory_mib(job, node):
            return False
        return self._is_allowed(node.node.name, job)

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
