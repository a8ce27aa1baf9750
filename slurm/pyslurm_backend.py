"""Slurm by pyslurm 25.11.2 and its later patch releases, which run with Slurm 25.11 only.

pyslurm has no way to ask for priority factors, nor for all settings: those stay with Slurm's commands, and so does
node power.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from almanac.errors import CommandError, ConfigError
from almanac.records import Counts
from almanac.tres import SHARED_GRES, parse_gpus
from almanac.units import printable
from slurm.backend import CommandBackend
from slurm.commands import SlurmCommands, lost_error
from slurm.nodes import SlurmNode, left
from slurm.queue import Queue
from slurm.queued_job import QueuedJob, address, task_count
from slurm.releases import first_with, release_of
from slurm.states import JOB_WAITS, NODE_RESERVED, without_fulfilled

_HINT = 'install the pyslurm of this Slurm release (docs/install.md), or set slurm.backend = "commands"'
_PROBE = """
import json, sys
sys.path[:] = json.load(sys.stdin)
try:
    import pyslurm
except Exception as error:
    print(json.dumps({"error": str(error) or type(error).__name__}))
else:
    has_gpus = hasattr(getattr(pyslurm, "Job", None), "gpus")
    print(json.dumps({"version": str(getattr(pyslurm, "__version__", "")), "has_gpus": has_gpus}))
"""
"""A program of its own: Slurm's library ends the process that imports pyslurm if it finds no usable slurm.conf. Reads
the caller's sys.path, as JSON.
"""


@dataclass(frozen=True)
class PyslurmBackend(CommandBackend):
    """A SlurmBackend of pyslurm, and of Slurm's commands for what that has not.

    timeout_s: bound on all changes of one call. clock: seconds; now: seconds since 1970.
    """

    pyslurm: Any
    timeout_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time

    def program(self) -> str:
        return f"pyslurm {self.pyslurm.__version__}"

    def cluster(self) -> str:
        with _told(self.pyslurm):
            return str(self.pyslurm.slurmctld.Config.load().cluster_name)

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[QueuedJob]:
        with _told(self.pyslurm):
            waiting = [job for job in self.pyslurm.Jobs.load().values() if job.state in JOB_WAITS]
        split = Counter(job.array_id for job in waiting if job.array_id and not job.array_tasks_waiting)
        jobs, unreadable = list[QueuedJob](), list[str]()
        for job in waiting:
            try:
                jobs.append(_queued(job, split[job.array_id] > 0))
            except (AttributeError, TypeError, ValueError):
                unreadable.append(f"job {job.id}")
        jobs.sort(key=lambda job: job.job_id)
        return Queue(tuple(jobs), len(unreadable), "".join(unreadable[:1])).waiting_jobs(counts)

    def set_site_factors(self, jobs: Sequence[QueuedJob]) -> list[str]:
        """Each by the record's own number, which here names no other record."""
        said = []
        until_s = self.clock() + self.timeout_s
        for told, job in enumerate(jobs):
            if self.clock() >= until_s:
                raise CommandError(
                    f"pyslurm timed out after {self.timeout_s:g} s, with {told} of {len(jobs)} site factors set",
                    "check that slurmctld answers, or raise slurm.timeout_s",
                )
            if answer := self._refusal(job):
                said.append(f"{answer} for job {job.address}")
        return said

    def _refusal(self, job: QueuedJob) -> str:
        """Return Slurm's objection to a change, or "". Raises CommandError if it is out of reach."""
        # As text: pyslurm leaves out a factor that is false, and 0 would never be told.
        description = self.pyslurm.JobSubmitDescription(site_factor=str(job.site_factor))
        try:
            self.pyslurm.Job(job.job_id).modify(description)
        except self.pyslurm.RPCError as error:
            if lost := lost_error(str(error)):
                raise lost from error
            return str(error) or "Slurm gave no reason"
        return ""

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        with _told(self.pyslurm):
            found = [_node(node) for node in self.pyslurm.Nodes.load().values()]
        if any(node.states & NODE_RESERVED for node in found):  # pyslurm does not name the reservation of a node
            now_s = self.now()
            active = [each for each in self.reservations() if each.start_s <= now_s < each.end_s]
            names = {name: each.name for each in active for name in each.nodes}
            found = [replace(node, reservation=names.get(node.name, "")) for node in found]
        return sorted(found, key=lambda node: node.name)


@contextlib.contextmanager
def _told(pyslurm: Any) -> Iterator[None]:
    """Raises CommandError where slurmctld does not answer, as the commands do."""
    try:
        yield
    except pyslurm.RPCError as error:
        raise CommandError(f"pyslurm: {error}", "check that slurmctld answers") from error


