"""Pending jobs with what they ask for by GRES type, and nodes with what is free by type (Slurm 24.11 and later).

From JSON, and by Slurm's commands only: no name or comment can forge a record.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from almanac.errors import CommandError
from almanac.units import valid_unicode
from telemetry.slurm.backend import Node
from telemetry.slurm.commands import Runner
from telemetry.slurm.node_states import is_in_service
from telemetry.slurm.queue_json import address, gres_of, nodes_of, queue_of, queued, records
from telemetry.sources.sacct_json import number, words

ANY_TYPE = ""
"""What a request of GPUs without a type asks for."""
RequestKey = Literal["TresPerJob", "TresPerNode", "TresPerTask", "TresPerSocket"]
"""How `scontrol update` names a part of a job's request: --gpus, --gres and --gpus-per-node, --gpus-per-task."""
_FIELDS: tuple[tuple[RequestKey, str], ...] = (
    ("TresPerJob", "tres_per_job"),
    ("TresPerNode", "tres_per_node"),
    ("TresPerTask", "tres_per_task"),
    ("TresPerSocket", "tres_per_socket"),
)
_MARKS = ("nice", "admin_comment", "deadline", "resv_name", "licenses", "shared", "time_minimum", "prefer", "qos")
TYPE = r"(?![0-9]+(?:[:=,]|\Z))[\w.+-]{1,64}"
_ASKED = re.compile(rf"(?:gres[:/])?gpu(?:[:/](?P<type>{TYPE}))?(?:[:=][0-9]{{1,9}})?", re.ASCII)
_CONFIGURED = re.compile(rf"gpu(?::(?P<type>{TYPE}))?:(?P<count>[0-9]{{1,9}})", re.ASCII)
_USED = re.compile(rf"gpu(?::(?P<type>{TYPE}|\(null\)))?:(?P<count>[0-9]{{1,9}})", re.ASCII)


@dataclass(frozen=True)
class GresJob:
    """A pending record of slurmctld: a job, an array task with its own record, or the common record of an array.

    requests: by scontrol's key, the text that Slurm shows; parts without text are left out. priority: 0 if held, or if
    Slurm found no node for it. reason: upper case, without what follows a comma. cpus: of the whole job. memory_mib:
    per node, 0 for a node's whole memory; None if it depends on the node. wants_gpu: it asks for GPUs.
    is_plain: no part of a heterogeneous job, no cron job, no reservation, no whole nodes (26.05 does not tell). marks:
    other choices of owners and operators, only to see that they change.
    """

    job_id: int
    address: str
    user: str
    submit_s: int
    restarts: int
    priority: int
    reason: str
    requests: Mapping[RequestKey, str]
    partitions: tuple[str, ...]
    wants_gpu: bool
    eligible_s: int = 0
    comment: str = ""
    constraints: str = ""
    required_nodes: str = ""
    excluded_nodes: str = ""
    node_count: int = 1
    cpus: int = 1
    memory_mib: int | None = None
    time_limit_s: int | None = None
    is_array: bool = False
    is_plain: bool = True
    marks: tuple[str, ...] = ()

    @property
    def asked_types(self) -> frozenset[str]:
        """GPU types that the job asks for; ANY_TYPE is among them if it asks for GPUs without a type."""
        terms = [term for text in self.requests.values() for term in text.split(",")]
        found = frozenset(match["type"] or ANY_TYPE for term in terms if (match := _ASKED.fullmatch(term.strip())))
        return found or (frozenset({ANY_TYPE}) if self.wants_gpu else found)


@dataclass(frozen=True)
class GresNode:
    """A node. total, free: instances by GPU type. free_cpus, free_memory_mib: None where not known."""

    node: Node
    total: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    free_cpus: int | None = None
    free_memory_mib: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True)
class GresQueue:
    """Pending jobs, and the number of pending records that cannot be read."""

    jobs: tuple[GresJob, ...]
    unreadable: int = 0


def read_gres_queue(commands: Runner, cluster: str, job_ids: Collection[int] = ()) -> GresQueue:
    """Every pending record of a cluster now, or at least those of some jobs. Raises CommandError."""
    return gres_queue(queue_of(commands, job_ids, "-t", "PENDING"), cluster)


def read_gres_nodes(commands: Runner) -> tuple[GresNode, ...]:
    """Every node now, by name. Raises CommandError."""
    found = records(commands(["scontrol", "show", "nodes", "--json"]), "nodes")
    if found is None:
        raise CommandError("`scontrol show nodes --json` gave no list of nodes", "this needs Slurm 24.11 or later")
    return tuple(sorted(map(_node, found), key=lambda node: node.node.name))


