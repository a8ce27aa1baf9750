"""Slurm's queue: each job of `squeue --json`, of any release and in any state, as one class.

JSON only: no name or comment in it can forge a record, as it could in squeue's and scontrol's text. pyslurm's jobs
become the same class (slurm/pyslurm_backend.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from almanac.errors import CommandError
from almanac.records import Counts
from almanac.tres import SHARED_GRES, Gpus, most, parse_gpus, parse_tres, size_mib
from almanac.units import valid_unicode
from slurm.commands import Runner
from slurm.hostlist import expand
from slurm.queued_job import QueuedJob, RequestKey, address, task_count
from slurm.releases import exit_of, number, records, words
from slurm.sbatch import command_framework, command_key
from slurm.states import JOB_WAITS, ends, has_ended

_REQUESTS: Mapping[RequestKey, tuple[str, tuple[str, ...]]] = {
    "TresPerJob": ("tres_per_job", ()), "TresPerNode": ("tres_per_node", ("node_count",)),
    "TresPerTask": ("tres_per_task", ("tasks",)),
    "TresPerSocket": ("tres_per_socket", ("node_count", "sockets_per_node")),
}  # fmt: skip
"""By scontrol's name, the field of a record, and the fields that say how often the job has what it names."""
_MARKS = ("nice", "admin_comment", "deadline", "resv_name", "licenses", "shared", "time_minimum", "prefer")
_ERROR_FILES = ("stderr_expanded", "standard_error", "stdout_expanded", "standard_output")
"""Without a file for errors, they are in that for output. 26.05 also gives both with their patterns filled."""
_SPECIAL = ("resv_name", "cron", "licenses", "burst_buffer", "container")


@dataclass(frozen=True)
class Queue:
    """Jobs that have not ended, by number. unreadable: number of records left out, with the first one's id.

    ended: jobs that slurmctld still has after their end (MinJobAge), if they were asked for.
    """

    jobs: tuple[QueuedJob, ...]
    unreadable: int = 0
    example: str = ""
    ended: tuple[QueuedJob, ...] = ()

    def waiting(self) -> Queue:
        """Return only the jobs that wait."""
        return replace(self, jobs=tuple(job for job in self.jobs if job.is_waiting))

    def waiting_jobs(self, counts: Counts) -> list[QueuedJob]:
        """The jobs that wait; counts gets them, and the records that cannot be read."""
        found = list(self.waiting().jobs)
        counts.seen += len(found) + self.unreadable
        counts.kept += len(found)
        counts.drop("job that cannot be read", self.unreadable, self.example)
        return found


def read_queue(commands: Runner, cluster: str, job_ids: Collection[int] = (), *, with_ended: bool = False) -> Queue:
    """The jobs of a cluster now, or at least those of some numbers. Raises CommandError.

    22.05 always lists every job, and ended ones. squeue fails if you ask for a single job and it is gone.
    """
    asked = ["-j", ",".join(map(str, sorted(set(job_ids))))] if job_ids else []
    asked += ["-t", "all"] if with_ended else []
    try:
        return parse_queue(commands(["squeue", "-a", "--json", *asked]), cluster, with_ended=with_ended)
    except CommandError as error:
        if asked and "Invalid job id" in str(error):
            return Queue(())
        raise


def read_running(commands: Runner, cluster: str) -> Queue:
    """Read the running jobs of a cluster ("": of any), perhaps with others. Raises CommandError.

    Pending jobs are not asked for: each would take 150 KiB.
    """
    return parse_queue(commands(["squeue", "-a", "-t", "RUNNING", "--json"]), cluster)


def parse_queue(data: bytes, cluster: str, *, with_ended: bool = False) -> Queue:
    """The jobs of a cluster ("": of any) in `squeue -a --json`. Raises CommandError if it holds no list of jobs."""
    listed = records(data, "jobs")
    if listed is None:
        raise CommandError("squeue --json gave no list of jobs", "install Slurm's JSON serializer plugin")
    found = [job for job in listed if not cluster or _cluster(job, cluster) == cluster.lower()]
    splits = {number(job.get("array_job_id")) for job in found if _is_waiting_task(job)}
    jobs, unreadable = list[QueuedJob](), list[str]()
    for record in found:
        if not with_ended and has_ended(states_of(record)):
            continue
        try:
            jobs.append(parse_job(record, is_split=number(record.get("array_job_id")) in splits))
        except (KeyError, TypeError, ValueError):
            unreadable.append(f"job {number(record.get('job_id'))}")
    jobs.sort(key=lambda job: job.job_id)
    ended = tuple(job for job in jobs if with_ended and job.has_ended)
    live = tuple(job for job in jobs if not (with_ended and job.has_ended))
    return Queue(live, len(unreadable), "".join(unreadable[:1]), ended)


