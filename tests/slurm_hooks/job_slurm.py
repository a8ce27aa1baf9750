"""A Slurm that knows what the planners of job changes ask of it, as 22.05 to 26.05 answer; all else is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from almanac.actions_config import MigRaise, PlacementSection
from almanac.errors import CommandError
from almanac.records import Counts, JobRequest, PriorityAdvice
from slurm.backend import CommandBackend, Reservation
from slurm.commands import Done
from slurm.queue import read_queue
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.engine import JobEngine, JobOutcome, JobPlan
from slurm_hooks.jobs.log import JobLog
from slurm_hooks.mig.raise_plan import plan_raises, read_state, why_unsound
from slurm_hooks.priority.reprioritize import SiteFactorEngine, plan_site_factors
from slurm_hooks.types.decide import RunTime, cluster_of
from slurm_hooks.types.plan import plan_moves, plan_placement
from slurm_hooks.types.run import PlacementEngine, read_terms, read_view

NOW_S = 1_795_464_000
SETTINGS = PlacementSection(mode="apply", partitions=("gpu",), types=("a100", "h100"), requeue=True)
SCRIPT = "#!/bin/sh\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@30\nsleep 9\n"
SMALL, LARGE = "1g.10gb", "3g.40gb"
FIELDS = {
    "TresPerJob": "tres_per_job", "TresPerNode": "tres_per_node", "TresPerTask": "tres_per_task",
    "TresPerSocket": "tres_per_socket",
}  # fmt: skip
_KEY = r"(Features|(?i:SiteFactor)|TresPer(?:Job|Node|Task))"
_UPDATE = re.compile(rf"update jobid=([0-9_\[\]-]+) {_KEY}=([^ ]*)")


class Killed(BaseException):
    """kill -9 of the process that uses this Slurm."""


@dataclass
class Job:
    """requests: by scontrol's name. site_factor: None if Slurm does not rank the job."""

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
    requests: dict[str, str] = field(default_factory=dict)
    script: str = SCRIPT
    line: str = "sbatch --gres=gpu:1 run.sh"
    name: str = "x\nJobId=1"
    site_factor: int | None = 0
    has_own_priority: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> list[tuple[str, int]]:
        found = []
        for text in self.requests.values():
            for kind, count in re.findall(r"gpu(?:[:/]([\w.+-]*[a-z][\w.+-]*))?(?:[:=]([0-9]+))?(?=,|$)", text):
                found.append((kind, int(count or 1)))
        return found

    def record(self, is_old: bool) -> dict[str, Any]:
        def number(value: int | None) -> Any:
            return value if is_old else {"set": value is not None, "infinite": False, "number": value or 0}

        whole = {"TresPerNode": f"gres:gpu:{self.gpus}" if is_old else f"gres/gpu:{self.gpus}"} if self.gpus else {}
        requests = {FIELDS[key]: text for key, text in (self.requests or whole).items()}
        return {
            "job_id": self.job_id, "user_name": self.user, "comment": self.comment, "name": self.name,
            "job_state": self.state if is_old else [self.state], "state_reason": self.reason,
            "priority": number(self.priority), "submit_time": number(self.submit_s), "restart_cnt": self.restarts,
            "start_time": number(self.start_s), "partition": self.partition, "cluster": "lab", "node_count": number(1),
            "cpus": number(1), "memory_per_cpu": number(100), "memory_per_node": number(None),
            "features": self.features, "required_nodes": "", "excluded_nodes": "", "shared": None if is_old else [],
            "array_job_id": number(0), "array_task_id": number(None), "het_job_id": number(0),
            "time_limit": number(self.limit_min), "eligible_time": number(self.submit_s),
            "tres_req_str": f"cpu=1,gres/gpu={self.gpus}" if self.gpus else "cpu=1", "nodes": self.nodes,
            "requeue": self.requeue, "batch_flag": True, "dependency": "", "resv_name": "", "licenses": "", "cron": "",
            "gres_detail": [f"gpu:gpu:{self.gpus}(IDX:0)"] if self.nodes else [], **requests, **self.more,
        }  # fmt: skip


