"""The GPU jobs of one moment, waiting and running, with what predicts their run times (`squeue --json`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from almanac.names import rule_key
from almanac.records import Request
from almanac.tres import parse_gpus
from almanac.units import valid_unicode
from telemetry.slurm.hostlist import expand
from telemetry.slurm.queue_json import gres_of, queued, task_count
from telemetry.slurm.script_key import command_key
from telemetry.sources.sacct_json import number, words

_HOLDS = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)
_READY = frozenset({"", "NONE", "PRIORITY", "RESOURCES", "NODEDOWN", "REQNODENOTAVAIL"})
"""Reasons of a job that only priority and resources keep from starting, upper case and without "_"."""
MAX_NODES = 100_000


@dataclass(frozen=True)
class LiveGpuJob:
    """A job that waits for GPUs or holds some.

    request: as the history has it; its gpu_type is "" where the job named none, or several. nodes: that it holds, by
    name; () while it waits. start_s: None while it waits. priority: Slurm's. is_ready: only priority and resources keep
    it from starting. count: tasks that wait. node_gpus: that it holds on each of its nodes; () if not told.
    """

    request: Request
    start_s: int | None
    nodes: tuple[str, ...]
    priority: int
    is_ready: bool
    count: int = 1
    node_gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class LiveQueue:
    """jobs: without held ones. unreadable: number of records that cannot be read."""

    jobs: tuple[LiveGpuJob, ...]
    unreadable: int = 0


def live_queue(data: bytes, cluster: str) -> LiveQueue:
    """Of `squeue -a --json`. Raises CommandError where it holds no list of jobs."""
    jobs, unreadable = [], 0
    for record in queued(data):
        if str(record.get("cluster") or cluster).lower() != cluster.lower():
            continue
        states = frozenset(words(record.get("job_state")) or ())
        is_waiting, holds = "PENDING" in states, bool(states & _HOLDS)
        if not states:
            unreadable += 1
        elif is_waiting or holds:
            try:
                jobs.append(_job(record, is_waiting))
            except (KeyError, TypeError, ValueError):
                unreadable += 1
    wanted = [job for job in jobs if job.request.gpu_count and (job.start_s is not None or job.priority > 0)]
    return LiveQueue(tuple(wanted), unreadable)


def _job(record: Mapping[str, Any], is_waiting: bool) -> LiveGpuJob:
    """Raises ValueError or TypeError where something needed is missing."""
    submit_s, start_s = number(record.get("submit_time")), number(record.get("start_time"))
    priority = number(record.get("priority"))
    if not submit_s or (not is_waiting and not start_s):
        raise ValueError("no time of submission or start")
    array_id = number(record.get("array_job_id")) or None
    tasks = _text(record, "array_task_string")
    return LiveGpuJob(
        request=_request(record, submit_s, array_id is not None, is_waiting),
        start_s=None if is_waiting else start_s,
        nodes=() if is_waiting else expand(_text(record, "nodes"), MAX_NODES),
        # A job whose priority is not told stands last.
        priority=1 if priority is None else priority,
        is_ready=_text(record, "state_reason").upper().replace("_", "").split(",")[0] in _READY,
        count=task_count(tasks, number(record.get("array_max_tasks")) or 0) if is_waiting and array_id else 1,
        node_gpus=() if is_waiting else tuple(parse_gpus(str(each)).count for each in record.get("gres_detail") or ()),
    )


def _request(record: Mapping[str, Any], submit_s: int, is_array: bool, is_waiting: bool) -> Request:
    gpus = gres_of(record, is_given=not is_waiting)
    limit_min = number(record.get("time_limit"))
    user = _text(record, "user_name")
    has_script = not number(record.get("het_job_id"))
    line, folder = _text(record, "submit_line"), _text(record, "current_working_directory")
    return Request(
        user=user,
        job_name=_text(record, "name").replace('"', "`"),
        account=_text(record, "account"),
        partition=_text(record, "partition"),
        qos=_text(record, "qos"),
        constraints=_text(record, "features"),
        gpu_count=gpus.count,
        gpu_type=gpus.type,
        node_count=number(record.get("node_count")) or 1,
        cpu_count=number(record.get("cpus")) or 1,
        time_limit_s=None if limit_min is None else limit_min * 60,
        is_array=is_array,
        submit_s=submit_s,
        script_key=command_key(user, line, folder) if has_script else "",
        rule=rule_key(_text(record, "comment").replace('"', "`")),
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return valid_unicode(value or "")
