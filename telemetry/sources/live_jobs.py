"""Jobs that run or wait now, as squeue's JSON has them: 22.05 writes plain numbers, later releases {set, number}."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from almanac.errors import CommandError
from almanac.tres import parse_shares, parse_tres, size_mib
from almanac.units import format_job_id, valid_unicode
from telemetry.slurm.commands import Runner
from telemetry.slurm.queue_json import gres_of, has_task, queued
from telemetry.sources.bindings import BadRecordError, squeue_rows
from telemetry.sources.sacct_json import number, words

_RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
_UNKNOWN_ID = "Invalid job id specified"


@dataclass(frozen=True)
class LiveJob:
    """A job, an array task, or all tasks of an array that have no record of their own yet (tasks lists them).

    row: as in the table jobs; its end_s is None, and its elapsed_s the time so far, without suspensions. bindings: its
    GPUs, as in the table bindings. expected_start_s: Slurm's own estimate for a pending job, None if it has none.
    """

    row: Mapping[str, Any]
    user_id: int | None
    is_running: bool
    cluster: str
    bindings: tuple[Mapping[str, Any], ...] = ()
    tasks: str = ""
    reason: str = ""
    expected_start_s: int | None = None

    @property
    def job_id(self) -> int:
        return int(self.row["job_id"])

    @property
    def shown_id(self) -> str:
        array, task = self.row["array_job_id"], self.row["array_task_id"]
        if array is not None and task is None and self.tasks:
            return f"{array}_[{self.tasks}]"
        return format_job_id(self.row)

    def is_named(self, job_id: int, tasks: Collection[int] | None = None, offset: int | None = None) -> bool:
        """Whether an id names it: a job's, an array's, or a heterogeneous job's; or tasks or a component of one."""
        array, task = self.row["array_job_id"], self.row["array_task_id"]
        if offset is not None:
            return bool((self.row["het_job_id"], self.row["het_offset"]) == (job_id, offset))
        if tasks is None:
            return job_id in (self.job_id, array, self.row["het_job_id"])
        own = [task] if task is not None else [each for each in tasks if has_task(self.tasks, each)]
        return bool(array == job_id and not set(own).isdisjoint(tasks))


def live_jobs(commands: Runner, job_ids: Collection[int], now_s: int, cluster: str = "") -> list[LiveJob]:
    """Running and pending records of these jobs and arrays, by number. cluster: only of this one.

    Raises CommandError where squeue fails, or gives no list of jobs.
    """
    ids = ",".join(map(str, sorted(set(job_ids))))
    try:
        data = commands(["squeue", "-a", "-j", ids, "--json"])
    except CommandError as error:
        if _UNKNOWN_ID in str(error):
            return []
        raise
    found = [_live(job, now_s) for job in queued(data) if _is_of(job, cluster)]
    # 22.05 ignores the filter beside --json.
    known = {job.job_id: job for job in found if job and any(job.is_named(each) for each in job_ids)}
    return [known[job_id] for job_id in sorted(known)]


def _is_of(job: Mapping[str, Any], cluster: str) -> bool:
    return not cluster or str(job.get("cluster") or cluster).lower() == cluster.lower()


def _live(job: Mapping[str, Any], now_s: int) -> LiveJob | None:
    """None for a job that has ended, and for a record without number, submission or state."""
    states = frozenset(words(job.get("job_state")) or ())
    is_running, job_id, submit_s = bool(states & _RUNNING), number(job.get("job_id")), number(job.get("submit_time"))
    if job_id is None or not submit_s or not (is_running or "PENDING" in states):
        return None
    start_s = number(job.get("start_time")) or None
    row = {"job_id": job_id, "submit_s": submit_s, **_names(job), **_counts(job, is_running)}
    row["state"] = min(states & _RUNNING) if is_running else "PENDING"
    live = LiveJob(row, number(job.get("user_id")), is_running, _text(job, "cluster") or "")
    if not is_running:
        tasks, reason = _text(job, "array_task_string") or "", _text(job, "state_reason") or ""
        expected_s = start_s if start_s and start_s > now_s else None
        return replace(live, tasks=tasks, reason=reason, expected_start_s=expected_s)
    if start_s is None:
        return None
    row |= {"start_s": start_s, "elapsed_s": _elapsed_s(job, row["state"], start_s, now_s)}
    try:
        bindings = tuple(squeue_rows(job, now_s)) if job.get("gres_detail") else ()
    except BadRecordError:
        bindings = ()
    return replace(live, bindings=bindings)


def _elapsed_s(job: Mapping[str, Any], state: str, start_s: int, now_s: int) -> int:
    """Time so far, without suspensions; 0 where slurmctld's clock is ahead."""
    before_s, changed_s = number(job.get("pre_sus_time")) or 0, number(job.get("suspend_time")) or 0
    if state == "SUSPENDED":
        return before_s
    return max(0, before_s + now_s - changed_s if changed_s else now_s - start_s)


def _names(job: Mapping[str, Any]) -> dict[str, Any]:
    array_id, het_id = number(job.get("array_job_id")) or None, number(job.get("het_job_id")) or None
    fields = {"user": "user_name", "account": "account", "partition": "partition", "qos": "qos", "name": "name"}
    return {
        "array_job_id": array_id,
        "array_task_id": number(job.get("array_task_id")) if array_id else None,
        "het_job_id": het_id,
        "het_offset": number(job.get("het_job_offset")) if het_id else None,
        **{column: _text(job, field) for column, field in fields.items()},
        "constraints": _text(job, "features") or "",
    }


def _counts(job: Mapping[str, Any], is_running: bool) -> dict[str, Any]:
    asked, given, tres = gres_of(job), gres_of(job, is_given=True), _text(job, "tres_alloc_str") or ""
    limit_min = number(job.get("time_limit"))
    return {
        "time_limit_s": None if limit_min is None else limit_min * 60,
        "node_count": number(job.get("node_count")),
        "node_list": _text(job, "nodes") if is_running else None,
        "cpu_count": number(job.get("cpus")),
        "gpu_count": given.count if is_running else None,
        "gpu_count_req": asked.count,
        "gpu_share_count": parse_shares(tres or _text(job, "tres_req_str") or ""),
        "gpu_type": given.type or None,
        "host_mem_alloc_mib": size_mib(parse_tres(tres).get("mem", "")) or None,
        "restarts": number(job.get("restart_cnt")),
    }


def _text(job: Mapping[str, Any], key: str) -> str | None:
    value = job.get(key)
    return valid_unicode(value) if isinstance(value, str) and value else None