def gres_queue(data: bytes, cluster: str) -> GresQueue:
    """The pending records of `squeue -a --json`. Raises CommandError where it holds no list of jobs."""
    jobs, unreadable = [], 0
    for record in queued(data):
        if str(record.get("cluster") or cluster).lower() != cluster.lower():
            continue
        states = words(record.get("job_state"))
        if states and "PENDING" not in states:
            continue
        try:
            jobs.append(_job(record))
        except (KeyError, TypeError, ValueError):
            unreadable += 1
    return GresQueue(tuple(sorted(jobs, key=lambda job: job.job_id)), unreadable)


def gres_record(record: Mapping[str, Any]) -> GresJob:
    """One record of `squeue --json`, of any release and state. Raises KeyError, TypeError, or ValueError."""
    return _job(record)


def _job(record: Mapping[str, Any]) -> GresJob:
    """Raises KeyError, TypeError, or ValueError where something needed is missing."""
    if not words(record["job_state"]):
        raise ValueError("no state")
    job_id, submit_s = number(record["job_id"]), number(record["submit_time"])
    priority, nodes, cpus = (number(record[key]) for key in ("priority", "node_count", "cpus"))
    if not job_id or not submit_s or priority is None:
        raise ValueError("no number, submission, or priority")
    array_id, task_id = number(record.get("array_job_id")) or None, number(record.get("array_task_id"))
    limit_min = number(record.get("time_limit"))
    special = [record.get(key) for key in ("resv_name", "cron", "licenses", "burst_buffer", "container")]
    is_het = bool(number(record.get("het_job_id")))
    return GresJob(
        job_id=job_id,
        address=address(job_id, array_id, task_id, "", None, None),
        user=_text(record, "user_name"),
        submit_s=submit_s,
        restarts=number(record.get("restart_cnt")) or 0,
        priority=priority,
        reason=_text(record, "state_reason").split(",")[0].strip().upper(),
        requests={key: text for key, name in _FIELDS if (text := _text(record, name))},
        partitions=tuple(name for name in _text(record, "partition").split(",") if name),
        wants_gpu=gres_of(record).count > 0,
        eligible_s=number(record.get("eligible_time")) or 0,
        comment=_text(record, "comment"),
        constraints=_text(record, "features"),
        required_nodes=_text(record, "required_nodes"),
        excluded_nodes=_text(record, "excluded_nodes"),
        node_count=nodes or 1,
        cpus=cpus or 1,
        memory_mib=_memory_mib(record, cpus or 1),
        time_limit_s=None if limit_min is None else limit_min * 60,
        is_array=array_id is not None and task_id is None,
        is_plain=not (is_het or any(special) or words(record.get("shared"))),
        marks=tuple(str(record.get(key)) for key in _MARKS),
    )


def _memory_mib(record: Mapping[str, Any], cpus: int) -> int | None:
    if record.get("memory_per_tres"):
        return None
    per_node, per_cpu = number(record.get("memory_per_node")), number(record.get("memory_per_cpu"))
    if per_node is not None:
        return per_node
    return None if per_cpu is None else per_cpu * cpus


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return valid_unicode(value or "")


def _node(record: Mapping[str, Any]) -> GresNode:
    """What cannot be read is no free instance."""
    node = nodes_of([record])[0]
    total = _counts(node.gres, _CONFIGURED)
    used = _counts(str(record.get("gres_used") or ""), _USED)
    cpus, used_cpus = (number(record.get(key)) for key in ("effective_cpus", "alloc_cpus"))
    memory, used_memory = (number(record.get(key)) for key in ("real_memory", "alloc_memory"))
    known = {} if total is None or used is None or total.keys() - used.keys() else total
    return GresNode(
        node=node,
        total=total or {},
        free={name: max(0, count - (used or {})[name]) for name, count in known.items() if name},
        free_cpus=None if cpus is None or used_cpus is None else cpus - used_cpus,
        free_memory_mib=None if memory is None or used_memory is None else memory - used_memory,
        memory_mib=memory,
    )


def _counts(text: str, pattern: re.Pattern[str]) -> dict[str, int] | None:
    """Instances by type of "gpu:1g.10gb:7(S:0-1),gpu:a100:3"; None where a GPU term cannot be read."""
    counts: dict[str, int] = {}
    for name, count in _terms(text, pattern):
        if name is None:
            return None
        counts[name] = counts.get(name, 0) + count
    return counts


def _terms(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str | None, int]]:
    for term in re.sub(r"\((?!null\))[^()]*\)", "", text).split(","):
        if term.split(":")[0] == "gpu":
            match = pattern.fullmatch(term)
            yield (match["type"] or ANY_TYPE, int(match["count"])) if match else (None, 0)


def in_service(nodes: Sequence[GresNode]) -> tuple[GresNode, ...]:
    """The nodes that can start a job now: up, powered, not drained, not in maintenance or an active reservation."""
    return tuple(each for each in nodes if is_in_service(each.node.states) and not each.node.reservation)
