"""A job in Slurm's queue, whichever way it was read: one class, whose views are what its users need, and its ids."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from almanac.names import rule_key
from almanac.records import JobRequest
from almanac.tres import gpu_types, parse_gpu_indices, parse_gpus
from almanac.units import format_job_id
from slurm.hostlist import expand
from slurm.states import HOLDS_NODES, JOB_ENDED, JOB_RUNS, JOB_WAITS, ends

MAX_TASK_LIST = 100_000
"""Characters of an array's list of tasks; a longer one is not written out."""
MAX_TASK_TEXT = 40
"""Characters of one part of it: three numbers."""
_TASKS = re.compile(r"[0-9]+(?:-[0-9]+(?::[0-9]+)?)?")


def address(
    job_id: int, array_id: int | None, task_id: int | None, tasks: str, het_id: int | None, het_offset: int | None
) -> str:
    """Return what `scontrol update jobid=` takes for one record and no other.

    A bare number names all parts of a heterogeneous job and all tasks of an array. That is right for an array's common
    record, unless some of its tasks have records of their own: then `tasks` lists the ones in common. 22.05 does not
    take the step of "0-8:2", so that it is written out.
    """
    if array_id is not None and task_id is not None:
        return f"{array_id}_{task_id}"
    if array_id is not None:
        listed = _task_list(tasks.split("%")[0])
        return f"{array_id}_[{listed}]" if listed else str(array_id)
    if het_id is not None:
        return f"{het_id}+{het_offset}"
    return str(job_id)


def task_count(tasks: str, most: int) -> int:
    """Number of tasks that a list names, at most `most` (0: no limit); 1 if none can be read.

    Slurm cuts a long list short ("1-3,5,..."): only what it still shows is counted.
    """
    found = max(1, sum(len(each) for each in _ranges(tasks[:MAX_TASK_LIST])))
    return min(found, most) if most > 0 else found


def has_task(tasks: str, task: int) -> bool:
    """Return True if a list names a task. Slurm cuts a long list short ("1-3,..."): the rest may hold it."""
    return "..." in tasks.split("%")[0] or any(task in each for each in _ranges(tasks))


def _ranges(tasks: str) -> Iterator[range]:
    """The parts of a list that can be read."""
    for part in tasks.split("%")[0].split(","):
        if len(part) <= MAX_TASK_TEXT and _TASKS.fullmatch(part):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            # len() of a range takes no more than a C integer holds.
            yield range(int(first), min(int(last or first), 2**62) + 1, max(1, min(int(step or 1), 2**62)))


def _task_list(tasks: str) -> str:
    """Return "1-3,8-12:2" as "1-3,8,10,12"; "" if it is cut short or too long."""
    parts = tasks.split(",")
    if len(tasks) > MAX_TASK_LIST or not all(_TASKS.fullmatch(part) for part in parts):
        return ""
    listed = ",".join(_written_out(part) for part in parts)
    return listed if len(listed) <= MAX_TASK_LIST else ""


def _written_out(part: str) -> str:
    span, colon, step = part.partition(":")
    if not colon:
        return part
    first, last = map(int, span.split("-"))
    return ",".join(map(str, range(first, min(last, first + MAX_TASK_LIST) + 1, max(int(step), 1))))


ANY_TYPE = ""
"""The type of a request of GPUs that names none."""
RequestKey = Literal["TresPerJob", "TresPerNode", "TresPerTask", "TresPerSocket"]
"""Names that `scontrol update` gives to parts of a job's request: --gpus, --gres and --gpus-per-node, --gpus-per-task.
"""
TYPE = r"(?![0-9]+(?:[:=,]|\Z))[\w.+-]{1,64}"
_ASKED = re.compile(rf"(?:gres[:/])?gpu(?:[:/](?P<type>{TYPE}))?(?:[:=][0-9]{{1,9}})?", re.ASCII)