def _cluster(record: Mapping[str, Any], default: str) -> str:
    return str(record.get("cluster") or default).lower()


def states_of(record: Mapping[str, Any]) -> frozenset[str]:
    """A job's state and flags in capital letters; empty if they cannot be read."""
    return frozenset(word.upper() for word in words(record.get("job_state")) or ())


def _is_waiting_task(record: Mapping[str, Any]) -> bool:
    return number(record.get("array_task_id")) is not None and bool(states_of(record) & JOB_WAITS)


def parse_job(record: Mapping[str, Any], *, is_split: bool = False) -> QueuedJob:
    """One record of `squeue --json`. is_split: waiting tasks of its array have records of their own.

    Raises KeyError, TypeError, or ValueError if something that every job has is missing or of another form.
    """
    job_id, submit_s, states = number(record["job_id"]), number(record["submit_time"]), states_of(record)
    start_s, is_waiting = number(record.get("start_time")) or None, bool(states & JOB_WAITS)
    if not job_id or not submit_s or not states:
        raise ValueError("no number, time of submission, or state")
    array_id, task_id = number(record.get("array_job_id")) or None, number(record.get("array_task_id"))
    task_id = task_id if array_id else None
    het_id = number(record.get("het_job_id")) or None
    het_offset = number(record.get("het_job_offset")) or 0 if het_id else None
    tasks, alloc = _text(record, "array_task_string"), parse_tres(_text(record, "tres_alloc_str"))
    gpus, asked = _gpus(record, "gpu", not is_waiting), _gpus(record, "gpu")
    shares = ((name, _gpus(record, name, not is_waiting).count) for name in SHARED_GRES)
    user, node_list = _text(record, "user_name"), "" if is_waiting else _text(record, "nodes")
    detail, work_dir = record.get("gres_detail"), _text(record, "current_working_directory")
    cpus, limit_min = number(record.get("cpus")) or 1, number(record.get("time_limit"))
    exit_code, exit_signal = (exit_of(record.get("exit_code")) or (None, None)) if ends(states) else (None, None)
    return QueuedJob(
        job_id=job_id,
        address=address(job_id, array_id, task_id, tasks if is_split else "", het_id, het_offset),
        submit_s=submit_s,
        user=user,
        name=_text(record, "name"),
        account=_text(record, "account"),
        partition=_text(record, "partition"),
        qos=_text(record, "qos"),
        constraints=_text(record, "features"),
        comment=_text(record, "comment"),
        cluster=_text(record, "cluster"),
        user_id=number(record.get("user_id")),
        states=states,
        priority=number(record.get("priority")),
        reason=_text(record, "state_reason"),
        gpu_count=gpus.count,
        gpu_type=gpus.type,
        asked_gpus=asked.count,
        shares=() if gpus.count else tuple((name, count) for name, count in shares if count),
        gpus_per_node=parse_gpus(_text(record, "tres_per_node")).count,
        requests={key: text for key, (name, _) in _REQUESTS.items() if (text := _text(record, name))},
        cpu_count=cpus,
        node_count=number(record.get("node_count")) or 1,
        memory_mib=_memory_mib(record, cpus),
        time_limit_s=None if limit_min is None else limit_min * 60,
        eligible_s=number(record.get("eligible_time")) or 0,
        required_nodes=_text(record, "required_nodes"),
        excluded_nodes=_text(record, "excluded_nodes"),
        is_exclusive="none" in (words(record.get("shared")) or ()),
        is_plain=not (het_id or words(record.get("shared")) or any(map(record.get, _SPECIAL))),
        is_batch=_is_true(record.get("batch_flag")),
        can_requeue=_is_true(record.get("requeue")),
        waits_for_jobs=bool(_text(record, "dependency").strip()),
        marks=tuple(str(record.get(key)) for key in _MARKS),
        array_job_id=array_id,
        array_task_id=task_id,
        tasks=tasks,
        task_count=task_count(tasks, number(record.get("array_max_tasks")) or 0),
        het_job_id=het_id,
        het_offset=het_offset,
        restarts=number(record.get("restart_cnt")) or 0,
        script_key="" if het_id else command_key(user, _text(record, "submit_line"), work_dir),
        framework="" if het_id else _framework(record),
        start_s=None if is_waiting else start_s,
        expected_start_s=start_s if is_waiting else None,
        node_list=node_list,
        detail=tuple(map(str, detail)) if isinstance(detail, list) and not is_waiting else (),
        hosts=_hosts(record, expand(node_list)),
        given_memory_mib=size_mib(alloc.get("mem", "")) or None,
        ran_before_s=number(record.get("pre_sus_time")) or 0,
        suspend_s=number(record.get("suspend_time")) or 0,
        end_s=number(record.get("end_time")) or None if ends(states) else None,
        exit_code=exit_code,
        exit_signal=exit_signal,
        work_dir=work_dir,
        error_file=next((text for key in _ERROR_FILES if (text := _text(record, key))), ""),
    )


