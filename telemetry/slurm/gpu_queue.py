"""The GPU jobs in Slurm's queue with the GPU types that they ask for, from squeue's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from telemetry.slurm.queue_json import address, gres_of, queued, task_count
from telemetry.sources.sacct_json import number, words

_HOLDS_NODES = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)


@dataclass(frozen=True)
class QueuedGpuJob:
    """A job that waits for GPUs or holds some. gpu_type: "" where it named none, or several.

    address: what scontrol takes for this record and no other. start_s: None while it waits. is_held: its priority is 0.
    time_limit_s: None where it has none. count: tasks of the record that wait.
    """

    address: str
    is_pending: bool
    submit_s: int
    start_s: int | None
    time_limit_s: int | None
    gpu_count: int
    gpu_type: str
    nodes: str
    reason: str
    is_held: bool
    count: int = 1


def gpu_jobs(data: bytes) -> list[QueuedGpuJob]:
    """The GPU jobs of `squeue -a --json` that wait or hold nodes. Raises CommandError where it holds no list of jobs.

    The type is read from the request: Slurm's sums name it only for the types in AccountingStorageTRES.
    """
    found = []
    for job in queued(data):
        states = frozenset(words(job.get("job_state")) or ())
        if "PENDING" in states or states & _HOLDS_NODES:
            try:
                found.append(_job(job, "PENDING" in states))
            except (KeyError, TypeError, ValueError):
                continue
    return [job for job in found if job.gpu_count]


def _job(job: Mapping[str, Any], is_pending: bool) -> QueuedGpuJob:
    """Raises KeyError, TypeError or ValueError where what has to be there is not."""
    job_id, submit_s = number(job["job_id"]), number(job["submit_time"])
    if job_id is None or not submit_s:
        raise ValueError("no number or no time of submission")
    gpus = gres_of(job, is_given=not is_pending)
    array_id = number(job.get("array_job_id")) or None
    task_id, tasks = number(job.get("array_task_id")), str(job.get("array_task_string") or "")
    het_id = number(job.get("het_job_id")) or None
    limit_min = number(job.get("time_limit"))
    return QueuedGpuJob(
        address=address(job_id, array_id, task_id, tasks, het_id, number(job.get("het_job_offset")) or 0),
        is_pending=is_pending,
        submit_s=submit_s,
        start_s=None if is_pending else number(job.get("start_time")) or None,
        time_limit_s=None if limit_min is None else limit_min * 60,
        gpu_count=gpus.count,
        gpu_type=gpus.type,
        nodes=str(job.get("nodes") or ""),
        reason=str(job.get("state_reason") or ""),
        is_held=number(job.get("priority")) == 0,
        count=task_count(tasks, number(job.get("array_max_tasks")) or 0) if is_pending and array_id else 1,
    )