@dataclass(frozen=True)
class QueuedJob:
    """A record of slurmctld: a job, a component of a heterogeneous job, an array task with a record of its own, or all
    tasks of an array that have none yet (the common record).

    job_id: the record's own number (sacct's JobIDRaw). address: what scontrol takes for this record and no other.
    Counts are of the whole job, or of one task. gpu_count, gpu_type: given to a job that holds nodes, else asked for;
    the type is "" for several or none. asked_gpus: asked for, in any state. shares: parts of GPUs by GRES name.
    gpus_per_node: 0 if the job did not fix it. priority: 0 if held, or if Slurm found no node; None if not known.
    reason: as Slurm spells it. requests: GRES texts by scontrol's name. restarts: number of requeues; submit_s is then
    the time of the last one. memory_mib: asked for per node, 0 for a whole node's; None if it depends on the node.
    is_exclusive: asked for whole nodes; 26.05 does not tell. is_plain: no component, no cron job, no reservation, no
    licenses, no whole nodes. marks: other choices of owners and operators, only to see that they change.
    start_s: None while it waits, or if Slurm does not tell; expected_start_s: Slurm's estimate for a job that waits.
    detail: GRES given on each node; hosts: the nodes in the same order, () if not known. script_key: "" if no script is
    known, as by pyslurm. site_factor: None if Slurm does not rank the job, or if sprio was not read (`pending_jobs` of
    the priority hook reads it); has_own_priority: somebody set the job's priority, so that no factor counts.
    end_s, exit_code, exit_signal: of a job that has ended. error_file: as asked for, with or without patterns such as
    %j; "" for Slurm's default in work_dir.
    """

    job_id: int
    address: str
    submit_s: int
    user: str = ""
    name: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    constraints: str = ""
    comment: str = ""
    cluster: str = ""
    user_id: int | None = None
    states: frozenset[str] = frozenset({"PENDING"})
    priority: int | None = None
    reason: str = ""
    gpu_count: int = 0
    gpu_type: str = ""
    asked_gpus: int = 0
    shares: tuple[tuple[str, int], ...] = ()
    gpus_per_node: int = 0
    requests: Mapping[RequestKey, str] = field(default_factory=dict)
    cpu_count: int = 1
    node_count: int = 1
    memory_mib: int | None = None
    time_limit_s: int | None = None
    eligible_s: int = 0
    required_nodes: str = ""
    excluded_nodes: str = ""
    is_exclusive: bool = False
    is_plain: bool = True
    is_batch: bool = False
    can_requeue: bool = False
    waits_for_jobs: bool = False
    marks: tuple[str, ...] = ()
    array_job_id: int | None = None
    array_task_id: int | None = None
    tasks: str = ""
    task_count: int = 1
    het_job_id: int | None = None
    het_offset: int | None = None
    restarts: int = 0
    script_key: str = ""
    start_s: int | None = None
    expected_start_s: int | None = None
    node_list: str = ""
    detail: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    given_memory_mib: float | None = None
    ran_before_s: int = 0
    suspend_s: int = 0
    site_factor: int | None = None
    has_own_priority: bool = False
    end_s: int | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    work_dir: str = ""
    error_file: str = ""
    framework: str = ""

    @property
    def is_waiting(self) -> bool:
        """True for a job that starts when there is room, whatever else Slurm still does with it."""
        return bool(self.states & JOB_WAITS)

    @property
    def is_pending(self) -> bool:
        """True for a job that waits and nothing else, so that Slurm lets its request be changed."""
        return self.states == {"PENDING"}

    @property
    def is_running(self) -> bool:
        return self.states == {"RUNNING"}

    @property
    def has_started(self) -> bool:
        """True for a job that runs, or is suspended or stopped."""
        return bool(self.states & JOB_RUNS) and not self.is_waiting

    @property
    def has_ended(self) -> bool:
        """True for a job that neither waits nor runs: also while its nodes are cleaned up (COMPLETING)."""
        return ends(self.states)

    @property
    def holds_nodes(self) -> bool:
        return bool(self.states & HOLDS_NODES) and not self.is_waiting

    @property
    def is_held(self) -> bool:
        return self.priority == 0

    @property
    def rank(self) -> int:
        """Slurm's priority; a job whose priority is not told stands last and is not held."""
        return 1 if self.priority is None else self.priority

    @property
    def reason_key(self) -> str:
        """The reason in capital letters, without what follows a comma: 22.05 lists nodes there."""
        return re.sub("[^A-Z]", "", self.reason.split(",")[0].upper())

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(filter(None, self.partition.split(",")))

    @property
    def is_common_record(self) -> bool:
        return self.array_job_id is not None and self.array_task_id is None

    @property
    def asked_types(self) -> frozenset[str]:
        """GPU types that the job asks for; ANY_TYPE is among them if it asks for GPUs without a type."""
        terms = [term for text in self.requests.values() for term in text.split(",")]
        found = frozenset(match["type"] or ANY_TYPE for term in terms if (match := _ASKED.fullmatch(term.strip())))
        return (found or frozenset({ANY_TYPE})) if self.gpu_count else frozenset()

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that the job holds; () while it waits."""
        return expand(self.node_list)

    @property
    def node_gpus(self) -> tuple[int, ...]:
        """Number of GPUs that the job holds on each of its nodes; () if not known."""
        return tuple(parse_gpus(each).count for each in self.detail)

    @property
    def given(self) -> Mapping[str, int]:
        """Number of GPUs that the job holds by GRES type ("" for no type); empty if not known."""
        return gpu_types(",".join(self.detail))

    def gpu_indices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Indices of the GPUs that the job holds, by node. Raises ValueError if they cannot be read."""
        if len(self.hosts) != len(self.detail):
            is_open = not self.hosts and len(self.nodes) > 1 and bool(self.detail)
            raise ValueError("order of the nodes unknown" if is_open else "nodes and gres_detail differ in number")
        try:
            return [(host, parse_gpu_indices(part)) for host, part in zip(self.hosts, self.detail, strict=True)]
        except ValueError as error:
            raise ValueError("unreadable GPU indices") from error

    def request(self) -> JobRequest:
        """The submission as the history records it: slurmdbd stores a double quote in a name as a backtick."""
        return JobRequest(
            user=self.user,
            job_name=self.name.replace('"', "`"),
            account=self.account,
            partition=self.partition,
            qos=self.qos,
            constraints=self.constraints,
            gpu_count=self.gpu_count,
            gpu_type=self.gpu_type,
            node_count=self.node_count,
            cpu_count=self.cpu_count,
            time_limit_s=self.time_limit_s,
            is_array=self.array_job_id is not None,
            submit_s=self.submit_s,
            script_key=self.script_key,
            rule=rule_key(self.comment.replace('"', "`")),
        )

    def row(self, now_s: int) -> dict[str, Any]:
        """The job as a row of the table jobs. elapsed_s of a job that runs is the time so far, without suspensions; a
        job that ended before it started has no start.
        """
        is_over, start_s = self.has_ended, self.start_s
        is_live = self.has_started or (is_over and start_s is not None)
        state = min(self.states & (JOB_ENDED if is_over else JOB_RUNS), default="COMPLETING" if is_over else "PENDING")
        row = {
            "job_id": self.job_id, "submit_s": self.submit_s, "array_job_id": self.array_job_id,
            "array_task_id": self.array_task_id, "het_job_id": self.het_job_id, "het_offset": self.het_offset,
            "user": self.user or None, "account": self.account or None, "partition": self.partition or None,
            "qos": self.qos or None, "name": self.name or None, "constraints": self.constraints,
            "framework": self.framework or None,
            "time_limit_s": self.time_limit_s, "node_count": self.node_count,
            "node_list": (self.node_list or None) if is_live else None, "cpu_count": self.cpu_count,
            "gpu_count": self.gpu_count if is_live else None, "gpu_count_req": self.asked_gpus,
            "gpu_share_count": next((count for _, count in self.shares), None), "gpu_type": self.gpu_type or None,
            "host_mem_alloc_mib": self.given_memory_mib, "restarts": self.restarts,
            "state": state if is_live or is_over else "PENDING",
        }  # fmt: skip
        if is_over:
            elapsed_s = None if start_s is None or self.end_s is None else max(0, self.end_s - start_s)
            ended = {"end_s": self.end_s, "exit_code": self.exit_code, "exit_signal": self.exit_signal}
            return {**row, **ended, "start_s": start_s, "elapsed_s": elapsed_s}
        return {**row, "start_s": start_s, "elapsed_s": self._elapsed_s(now_s)} if is_live else row

    def _elapsed_s(self, now_s: int) -> int:
        """0 if slurmctld's clock is ahead."""
        if "SUSPENDED" in self.states:
            return self.ran_before_s
        since_s = self.ran_before_s + now_s - self.suspend_s if self.suspend_s else now_s - (self.start_s or now_s)
        return max(0, since_s)

    @property
    def shown_id(self) -> str:
        """The id as users write it: 12_3, 12_[4-9], 12+1, or 12."""
        if self.is_common_record and self.tasks:
            return f"{self.array_job_id}_[{self.tasks}]"
        return format_job_id(vars(self))

    def is_named(self, job_id: int, tasks: Collection[int] | None = None, offset: int | None = None) -> bool:
        """Return True if an id names this job: the id of a job, an array, or a heterogeneous job, or a part of it."""
        if offset is not None:
            return (self.het_job_id, self.het_offset) == (job_id, offset)
        if tasks is None:
            return job_id in (self.job_id, self.array_job_id, self.het_job_id)
        is_common = self.array_task_id is None
        own = [each for each in tasks if has_task(self.tasks, each)] if is_common else [self.array_task_id]
        return self.array_job_id == job_id and not set(own).isdisjoint(tasks)