def _framework(record: Mapping[str, Any]) -> str:
    """By the submit line, else by the script and its arguments."""
    return command_framework(_text(record, "submit_line") or f"sbatch {_text(record, 'command')}")


def _gpus(record: Mapping[str, Any], name: str, is_given: bool = False) -> Gpus:
    """GPUs, or another GRES, that a record asks for, or was given, of the whole job.

    Slurm's sums (tres_req_str) hold them only if AccountingStorageTRES has gres/gpu, and their type only if it has that
    type. Without them, the request's own options count: a job that was given whole nodes may have none.
    """
    if is_given:
        detail = record.get("gres_detail")
        by_node = [parse_gpus(str(part), name) for part in (detail if isinstance(detail, list) else ())]
        parts = Gpus(sum(each.count for each in by_node), most(by_node).type)
        held = parse_gpus(_text(record, "tres_alloc_str"), name)
        if held.count or parts.count:
            return Gpus(held.count or parts.count, most([held, parts, _gpus(record, name)]).type)
    total = parse_gpus(_text(record, "tres_req_str"), name)
    own = most(_options(record, name))
    return Gpus(total.count or own.count, own.type if not total.count else most([total, own]).type)


def _options(record: Mapping[str, Any], name: str) -> Iterator[Gpus]:
    for key, factors in _REQUESTS.values():
        if name in (text := _text(record, key)):
            gpus = parse_gpus(text, name)
            yield Gpus(gpus.count * math.prod(number(record.get(factor)) or 1 for factor in factors), gpus.type)


def _memory_mib(record: Mapping[str, Any], cpus: int) -> int | None:
    if record.get("memory_per_tres"):
        return None
    per_node, per_cpu = number(record.get("memory_per_node")), number(record.get("memory_per_cpu"))
    if per_node is not None:
        return per_node
    return None if per_cpu is None else per_cpu * cpus


def _hosts(record: Mapping[str, Any], nodes: tuple[str, ...]) -> tuple[str, ...]:
    """A job's hosts in gres_detail's order, which is the node table's; () if it is not known.

    job_resources lists them so: `allocated_nodes` on 22.05, later `nodes.allocation`. Without it, a host list's order
    is sure for one host only: slurm.conf may name its nodes in any order.
    """
    resources = record.get("job_resources")
    resources = resources if nodes and isinstance(resources, dict) else {}
    listed = resources.get("nodes")
    listed = listed.get("allocation") if isinstance(listed, dict) else resources.get("allocated_nodes")
    if isinstance(listed, list) and listed:
        names = [item.get("name") or item.get("nodename") for item in listed if isinstance(item, dict)]
        return tuple(name for name in names if isinstance(name, str))
    return nodes if len(nodes) == 1 else ()


def _is_true(value: Any) -> bool:
    """A flag that 22.05 writes as 0 or 1, or true."""
    return value is True or number(value) == 1


def _text(record: Mapping[str, Any], key: str) -> str:
    """A text; a number only where people choose the text. Raises TypeError."""
    value = record.get(key)
    if type(value) is int and key in ("name", "user_name", "account", "partition", "qos", "features", "comment"):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return valid_unicode(value or "")
