"""Pending jobs and nodes of Slurm's JSON: 22.05 writes plain numbers and texts, later releases {set, number} and lists.

JSON only: no name or comment in it can forge a record, as it could in squeue's and scontrol's text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from almanac.errors import CommandError
from almanac.records import Counts
from almanac.tres import SHARED_GRES, Gpus, most, parse_gpus
from almanac.units import valid_unicode
from telemetry.slurm.backend import Node, PendingJob
from telemetry.slurm.commands import Runner
from telemetry.slurm.node_states import without_fulfilled
from telemetry.slurm.script_key import command_key
from telemetry.sources.sacct_json import number, words

_TASKS = re.compile(r"[0-9]+(?:-[0-9]+(?::[0-9]+)?)?")
_TIMES: Mapping[str, tuple[str, ...]] = {
    "tres_per_job": (), "tres_per_node": ("node_count",), "tres_per_task": ("tasks",),
    "tres_per_socket": ("node_count", "sockets_per_node"),
}  # fmt: skip
"""Options of a request, and how often the job has what each names."""
UNKNOWN = frozenset({"UNKNOWN"})
"""Slurm's own word, for a node whose state cannot be read."""
MAX_TASK_LIST = 100_000
"""Characters of an array's list of tasks; a longer one is not written out."""
MAX_TASK_TEXT = 40
"""Characters of one part of it: three numbers."""