def _queued(job: Any, is_split: bool) -> QueuedJob:
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
    gpu_count = int(total) or nodes * parse_gpus(per_node).count
    return QueuedJob(
        job_id=job.id,
        address=address(job.id, array_id, task_id, (job.array_tasks_waiting or "") if is_split else "", het_id, offset),
        submit_s=int(job.submit_time),
        user=_text(job, "user_name"),
        name=_text(job, "name"),
        comment=_text(job, "comment"),
        account=_text(job, "account"),
        partition=_text(job, "partition"),
        qos=_text(job, "qos"),
        constraints=_text(job, "constraints"),
        states=frozenset({job.state}),
        priority=job.priority,
        gpu_count=gpu_count,
        asked_gpus=gpu_count,
        gpu_type=types[0] if len(types) == 1 else parse_gpus(per_node).type,
        cpu_count=job.cpus or 1,
        node_count=nodes,
        time_limit_s=None if job.time_limit is None else int(job.time_limit) * 60,
        # The word of `scontrol show job` for --exclusive.
        is_exclusive=_text(job, "resource_sharing") == "NO",
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


def _node(node: Any) -> SlurmNode:
    """Its state is one text of base and flags: IDLE+POWERED_DOWN. Its reservation is not named."""
    memory_mib = node.real_memory
    return SlurmNode(
        name=node.name,
        states=without_fulfilled({*re.split(r"[^A-Z_]+", _text(node, "state").upper())} - {""}),
        features=_words(node, "available_features"),
        gres=_gres(node.configured_gres),
        partitions=_words(node, "partitions"),
        reason=_text(node, "reason"),
        cpu_count=node.total_cpus or 0,
        last_busy_s=node.last_busy_time or None,
        boot_s=node.boot_time or None,
        gres_used=_gres(node.allocated_gres),
        free_cpus=left(node.effective_cpus, node.allocated_cpus),
        memory_mib=memory_mib,
        free_memory_mib=left(memory_mib, node.allocated_memory),
    )


def _gres(counts: Mapping[str, Any] | None) -> str:
    """A GRES text: pyslurm gives a count, or {"count": "1", "indexes": "0"} of what jobs use."""
    found = {name: each["count"] if isinstance(each, dict) else each for name, each in (counts or {}).items()}
    return ",".join(f"{name}:{count}" for name, count in found.items())


def _text(record: Any, name: str) -> str:
    """A field as text, a list joined by ","; "" if unset.

    pyslurm decodes Slurm's bytes when a field is read. Bytes that are not UTF-8 are replaced, as in Slurm's JSON.
    """
    try:
        value = getattr(record, name)
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")
    return ",".join(value) if isinstance(value, list) else value or ""


def _words(record: Any, name: str) -> tuple[str, ...]:
    return tuple(word for word in _text(record, name).split(",") if word)


def open_pyslurm(commands: SlurmCommands) -> PyslurmBackend:
    """The backend of the installed pyslurm.

    scontrol is asked first, then pyslurm is imported in a process of its own: where slurm.conf is missing, Slurm's
    library ends the process that imports it. Raises CommandError where scontrol gets no answer, ConfigError where
    pyslurm cannot be imported or is made for another release of Slurm.
    """
    release = CommandBackend(commands).release()
    require_fit(_probed(commands), release)
    return PyslurmBackend(commands, _imported(), commands.timeout_s)


def require_fit(found: Mapping[str, Any], release: str) -> None:
    """Check that the probed pyslurm fits slurmctld's release, such as 25.11.7. Raises ConfigError if not."""
    version = str(found.get("version"))
    ours, slurms = release_of(version), release_of(release)
    if ours is None or ours != slurms:
        raise ConfigError(f"pyslurm {printable(version)} does not support Slurm {printable(release)}", _HINT)
    if not found.get("has_gpus"):
        raise ConfigError(
            f"pyslurm {printable(version)} has no Job.gpus", f"install pyslurm {first_with('pyslurm').pyslurm} or later"
        )


def _probed(commands: SlurmCommands) -> Mapping[str, Any]:
    """Return the probe's answer. Raises ConfigError, and CommandError if it takes too long."""
    done = commands.run([sys.executable, "-I", "-c", _PROBE], json.dumps(sys.path).encode())
    try:
        found = json.loads(done.stdout.strip().rpartition(b"\n")[2])
    except ValueError as error:
        said = printable(done.said.rpartition("; ")[2]) or "nothing"
        raise ConfigError(f"pyslurm crashed with exit code {done.code}: {said}", _HINT) from error
    if "error" in found:
        raise ConfigError(f"pyslurm cannot be imported: {printable(str(found['error']))}", _HINT)
    return dict(found)


def _imported() -> ModuleType:
    """pyslurm. Its import sets flags for every library that is loaded later: they are set back."""
    flags = sys.getdlopenflags()
    try:
        return importlib.import_module("pyslurm")
    except Exception as error:
        raise ConfigError(f"pyslurm cannot be imported: {printable(str(error))}", _HINT) from error
    finally:
        sys.setdlopenflags(flags)
