"""Slurm by pyslurm 25.11.2 and its later patch releases, which run with Slurm 25.11 only.

pyslurm has no way to ask for priority factors, nor for all settings: those stay with Slurm's commands, and so does
node power.
telemetry/slurm/pyslurm_open.py opens it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac.errors import CommandError
from almanac.records import Counts
from almanac.tres import SHARED_GRES, parse_gpus
from telemetry.slurm.backend import FactorChange, Node, NodeState, PendingJob, Reservation, SiteFactor
from telemetry.slurm.command_backend import CommandBackend
from telemetry.slurm.commands import lost_error
from telemetry.slurm.node_states import without_fulfilled
from telemetry.slurm.queue_json import address, task_count


@dataclass(frozen=True)
class PyslurmBackend:
    """A SlurmBackend of pyslurm, and of Slurm's commands where that has nothing.

    timeout_s: bound on all changes of one call. clock: seconds.
    """

    pyslurm: Any
    commands: CommandBackend
    timeout_s: float = 300.0
    clock: Callable[[], float] = time.monotonic

    def program(self) -> str:
        return f"pyslurm {self.pyslurm.__version__}"

    def release(self) -> str:
        return self.commands.release()

    def configuration(self) -> str:
        return self.commands.configuration()

    def cluster(self) -> str:
        with _told(self.pyslurm):
            return str(self.pyslurm.slurmctld.Config.load().cluster_name)

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[PendingJob]:
        with _told(self.pyslurm):
            waiting = [job for job in self.pyslurm.Jobs.load().values() if job.state == "PENDING"]
        split = Counter(job.array_id for job in waiting if job.array_id and not job.array_tasks_waiting)
        jobs = []
        for job in waiting:
            counts.seen += 1
            try:
                jobs.append(_pending(job, split[job.array_id] > 0))
                counts.kept += 1
            except (AttributeError, TypeError, ValueError):
                counts.drop("pending job that cannot be read", example=f"job {job.id}")
        return sorted(jobs, key=lambda job: job.job_id)

    def site_factors(self) -> dict[int, SiteFactor]:
        return self.commands.site_factors()

    def set_site_factors(self, changes: Sequence[FactorChange]) -> list[str]:
        """Each by the record's own number, which here names no other record."""
        said = []
        until_s = self.clock() + self.timeout_s
        for told, change in enumerate(changes):
            if self.clock() >= until_s:
                raise CommandError(
                    f"pyslurm timed out after {self.timeout_s:g} s, with {told} of {len(changes)} site factors set",
                    "check that slurmctld answers, or raise slurm.timeout_s",
                )
            if answer := self._refusal(change):
                said.append(f"{answer} for job {change.job.address}")
        return said

    def _refusal(self, change: FactorChange) -> str:
        """What Slurm says against a change. Raises CommandError where it is out of reach."""
        # As text: pyslurm leaves out a factor that is false, and 0 would never be told.
        description = self.pyslurm.JobSubmitDescription(site_factor=str(change.site_factor))
        try:
            self.pyslurm.Job(change.job.job_id).modify(description)
        except self.pyslurm.RPCError as error:
            if lost := lost_error(str(error)):
                raise lost from error
            return str(error) or "Slurm gave no reason"
        return ""

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        with _told(self.pyslurm):
            found = list(self.pyslurm.Nodes.load().values())
        return sorted((_node(node) for node in found), key=lambda node: node.name)

    def reservations(self) -> list[Reservation]:
        return self.commands.reservations()

    def set_node_state(self, names: Sequence[str], state: NodeState, reason: str = "") -> list[str]:
        return self.commands.set_node_state(names, state, reason)

    def suspend_exceptions(self) -> str:
        return self.commands.suspend_exceptions()

    def set_suspend_exceptions(self, value: str) -> list[str]:
        return self.commands.set_suspend_exceptions(value)

    def require_accounting(self) -> None:
        self.commands.require_accounting()


@contextlib.contextmanager
def _told(pyslurm: Any) -> Iterator[None]:
    """Raises CommandError where slurmctld does not answer, as the commands do."""
    try:
        yield
    except pyslurm.RPCError as error:
        raise CommandError(f"pyslurm: {error}", "check that slurmctld answers") from error


def _pending(job: Any, is_split: bool) -> PendingJob:
    """array_task_id is None for the task 0, too: it is the waiting tasks that tell an array's common record."""
    array_id = job.array_id
    task_id = (job.array_task_id or 0) if array_id and not job.array_tasks_waiting else None
    het_id = job.heterogeneous_id or None
    offset = (job.heterogeneous_offset or 0) if het_id else None
    gpus = dict(job.gpus)
    types = [gpu.type for gpu in gpus.values() if gpu.type]
    total = gpus["gpu"].count if "gpu" in gpus else sum(gpu.count for gpu in gpus.values())
    per_node = ",".join(f"{name}:{count}" for name, count in (job.gres_per_node or {}).items())
    nodes = job.num_nodes or 1
    return PendingJob(
        job_id=job.id,
        address=address(job.id, array_id, task_id, (job.array_tasks_waiting or "") if is_split else "", het_id, offset),
        submit_s=int(job.submit_time),
        user=_text(job, "user_name"),
        name=_text(job, "name"),
        comment=_text(job, "comment") if hasattr(job, "comment") else "",
        account=_text(job, "account"),
        partition=_text(job, "partition"),
        qos=_text(job, "qos"),
        constraints=_text(job, "constraints"),
        gpu_count=int(total) or nodes * parse_gpus(per_node).count,
        gpu_type=types[0] if len(types) == 1 else parse_gpus(per_node).type,
        cpu_count=job.cpus or 1,
        node_count=nodes,
        time_limit_s=None if job.time_limit is None else int(job.time_limit) * 60,
        is_held=job.priority == 0,
        array_job_id=array_id,
        array_task_id=task_id,
        het_job_id=het_id,
        het_offset=offset,
        restarts=job.requeue_count or 0,
        reason=_text(job, "state_reason"),
        gpus_per_node=parse_gpus(per_node).count,
        shares=tuple((name, nodes * count) for name in SHARED_GRES if (count := parse_gpus(per_node, name).count)),
        task_count=task_count(job.array_tasks_waiting or "", job.array_tasks_parallel or 0),
    )


def _node(node: Any) -> Node:
    """Its state is one text of base and flags: IDLE+POWERED_DOWN."""
    return Node(
        name=node.name,
        states=without_fulfilled({*re.split(r"[^A-Z_]+", _text(node, "state").upper())} - {""}),
        features=_words(node, "available_features"),
        gres=_gres(node.configured_gres),
        partitions=_words(node, "partitions"),
        reason=_text(node, "reason"),
        cpu_count=getattr(node, "total_cpus", None) or 0,
        last_busy_s=getattr(node, "last_busy_time", None) or None,
        boot_s=getattr(node, "boot_time", None) or None,
        reservation=_text(node, "reservation_name") if hasattr(node, "reservation_name") else "",
    )


def _gres(counts: Mapping[str, int] | None) -> str:
    return ",".join(f"{name}:{count}" for name, count in (counts or {}).items())


def _text(record: Any, name: str) -> str:
    """A field as text, a list joined by ","; "" where it is not set.

    pyslurm decodes Slurm's bytes when a field is read. Bytes that are not UTF-8 are replaced, as in Slurm's JSON.
    """
    try:
        value = getattr(record, name)
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")
    return ",".join(value) if isinstance(value, list) else value or ""


def _words(record: Any, name: str) -> tuple[str, ...]:
    return tuple(word for word in _text(record, name).split(",") if word)