def records(data: bytes, key: str) -> list[Mapping[str, Any]] | None:
    """The list under `key` of a JSON object; None where there is none."""
    try:
        content = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    found = content.get(key) if isinstance(content, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else None


def queued(data: bytes) -> list[Mapping[str, Any]]:
    """The jobs of `squeue --json`, whatever their state. Raises CommandError where it holds no list of jobs."""
    found = records(data, "jobs")
    if found is None:
        raise CommandError("squeue --json gave no list of jobs", "install Slurm's JSON serializer plugin")
    return found


def queue_of(commands: Runner, job_ids: Collection[int], *options: str) -> bytes:
    """`squeue --json` of these jobs, or of all jobs if you name none. Raises CommandError.

    22.05 always lists every job. squeue fails if you ask for a single job and it is gone.
    """
    asked = ["-j", ",".join(map(str, sorted(job_ids)))] if job_ids else []
    try:
        return commands(["squeue", "-a", *options, "--json", *asked])
    except CommandError as error:
        if asked and "Invalid job id" in str(error):
            return b'{"jobs": []}'
        raise


def pending_jobs(data: bytes, cluster: str, counts: Counts) -> list[PendingJob]:
    """The pending records of `squeue -a --json`, by number. Raises CommandError where it holds no list of jobs.

    22.05 ignores filters beside --json and lists jobs that have ended, too.
    """
    own = [job for job in queued(data) if _is_of(job, cluster)]
    unknown = [job for job in own if words(job.get("job_state")) is None]
    counts.seen += len(unknown)
    counts.drop("job whose state cannot be read", len(unknown), "".join(_named(job) for job in unknown[:1]))
    waiting = [job for job in own if "PENDING" in (words(job.get("job_state")) or ())]
    with_own_record = Counter(_array_id(job) for job in waiting if number(job.get("array_task_id")) is not None)
    jobs = []
    for job in waiting:
        counts.seen += 1
        try:
            jobs.append(_pending(job, with_own_record[_array_id(job)] > 0))
            counts.kept += 1
        except (KeyError, TypeError, ValueError):
            counts.drop("pending job that cannot be read", example=_named(job))
    return sorted(jobs, key=lambda job: job.job_id)


def _named(job: Mapping[str, Any]) -> str:
    return f"job {number(job.get('job_id'))}"


def _is_of(job: Mapping[str, Any], cluster: str) -> bool:
    return str(job.get("cluster") or cluster).lower() == cluster.lower()


def _array_id(job: Mapping[str, Any]) -> int | None:
    return number(job.get("array_job_id")) or None


def gres_of(job: Mapping[str, Any], name: str = "gpu", *, is_given: bool = False) -> Gpus:
    """Return the GPUs that a record of `squeue --json` asks for, or was given (is_given), of the whole job.

    Slurm's sums (tres_req_str) hold them only if AccountingStorageTRES has gres/gpu, and their type only if it has that
    type. Without them, the request's own options count: a job that was given whole nodes may have none. name: the GRES.
    """
    if is_given:
        detail = job.get("gres_detail")
        by_node = [parse_gpus(str(part), name) for part in (detail if isinstance(detail, list) else ())]
        held, parts = parse_gpus(str(job.get("tres_alloc_str") or ""), name), _sum(by_node)
        if held.count or parts.count:
            return Gpus(held.count or parts.count, most([held, parts, gres_of(job, name)]).type)
    total = parse_gpus(str(job.get("tres_req_str") or ""), name)
    own = most(_options(job, name))
    return Gpus(total.count or own.count, own.type if not total.count else most([total, own]).type)


def _options(job: Mapping[str, Any], name: str) -> Iterator[Gpus]:
    for field, factors in _TIMES.items():
        if name in (text := str(job.get(field) or "")):
            gpus = parse_gpus(text, name)
            yield Gpus(gpus.count * math.prod(number(job.get(factor)) or 1 for factor in factors), gpus.type)


def _shares(job: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """A job has whole GPUs or parts of GPUs, never both."""
    return tuple((name, count) for name in SHARED_GRES if (count := gres_of(job, name).count))


def _sum(parts: list[Gpus]) -> Gpus:
    return Gpus(sum(part.count for part in parts), most(parts).type)


def queue_record(job: Mapping[str, Any]) -> PendingJob:
    """One record of `squeue --json`, also of a job that runs. Raises KeyError, TypeError, or ValueError."""
    return _pending(job, False, is_given="PENDING" not in (words(job.get("job_state")) or ()))


def _pending(job: Mapping[str, Any], is_split: bool, *, is_given: bool = False) -> PendingJob:
    """Raises ValueError or TypeError where what has to be there is not. is_split: other tasks have own records."""
    job_id, submit_s = number(job["job_id"]), number(job["submit_time"])
    if job_id is None or not submit_s:
        raise ValueError("no number or no time of submission")
    array_id, task_id = _array_id(job), number(job.get("array_task_id"))
    het_id = number(job.get("het_job_id")) or None
    het_offset = number(job.get("het_job_offset")) or 0 if het_id else None
    _text(job, "tres_req_str")
    gpus = gres_of(job, is_given=is_given)
    limit_min = number(job.get("time_limit"))
    return PendingJob(
        job_id=job_id,
        address=address(
            job_id, array_id, task_id, _text(job, "array_task_string") if is_split else "", het_id, het_offset
        ),
        submit_s=submit_s,
        user=_text(job, "user_name"),
        name=_text(job, "name"),
        account=_text(job, "account"),
        partition=_text(job, "partition"),
        qos=_text(job, "qos"),
        constraints=_text(job, "features"),
        gpu_count=gpus.count,
        gpu_type=gpus.type,
        cpu_count=number(job.get("cpus")) or 1,
        node_count=number(job.get("node_count")) or 1,
        time_limit_s=None if limit_min is None else limit_min * 60,
        is_held=number(job.get("priority")) == 0,
        array_job_id=array_id,
        array_task_id=task_id,
        het_job_id=het_id,
        het_offset=het_offset,
        restarts=number(job.get("restart_cnt")) or 0,
        reason=_shown(job.get("state_reason")),
        gpus_per_node=parse_gpus(_shown(job.get("tres_per_node"))).count,
        shares=() if gpus.count else _shares(job),
        is_exclusive="none" in (words(job.get("shared")) or ()),
        task_count=task_count(_shown(job.get("array_task_string")), number(job.get("array_max_tasks")) or 0),
        script_key="" if het_id else _script_key(job),
        comment=_text(job, "comment"),
    )


def _script_key(job: Mapping[str, Any]) -> str:
    """As the record will have it; 24.11 and older show no submit line."""
    line, folder = _shown(job.get("submit_line")), _shown(job.get("current_working_directory"))
    return command_key(_text(job, "user_name"), line, folder)


def _text(job: Mapping[str, Any], key: str) -> str:
    value = job.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return valid_unicode(value or "")


def address(
    job_id: int, array_id: int | None, task_id: int | None, tasks: str, het_id: int | None, het_offset: int | None
) -> str:
    """What `scontrol update jobid=` takes for one record and no other.

    A bare number names all parts of a heterogeneous job and all tasks of an array. That is what is wanted of an array's
    common record, unless some of its tasks have records of their own: then `tasks` lists the ones in common. 22.05
    does not take the step of "0-8:2", so that it is written out.
    """
    if array_id is not None and task_id is not None:
        return f"{array_id}_{task_id}"
    if array_id is not None:
        listed = _task_list(tasks.split("%")[0])
        return f"{array_id}_[{listed}]" if listed else str(array_id)
    if het_id is not None:
        return f"{het_id}+{het_offset}"
    return str(job_id)


def _task_list(tasks: str) -> str:
    """ "1-3,8-12:2" as "1-3,8,10,12"; "" where it is cut short or too long."""
    parts = tasks.split(",")
    if len(tasks) > MAX_TASK_LIST or not all(_TASKS.fullmatch(part) for part in parts):
        return ""
    listed = ",".join(_written_out(part) for part in parts)
    return listed if len(listed) <= MAX_TASK_LIST else ""


def task_count(tasks: str, most: int) -> int:
    """How many tasks "1-3,8-12:2%4" lists, at most `most` (0: no limit); 1 where none can be read.

    Slurm cuts a long list short ("1-3,5,..."): what it still shows is counted.
    """
    found = 0
    for part in tasks[:MAX_TASK_LIST].split("%")[0].split(","):
        if _TASKS.fullmatch(part) and len(part) <= MAX_TASK_TEXT:
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            found += max(0, int(last or first) - int(first)) // max(1, int(step or 1)) + 1
    found = max(1, found)
    return min(found, most) if most > 0 else found


def has_task(tasks: str, task: int) -> bool:
    """Whether "1-3,8-12:2%4" lists a task. Slurm cuts a long list short ("1-3,..."): what is not shown may be in it."""
    listed = tasks.split("%")[0]
    if "..." in listed:
        return True
    parts = [part for part in listed.split(",") if _TASKS.fullmatch(part) and len(part) <= MAX_TASK_TEXT]
    for part in parts:
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if int(first) <= task <= int(last or first) and (task - int(first)) % max(1, int(step or 1)) == 0:
            return True
    return False


def _written_out(part: str) -> str:
    span, colon, step = part.partition(":")
    if not colon:
        return part
    first, last = map(int, span.split("-"))
    return ",".join(map(str, range(first, min(last, first + MAX_TASK_LIST) + 1, max(int(step), 1))))


def nodes_of(found: list[Mapping[str, Any]]) -> list[Node]:
    """Nodes of `sinfo --json` (22.05) or `scontrol show nodes --json`, by name."""
    return sorted(_nodes(found), key=lambda node: node.name)


def _nodes(found: list[Mapping[str, Any]]) -> Iterator[Node]:
    for node in found:
        state, flags = words(node.get("state")), words(node.get("state_flags"))
        is_known = state is not None and flags is not None
        yield Node(
            name=_shown(node.get("name")),
            states=without_fulfilled(
                {flag.upper() for flag in (*(state or ()), *(flags or ()))} if is_known else UNKNOWN
            ),
            features=_words(node.get("features")),
            gres=_shown(node.get("gres")),
            partitions=_words(node.get("partitions")),
            reason=_shown(node.get("reason")),
            cpu_count=number(node.get("cpus")) or 0,
            last_busy_s=number(node.get("last_busy")) or None,
            boot_s=number(node.get("boot_time")) or None,
            reservation=_shown(node.get("reservation")),
            gres_used=_shown(node.get("gres_used")),
        )


def _shown(value: Any) -> str:
    return valid_unicode(str(value or ""))


def _words(value: Any) -> tuple[str, ...]:
    """ "a,b" on 22.05, later ["a", "b"]; () where it is neither."""
    listed = words(value.split(",") if isinstance(value, str) else value)
    return tuple(word for word in listed or () if word)
