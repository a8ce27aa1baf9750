"""A Slurm that knows squeue, scontrol and what 24.11 and 26.05 do with a pending job's GRES; all else is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from almanac.errors import CommandError
from telemetry.slurm.backend import Reservation
from telemetry.slurm.commands import Done

NOW_S = 1_795_464_000
FIELDS = {"TresPerJob": "tres_per_job", "TresPerNode": "tres_per_node", "TresPerTask": "tres_per_task"}
_UPDATE = re.compile(r"update jobid=([0-9_]+) (TresPer(?:Job|Node|Task))=([\w.+:/=,-]+)")
_RELEASE = re.compile(r"release ([0-9_]+)")


class Killed(BaseException):
    """kill -9 of the process that uses this Slurm."""


def number(value: int | None) -> dict[str, Any]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


@dataclass
class Job:
    job_id: int
    requests: dict[str, str]
    user: str = "ann"
    comment: str = "almanac:larger"
    state: str = "PENDING"
    reason: str = "Resources"
    priority: int = 100
    submit_s: int = NOW_S - 600
    restarts: int = 0
    partition: str = "all"
    more: dict[str, Any] = field(default_factory=dict)
    text_before: dict[str, str] = field(default_factory=dict)

    @property
    def types(self) -> list[tuple[str, int]]:
        found = []
        for text in self.requests.values():
            for kind, count in re.findall(r"gpu(?:[:/]([\w.+-]*[a-z][\w.+-]*))?(?:[:=]([0-9]+))?(?=,|$)", text):
                found.append((kind, int(count or 1)))
        return found

    def record(self) -> dict[str, Any]:
        base = {
            "job_id": self.job_id, "user_name": self.user, "comment": self.comment, "job_state": [self.state],
            "state_reason": self.reason, "priority": number(self.priority), "submit_time": number(self.submit_s),
            "restart_cnt": self.restarts, "partition": self.partition, "cluster": "lab", "node_count": number(1),
            "cpus": number(1), "memory_per_cpu": number(100), "memory_per_node": number(None), "features": "",
            "required_nodes": "", "excluded_nodes": "", "shared": [], "array_job_id": number(0),
            "array_task_id": number(None), "het_job_id": number(0), "time_limit": number(60),
            "eligible_time": number(self.submit_s), "tres_req_str": "cpu=1,gres/gpu=1" if self.types else "cpu=1",
            "tres_per_job": "", "tres_per_node": "", "tres_per_task": "", "tres_per_socket": "", "resv_name": "",
            "name": "x\nJobId=1", "cron": "", "licenses": "",
        }  # fmt: skip
        return {**base, **{FIELDS.get(key, key): text for key, text in self.requests.items()}, **self.more}


@dataclass
class FakeNode:
    name: str
    gres: dict[str, int]
    used: dict[str, int] = field(default_factory=dict)
    states: tuple[str, ...] = ("MIXED",)
    partitions: tuple[str, ...] = ("all",)
    features: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        used = ",".join(f"gpu:{kind}:{self.used.get(kind, 0)}(IDX:N/A)" for kind in self.gres)
        return {
            "name": self.name, "state": list(self.states), "features": list(self.features),
            "partitions": list(self.partitions), "gres": ",".join(f"gpu:{k}:{n}(S:0-1)" for k, n in self.gres.items()),
            "gres_used": used, "reservation": "", "cpus": 32, "effective_cpus": 32, "alloc_cpus": 0,
            "real_memory": 64000, "alloc_memory": 0, "reason": "", **self.more,
        }  # fmt: skip


@dataclass
class FakeSlurm:
    """limits: types that no job may hold. before: called before each command, to change the world or raise Killed."""

    jobs: dict[int, Job]
    nodes: list[FakeNode]
    limits: set[str] = field(default_factory=set)
    sent: list[tuple[int, str]] = field(default_factory=list)
    before: Callable[[str], None] = lambda command: None
    is_scheduling: bool = True
    is_deaf: bool = False
    now_s: float = NOW_S

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.schedule()

    def release(self) -> str:
        return "24.11.5"

    def reservations(self) -> list[Reservation]:
        return []

    def __call__(self, argv: Sequence[str]) -> bytes:
        command = " ".join(argv)
        self.before(command)
        if match := re.fullmatch(r"squeue -a -t PENDING --json(?: -j ([0-9,]+))?", command):
            asked = set(map(int, match[1].split(","))) if match[1] else self.jobs.keys()
            if len(asked) == 1 and not asked & self.jobs.keys():
                raise CommandError("squeue failed with exit code 1: slurm_load_jobs error: Invalid job id specified")
            return json.dumps({"jobs": [job.record() for job in self.jobs.values() if job.job_id in asked]}).encode()
        if command == "scontrol show nodes --json":
            return json.dumps({"nodes": [node.record() for node in self.nodes]}).encode()
        raise AssertionError(f"unknown command: {command}")

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        if list(argv) != ["scontrol"]:
            raise AssertionError(f"unknown command: {argv}")
        said = []
        for line in stdin.decode("ascii").splitlines():
            self.before(line)
            said += self._one(line)
        self.schedule()
        return Done(0, b"", "".join(f"{line}\n" for line in said).encode())

    def _one(self, line: str) -> list[str]:
        if match := _RELEASE.fullmatch(line):
            if int(match[1]) not in self.jobs:
                return [f"Invalid job id specified for job {match[1]}"]
            job = self.jobs[int(match[1])]
            self.sent.append((job.job_id, line))
            assert job.reason == "BadConstraints", "only a job that Slurm gave up is ever released"
            job.priority, job.reason = 100, "None"
            return []
        match = _UPDATE.fullmatch(line)
        if match is None:
            raise AssertionError(f"unknown command: {line}")
        if int(match[1]) not in self.jobs:
            return [f"Invalid job id specified for job {match[1]}"]
        job = self.jobs[int(match[1])]
        self.sent.append((job.job_id, line))
        if job.state != "PENDING":
            return [f"Job is no longer pending execution for job {job.job_id}"]
        if not self.is_deaf:
            self.set_request(job, match[2], match[3])
        return []

    def set_request(self, job: Job, key: str, text: str) -> None:
        """As scontrol update by anybody: another option's key is added to the request."""
        job.requests = {**job.requests, key: text}
        if job.reason in ("BadConstraints", "QOSMaxGRESPerUser"):
            job.reason, job.priority = "None", max(job.priority, 100)

    def schedule(self) -> None:
        """What a pass of the scheduler makes of the pending jobs, highest priority first."""
        if not self.is_scheduling:
            return
        for job in sorted(self.jobs.values(), key=lambda job: (-job.priority, job.job_id)):
            if job.state != "PENDING" or job.reason in ("JobHeldUser", "Dependency", "BeginTime") or not job.types:
                continue
            self._schedule_one(job)

    def _schedule_one(self, job: Job) -> None:
        (kind, count), is_one = job.types[0], len(job.types) == 1
        homes = [node for node in self.nodes if kind in node.gres or not kind]
        if not is_one or not homes:
            job.reason, job.priority = "BadConstraints", 0
        elif kind in self.limits:
            job.reason = "QOSMaxGRESPerUser"
        elif job.reason != "BadConstraints":
            job.reason = "Resources"
            for node in homes:
                name = kind or next(iter(node.gres), "")
                is_up = set(node.states) <= {"IDLE", "MIXED"} and job.partition in node.partitions
                if is_up and node.gres.get(name, 0) - node.used.get(name, 0) >= count:
                    node.used[name] = node.used.get(name, 0) + count
                    job.state, job.reason = "RUNNING", "None"
                    return