@dataclass
class FakeNode:
    """gres: GPUs by type. used: those in use; jobs on the node are added."""

    name: str
    gres: dict[str, int]
    used: dict[str, int] = field(default_factory=dict)
    states: tuple[str, ...] = ("MIXED",)
    partitions: tuple[str, ...] = ("all",)
    features: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def record(self, jobs: Iterable[Job], is_old: bool) -> dict[str, Any]:
        own = sum(job.gpus for job in jobs if job.nodes == self.name)
        used = ",".join(f"gpu:{kind}:{self.used.get(kind, 0) + own}(IDX:N/A)" for kind in self.gres)
        states = {"state": self.states[0].lower() if self.states else None, "state_flags": list(self.states[1:])}
        return {
            "name": self.name, **(states if is_old else {"state": list(self.states)}),
            "features": ",".join(self.features) if is_old else list(self.features), "partitions": list(self.partitions),
            "gres": ",".join(f"gpu:{kind}:{count}(S:0-1)" for kind, count in self.gres.items()), "gres_used": used,
            "reservation": "", "cpus": 32, "effective_cpus": 32, "alloc_cpus": 0, "real_memory": 64000,
            "alloc_memory": 0, "reason": "", **self.more,
        }  # fmt: skip


def of_types(**count_of: int) -> list[FakeNode]:
    """A node for each type that is asked for by a feature."""
    return [
        FakeNode(f"n{number}", {"gpu": count}, partitions=("gpu", "all"), features=("gpu", kind))
        for number, (kind, count) in enumerate(count_of.items(), 1)
    ]


def sliced(large: int = 1) -> list[FakeNode]:
    """A node whose small slices are all busy, and one with idle large ones."""
    return [FakeNode("n1", {SMALL: 7}, {SMALL: 7}), FakeNode("n2", {LARGE: large}, states=("IDLE",))]


@dataclass
class FakeSlurm:
    """before: called before each command, and each line to scontrol, to change the world or raise Killed.

    bad: features that no node satisfies: such a job is held with BadConstraints, also after it gets other features,
    until it is released. keeps_bad: it stays held after that, too. limits: GPU types that no job may hold.
    is_deaf: takes no change; deaf_to: of these jobs, without a word. says: answers to changes of jobs, which are not
    made then.
    """

    jobs: dict[int, Job]
    nodes: list[FakeNode] = field(default_factory=lambda: of_types(a100=2, h100=2))
    sent: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda command: None
    is_old: bool = False
    is_deaf: bool = False
    deaf_to: set[int] = field(default_factory=set)
    says: dict[int, str] = field(default_factory=dict)
    is_gone: bool = False
    refuses_requeue: bool = False
    is_scheduling: bool = False
    bad: set[str] = field(default_factory=set)
    keeps_bad: bool = False
    limits: set[str] = field(default_factory=set)
    reserved: list[Reservation] = field(default_factory=list)
    answer: bytes | None = None
    now_s: float = NOW_S

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.schedule()

    def _check(self, command: str) -> None:
        self.before(command)
        if self.is_gone:
            raise CommandError("lost the connection to slurmctld", "check it")

    def __call__(self, argv: Sequence[str]) -> bytes:
        command = " ".join(argv)
        if command == "scontrol show config":
            release = "22.05.8" if self.is_old else "24.11.5"
            return f"ClusterName = lab\nSLURM_VERSION = {release}\nJobFileAppend = 0\n".encode()
        self._check(command)
        if match := re.fullmatch(r"squeue -a --json(?: -j ([0-9,]+))?", command):
            asked = set(map(int, match[1].split(","))) if match[1] else self.jobs.keys()
            if len(asked) == 1 and not asked & self.jobs.keys():
                raise CommandError("squeue failed with exit code 1: slurm_load_jobs error: Invalid job id specified")
            jobs = [job for job in self.jobs.values() if self.is_old or job.job_id in asked]
            return self.answer or json.dumps({"jobs": [job.record(self.is_old) for job in jobs]}).encode()
        if argv[0] == "sprio":
            ranked = [job for job in self.jobs.values() if job.site_factor is not None and job.priority]
            rows = [
                f"{job.job_id}|7|0|0|0|0|0|0|0|0|" if job.has_own_priority
                else f"{job.job_id}|{job.priority}|{job.site_factor}|1|0|0|0|0|0|0|"
                for job in ranked if job.state == "PENDING"
            ]  # fmt: skip
            return "".join(f"{row}\n" for row in rows).encode()
        if command == "scontrol show nodes --json" and self.is_old:
            raise CommandError("scontrol: unrecognized option '--json'")
        if command in ("scontrol show nodes --json", "sinfo --json"):
            return json.dumps({"nodes": [node.record(self.jobs.values(), self.is_old) for node in self.nodes]}).encode()
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
        if argv[0] == "scancel" and argv[1] == "--state=RUNNING":
            is_its = argv[2:] == [f"--user={job.user}", str(number)] and job.state == "RUNNING"
            job.state = "CANCELLED" if is_its and not self.is_deaf else job.state
            return Done(0, b"", b"")
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
            said = self._update(command.removeprefix("scontrol "))
            return Done(int(bool(said)), b"", said.encode())
        raise AssertionError(f"unknown command: {command}")

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        assert list(argv) == ["scontrol"], argv
        said = ""
        for line in stdin.decode("ascii").splitlines():
            self._check(line)
            self.sent.append(line)
            said += self._update(line)
        self.schedule()
        return Done(0, b"", said.encode())

    def _update(self, line: str) -> str:
        match = re.fullmatch(r"release ([0-9_]+)", line) or _UPDATE.fullmatch(line)
        assert match, f"unknown command: {line}"
        number = match[1].split("_")[0]
        found = [job for job in self.jobs.values() if match[1] in (str(job.job_id), job.more.get("address"))]
        if not found:
            return f"Invalid job id specified for job {number}\n"
        [job] = found
        if line.startswith("release"):
            assert job.reason == "BadConstraints", "only a job that Slurm gave up is ever released"
            if not self.keeps_bad and job.features not in self.bad:
                job.priority, job.reason = 100, "Priority"
            return ""
        if job.state != "PENDING":
            return f"Job is no longer pending execution for job {job.job_id}\n"
        if self.is_deaf or job.job_id in self.says:
            return f"{self.says.get(job.job_id, 'Access/permission denied')} for job {match[1]}\n"
        if job.job_id not in self.deaf_to:
            self.change(job, match[2], match[3])
        return ""

    def change(self, job: Job, key: str, text: str) -> None:
        """As scontrol update by anybody: another option's key is added to the request."""
        if key.lower() == "sitefactor":
            job.site_factor = int(text)
        elif key == "Features":
            job.features = text
            if text in self.bad:
                job.priority, job.reason = 0, "BadConstraints"
        else:
            job.requests = {**job.requests, key: text}
            if self.is_scheduling and job.reason in ("BadConstraints", "QOSMaxGRESPerUser"):
                job.reason, job.priority = "None", max(job.priority, 100)

    def schedule(self) -> None:
        """Schedule the pending jobs once, highest priority first."""
        for job in sorted(self.jobs.values(), key=lambda job: (-job.priority, job.job_id)):
            is_next = job.state == "PENDING" and job.reason not in ("JobHeldUser", "Dependency", "BeginTime")
            if self.is_scheduling and is_next and job.types:
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


