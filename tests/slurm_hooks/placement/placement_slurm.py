"""A Slurm that knows what placement asks of it, as 22.05 to 26.05 answer; all else is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from almanac.actions_config import Placement
from almanac.errors import CommandError
from almanac.records import Counts
from slurm_hooks.placement.log import PlacementLog
from slurm_hooks.placement.moves import Move, plan_moves
from slurm_hooks.placement.plan import PlacementPlan, plan_placement
from slurm_hooks.placement.run import PlacementActor, PlacementOutcome, read_terms, read_view
from slurm_hooks.placement.state import RunTime, cluster_of
from telemetry.slurm.backend import Node
from telemetry.slurm.commands import Done
from telemetry.slurm.placement_queue import QueueJob, read_queue

NOW_S = 1_795_464_000
SETTINGS = Placement(mode="apply", partitions=("gpu",), types=("a100", "h100"), requeue=True)
GRES = Placement(mode="apply", partitions=("gpu",), types=("a100", "h100"), select_by="gres")
SCRIPT = "#!/bin/sh\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@30\nsleep 9\n"
LINE = "sbatch --gres=gpu:1 run.sh"
_UPDATE = re.compile(r"update jobid=([0-9]+) (Features|TresPer(?:Job|Node|Task))=([^ ]*)")


class Killed(BaseException):
    """kill -9 of the process that uses this Slurm."""


@dataclass
class Job:
    job_id: int
    features: str = "[a100|h100]"
    comment: str = "almanac:any-gpu"
    user: str = "ann"
    state: str = "PENDING"
    reason: str = "Resources"
    priority: int = 100
    submit_s: int = NOW_S - 7200
    accounted_s: int | None = None
    start_s: int = 0
    restarts: int = 0
    partition: str = "gpu"
    gpus: int = 1
    nodes: str = ""
    limit_min: int = 1440
    requeue: bool = True
    request: dict[str, str] = field(default_factory=dict)
    script: str = SCRIPT
    line: str = LINE
    more: dict[str, Any] = field(default_factory=dict)

    def record(self, is_old: bool) -> dict[str, Any]:
        def number(value: int | None) -> Any:
            return value if is_old else {"set": value is not None, "infinite": False, "number": value or 0}

        request = self.request or {"tres_per_node": f"gres:gpu:{self.gpus}" if is_old else f"gres/gpu:{self.gpus}"}
        return {
            "job_id": self.job_id, "user_name": self.user, "comment": self.comment, "name": "x\nJobId=1",
            "job_state": self.state if is_old else [self.state], "state_reason": self.reason,
            "priority": number(self.priority), "submit_time": number(self.submit_s), "restart_cnt": self.restarts,
            "start_time": number(self.start_s), "partition": self.partition, "cluster": "lab", "node_count": number(1),
            "cpus": number(1), "memory_per_cpu": number(100), "features": self.features, "required_nodes": "",
            "excluded_nodes": "", "shared": None if is_old else [], "array_job_id": number(0),
            "array_task_id": number(None), "het_job_id": number(0), "time_limit": number(self.limit_min),
            "tres_req_str": f"cpu=1,gres/gpu={self.gpus}", "nodes": self.nodes, "requeue": self.requeue,
            "batch_flag": True, "dependency": "", "resv_name": "", "licenses": "",
            "gres_detail": [f"gpu:gpu:{self.gpus}(IDX:0)"] if self.nodes else [], **request, **self.more,
        }  # fmt: skip


@dataclass
class FakeSlurm:
    """nodes: name to (feature, GPUs). before: called before each command, to change the world or raise Killed.

    bad: features that no node satisfies: such a job is held with BadConstraints, also after it gets other features,
    until it is released. keeps_bad: it stays held after that, too.
    """

    jobs: dict[int, Job]
    nodes: dict[str, tuple[str, int]] = field(default_factory=lambda: {"n1": ("a100", 2), "n2": ("h100", 2)})
    sent: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda command: None
    is_old: bool = False
    is_deaf: bool = False
    is_gone: bool = False
    refuses_requeue: bool = False
    bad: set[str] = field(default_factory=set)
    keeps_bad: bool = False
    by_gres: bool = False
    states: frozenset[str] = frozenset({"MIXED"})
    now_s: float = NOW_S
    answer: bytes | None = None
    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def release(self) -> str:
        return "22.05.8" if self.is_old else "24.11.5"

    def configuration(self) -> str:
        return "JobFileAppend           = 0\n"

    def nodes_now(self) -> list[Node]:
        found = []
        for name, (kind, total) in self.nodes.items():
            used = sum(job.gpus for job in self.jobs.values() if job.nodes == name)
            gres = kind if self.by_gres else "gpu"
            partitions = self.partitions.get(name, ("gpu", "all"))
            total_text, used_text = f"gpu:{gres}:{total}", f"gpu:{gres}:{used}(IDX:N/A)"
            found.append(Node(name, self.states, ("gpu", kind), total_text, partitions, gres_used=used_text))
        return found

    def _check(self, command: str) -> None:
        self.before(command)
        if self.is_gone:
            raise CommandError("lost the connection to slurmctld", "check it")

    def __call__(self, argv: Sequence[str]) -> bytes:
        command = " ".join(argv)
        self._check(command)
        if match := re.fullmatch(r"squeue -a --json(?: -j ([0-9,]+))?", command):
            if self.answer is not None:
                return self.answer
            asked = set(map(int, match[1].split(","))) if match[1] else self.jobs.keys()
            if len(asked) == 1 and not asked & self.jobs.keys():
                raise CommandError("squeue failed with exit code 1: slurm_load_jobs error: Invalid job id specified")
            jobs = [job for job in self.jobs.values() if self.is_old or job.job_id in asked]
            return json.dumps({"jobs": [job.record(self.is_old) for job in jobs]}).encode()
        if match := re.fullmatch(r"sacct -j ([0-9]+) -nPX -o Submit,SubmitLine", command):
            job = self.jobs[int(match[1])]
            return f"{job.accounted_s or job.submit_s}|{job.line}\n".encode()
        raise AssertionError(f"unknown command: {command}")

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done:
        command = " ".join(argv)
        self._check(command)
        number = int(re.findall(r"[0-9]{2,}", command)[0])
        job = self.jobs[number]
        if command == f"scontrol write batch_script {number} -":
            return Done(0, job.script.encode(), b"")
        self.sent.append(command)
        if argv[0] == "scancel":
            assert argv[1].startswith("--signal=")
            assert "KILL" not in command
            return Done(0, b"", b"")
        if command == f"scontrol requeue {number}" and self.refuses_requeue:
            return Done(1, b"", b"Requested operation is presently disabled\n")
        if command == f"scontrol requeue {number}":
            job.state, job.reason, job.nodes, job.restarts = "PENDING", "BeginTime", "", job.restarts + 1
            job.submit_s = int(self.now_s)
            return Done(0, b"", b"")
        if argv[:2] == ["scontrol", "update"]:
            return Done(*self._update(command.removeprefix("scontrol ")))
        raise AssertionError(f"unknown command: {command}")

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        assert list(argv) == ["scontrol"], argv
        said = b""
        for line in stdin.decode("ascii").splitlines():
            self._check(line)
            self.sent.append(line)
            said += self._update(line)[2]
        return Done(0, b"", said)

    def _update(self, line: str) -> tuple[int, bytes, bytes]:
        if match := re.fullmatch(r"release ([0-9]+)", line):
            job = self.jobs[int(match[1])]
            if not self.keeps_bad and job.features not in self.bad:
                job.priority, job.reason = 100, "Priority"
            return 0, b"", b""
        match = _UPDATE.fullmatch(line)
        if match is None:
            raise AssertionError(f"unknown command: {line}")
        job = self.jobs[int(match[1])]
        if job.state != "PENDING":
            return 1, b"", f"Job is no longer pending execution for job {job.job_id}\n".encode()
        if self.is_deaf:
            return 1, b"", b"Access/permission denied\n"
        if match[2] == "Features":
            job.features = match[3]
            if job.features in self.bad:
                job.priority, job.reason = 0, "BadConstraints"
        else:
            key = {"TresPerJob": "tres_per_job", "TresPerNode": "tres_per_node", "TresPerTask": "tres_per_task"}
            job.request = {**job.request, key[match[2]]: match[3]}
        return 0, b"", b""


class FakeBackend:
    def __init__(self, slurm: FakeSlurm) -> None:
        self.slurm = slurm

    def release(self) -> str:
        return self.slurm.release()

    def nodes(self) -> list[Node]:
        self.slurm._check("nodes")
        return self.slurm.nodes_now()


def speeds_of(**run_s: float) -> Callable[[Sequence[QueueJob], Sequence[str]], Mapping[int, Sequence[RunTime]]]:
    """The same run times for every job; within 5%."""

    def speeds(jobs: Sequence[QueueJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        found = [
            RunTime(name, value, value * 0.95, value * 1.05, value * 1.05)
            for name, value in run_s.items()
            if name in types
        ]
        return {job.job_id: found for job in jobs}

    return speeds


@dataclass
class Run:
    """`almanac place apply` on a fake Slurm."""

    slurm: FakeSlurm
    folder: Path
    settings: Placement = SETTINGS
    speeds: Any = field(default_factory=lambda: speeds_of(a100=7200, h100=3600))
    why: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> PlacementLog:
        return PlacementLog(self.folder / "actions")

    @property
    def kinds(self) -> list[str]:
        return [line.what for line in self.log.read(int(self.slurm.now_s))]

    def jobs(self) -> tuple[QueueJob, ...]:
        return read_queue(self.slurm, "lab")[0]

    def plan(self, is_clearing: bool = False) -> tuple[PlacementPlan, tuple[Move, ...]]:
        now_s, slurm = int(self.slurm.now_s), self.slurm
        cluster = cluster_of(read_view(FakeBackend(slurm), slurm, "lab", slurm.clock), self.settings)
        history = self.log.history("lab", now_s)
        made = plan_placement(cluster, history, self.speeds, now_s, is_clearing)
        self.why = dict(made.counts.dropped)
        if is_clearing or not self.settings.requeue or made.fault is not None:
            return made, ()
        counts = Counts()
        moves = plan_moves(
            cluster,
            history,
            self.speeds,
            made,
            lambda job: read_terms(slurm, job, slurm.configuration()),
            now_s,
            counts,
        )
        self.why |= dict(counts.dropped)
        return made, moves

    def act(self, made: PlacementPlan, moves: Sequence[Move] = ()) -> PlacementOutcome:
        slurm, backend = self.slurm, FakeBackend(self.slurm)
        actor = PlacementActor(slurm, backend, self.log, "lab", self.settings, slurm.clock, slurm.sleep)
        return actor.apply(made, moves)

    def __call__(self, is_clearing: bool = False) -> PlacementOutcome:
        """Raises what kept the speeds from being read at the end, as the command does."""
        made, moves = self.plan(is_clearing)
        outcome = self.act(made, moves)
        if made.fault is not None:
            raise made.fault
        return outcome