def speeds_of(**run_s: float) -> Callable[[Sequence[QueuedJob], Sequence[str]], Mapping[int, Sequence[RunTime]]]:
    """The same run times for every job; within 5%."""

    def speeds(jobs: Sequence[QueuedJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        found = [
            RunTime(name, value, value * 0.95, value * 1.05, value * 1.05)
            for name, value in run_s.items()
            if name in types
        ]
        return {job.job_id: found for job in jobs}

    return speeds


def predicted(**by_name: int | None) -> Callable[[Sequence[JobRequest]], list[PriorityAdvice | None]]:
    """Predicts site factors by the job's name; 500 for any other."""

    def predict(requests: Sequence[JobRequest]) -> list[PriorityAdvice | None]:
        found = [by_name.get(request.job_name.replace("-", "_"), 500) for request in requests]
        return [None if each is None else PriorityAdvice(each, 3600.0, None, None) for each in found]

    return predict


@dataclass
class Run:
    """Runs of one planner on a fake Slurm, as its command does them."""

    slurm: FakeSlurm
    folder: Path
    planner: str = "place"
    settings: Any = SETTINGS
    speeds: Any = field(default_factory=lambda: speeds_of(a100=7200, h100=3600))
    predict: Any = field(default_factory=lambda: predicted())
    published: dict[int, set[int]] = field(default_factory=dict)
    least_change: float = 0.0
    relief_points: int = 0
    batch: int = 200
    why: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> JobLog:
        return JobLog(self.folder / "actions", self.planner)

    @property
    def kinds(self) -> list[str]:
        return [line.what for line in self.log.read("lab", int(self.slurm.now_s))]

    @property
    def story(self) -> list[str]:
        """With the restarts and the share of the work that is done, where there are some."""
        return [
            f"{line.what}: {line.reason}" + f" ({line.restarts}, {line.done:.3f})" * bool(line.restarts or line.done)
            for line in self.log.read("lab", int(self.slurm.now_s))
        ]

    def lines(self) -> list[dict[str, Any]]:
        paths = sorted(self.log.folder.glob("*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def jobs(self) -> tuple[QueuedJob, ...]:
        return read_queue(self.slurm, "lab").jobs  # type: ignore[arg-type]

    def plan(self, is_clearing: bool = False) -> JobPlan:
        made = self._plan(is_clearing)
        self.why = dict(made.counts.dropped) | (dict(made.running.dropped) if made.running else {})
        is_whole = made.counts.seen == made.counts.kept + made.counts.dropped.total()
        assert is_whole or is_clearing or self.planner == "mig-raise"
        return made

    def _plan(self, is_clearing: bool) -> JobPlan:
        slurm: Any = self.slurm
        now_s, backend = int(slurm.now_s), CommandBackend(slurm)
        history = self.log.history("lab", now_s)
        if self.planner == "reprioritize":
            published = self.published
            return plan_site_factors(
                backend, history, self.predict, lambda job, value: value in published.get(job.job_id, set()), now_s,
                "20261121T000000Z", is_clearing, self.least_change, self.relief_points,
            )  # fmt: skip
        if self.planner == "mig-raise":
            return plan_raises(read_state(slurm, "lab", slurm.reserved), history, self.settings, now_s, is_clearing)
        cluster = cluster_of(read_view(backend, slurm, "lab", slurm.clock), self.settings)
        made = plan_placement(cluster, history, self.speeds, now_s, is_clearing)
        if is_clearing or not self.settings.requeue or made.fault is not None:
            return made
        terms, running = (lambda job: read_terms(slurm, job, backend.settings())), Counts()
        moves = plan_moves(cluster, history, self.speeds, made, terms, now_s, running)
        return replace(made, requeues=moves, running=running)

    def act(self, made: JobPlan) -> JobOutcome:
        slurm: Any = self.slurm
        common = {
            "commands": slurm, "log": self.log, "cluster": "lab", "clock": slurm.clock, "sleep": slurm.sleep,
        }  # fmt: skip
        if self.planner == "reprioritize":
            engine: JobEngine = SiteFactorEngine(**common, backend=CommandBackend(slurm), batch=self.batch)
        elif self.planner == "mig-raise":
            engine = JobEngine(**common, why_undo=why_unsound, look_s=2.0)
        else:
            engine = PlacementEngine(**common, backend=CommandBackend(slurm), settings=self.settings, look_s=2.0)
        return engine.apply(made)

    def __call__(self, is_clearing: bool = False) -> JobOutcome:
        """Raises what kept the speeds from being read at the end, as the command does."""
        made = self.plan(is_clearing)
        outcome = self.act(made)
        if made.fault is not None:
            raise made.fault
        return outcome


def slice_job(number: int = 1, key: str = "TresPerJob", text: str = "", **values: Any) -> Job:
    """A pending job of one small slice, whose owner opted in."""
    request = {key: text or f"gres/gpu:{SMALL}{'=' if key == 'TresPerTask' else ':'}1"}
    common = {
        "requests": request, "features": "", "comment": "almanac:larger", "partition": "all",
        "submit_s": NOW_S - 600, "limit_min": 60,
    }  # fmt: skip
    return Job(number, **{**common, **values})


def start(folder: Path, *jobs: Job, **values: Any) -> Run:
    """A site that places jobs."""
    return Run(FakeSlurm({job.job_id: job for job in jobs}, **values), folder)


def start_raising(folder: Path, *jobs: Job, **values: Any) -> Run:
    """A site that raises jobs of slices, with a scheduler."""
    slurm = FakeSlurm({job.job_id: job for job in jobs}, **{"nodes": sliced(), "is_scheduling": True, **values})
    return Run(slurm, folder, "mig-raise", MigRaise(mode="apply"))


def start_ranking(folder: Path, *jobs: Job, **values: Any) -> Run:
    """A site that sets site factors."""
    return Run(FakeSlurm({job.job_id: job for job in jobs}, **values), folder, "reprioritize")
