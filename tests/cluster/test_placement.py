"""Placements and a requeue on a running Slurm, by node features, and by GRES types where the release allows it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from processes import wait_until
from site_commands import SiteCommands
from sites import HOSTS, Site

from almanac.actions_config import PlacementSection
from almanac.errors import ConfigError
from almanac.records import Counts
from slurm.backend import CommandBackend
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.engine import JobOutcome
from slurm_hooks.jobs.log import JobLog
from slurm_hooks.types.decide import RunTime, cluster_of
from slurm_hooks.types.plan import Move, PlacementPlan, plan_moves, plan_placement
from slurm_hooks.types.run import PlacementEngine, read_terms, read_view, require_placement

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_hooks.types.plan.AGAIN_S", 0)


BY_FEATURE = PlacementSection(mode="apply", partitions=("all",), types=("hbm40g", "hbm80g"))
BY_GRES = replace(BY_FEATURE, types=("a100", "h100"), select_by="gres")
ANY, MOVABLE = "--comment=run 7, almanac:any-gpu", "--comment=almanac:any-gpu,almanac:movable"
SLEEP = "#!/bin/sh\nsleep 600\n"
CHECKPOINTING = r"""#!/bin/bash
#SBATCH --open-mode=append
trap 'echo checkpoint' USR1
echo "run ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME"
for i in $(seq 3000); do sleep 0.2; done
"""


@dataclass
class Almanac:
    """`almanac place` with run times of the test's. run_s: the same for every job."""

    site: Site
    folder: Path
    settings: PlacementSection
    run_s: Mapping[str, float]

    def __post_init__(self) -> None:
        self.commands = SiteCommands(self.site)
        self.backend = CommandBackend(self.commands)
        self.log = JobLog(self.folder / "actions", "place")
        self.cluster = self.backend.cluster()

    def speeds(self, jobs: Sequence[QueuedJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        return {job.job_id: [RunTime(name, *[self.run_s[name]] * 4) for name in types] for job in jobs}

    def plan(self, is_clearing: bool = False) -> PlacementPlan:
        view = read_view(self.backend, self.commands, self.cluster, time.time)
        now_s = int(time.time())
        history = self.log.history(self.cluster, now_s)
        return plan_placement(cluster_of(view, self.settings), history, self.speeds, now_s, is_clearing)

    def moves(self, made: PlacementPlan, later_s: int) -> tuple[tuple[Move, ...], Counts]:
        """As if the jobs had run for later_s more."""
        view = read_view(self.backend, self.commands, self.cluster, time.time)
        now_s, counts = int(time.time()), Counts()
        cluster, history = cluster_of(view, self.settings), self.log.history(self.cluster, now_s)
        told = self.backend.settings()
        moves = plan_moves(
            cluster,
            history,
            self.speeds,
            made,
            lambda job: read_terms(self.commands, job, told),
            now_s + later_s,
            counts,
        )
        return moves, counts

    def act(
        self, made: PlacementPlan, moves: Sequence[Move] = (), sleep: Callable[[float], None] = time.sleep
    ) -> JobOutcome:
        engine = PlacementEngine(
            commands=self.commands, log=self.log, cluster=self.cluster, clock=time.time, sleep=sleep,
            backend=self.backend, settings=self.settings,
        )  # fmt: skip
        return engine.apply(replace(made, requeues=moves))

    def __call__(self, is_clearing: bool = False) -> JobOutcome:
        return self.act(self.plan(is_clearing))


def _fill(site: Site, request: str, *options: str) -> list[int]:
    """bob's jobs hold two whole nodes."""
    jobs = [site.sbatch("bob", "-N1", f"--gres=gpu:{request}", "--mem=100", *options, script=SLEEP) for _ in range(2)]
    for job in jobs:
        site.wait_for(job, "RUNNING")
    return jobs


def _wait_for_reason(site: Site, *jobs: int) -> None:
    def is_ranked() -> bool:
        return all(site.job(job).get("Reason", "") in ("Resources", "Priority") for job in jobs)

    wait_until("jobs that wait for resources", is_ranked)


def _features(site: Site, job: int) -> str:
    return site.job(job)["Features"]


@pytest.mark.every_release
def test_jobs_are_placed_by_features(site: Site, tmp_path: Path) -> None:
    almanac = Almanac(site, tmp_path, BY_FEATURE, {"hbm40g": 600, "hbm80g": 500})
    _fill(site, "4", "-C", "hbm80g")
    ask = ("-C", "gpu&hbm80g", "--gres=gpu:1", "--mem=100")
    placed = site.sbatch("alice", *ask, ANY, script=SLEEP)
    silent = site.sbatch("alice", *ask, script=SLEEP)
    forged = site.sbatch("alice", *ask, "--comment=xalmanac:any-gpu", script=SLEEP)
    held = site.sbatch("alice", *ask, ANY, "-H", script=SLEEP)
    _wait_for_reason(site, placed, silent, forged)
    almanac()
    site.wait_for(placed, "RUNNING")
    assert _features(site, placed) == "gpu&hbm40g"
    assert site.job(placed)["NodeList"] in ("n1", "n2")
    assert [_features(site, job) for job in (silent, forged, held)] == ["gpu&hbm80g"] * 3

    # Placed, but others are first: it waits with the new type until undo.
    late = site.sbatch("alice", *ask, ANY, script=SLEEP)
    _wait_for_reason(site, late)
    made = almanac.plan()
    site.run("ctl", "root", "scancel", str(placed))
    _fill(site, "4", "-C", "hbm40g")
    assert almanac.act(made).waiting == 1
    assert _features(site, late) == "gpu&hbm40g"
    assert almanac(is_clearing=True).undone == 1
    assert _features(site, late) == "gpu&hbm80g"

    # The owner's own scontrol wins, for good.
    assert almanac.act(replace(made, read_s=time.time())).waiting == 1
    site.run("ctl", "alice", "scontrol", "update", f"jobid={late}", "features=gpu")
    assert almanac(is_clearing=True).undone == 0
    almanac()
    assert _features(site, late) == "gpu"
    lines = [line.what for line in almanac.log.read(almanac.cluster, int(time.time())) if line.job_id == late]
    assert lines == ["place", "placed", "undo", "undone", "place", "placed", "owner"]


@pytest.mark.every_release
def test_a_requeue_keeps_the_job_and_its_output(site: Site, tmp_path: Path) -> None:
    settings = replace(BY_FEATURE, requeue=True)
    almanac = Almanac(site, tmp_path, settings, {"hbm40g": 60_000, "hbm80g": 20_000})
    blocking = _fill(site, "4", "-C", "hbm80g")
    home = site.run("login", "alice", "sh", "-c", "cd && pwd").stdout.strip()
    options = ("-C", "[hbm40g|hbm80g]", "--gres=gpu:1", "--mem=100", "-t", "2-0", "--signal=B:USR1@2", MOVABLE)
    job = site.sbatch("alice", *options, "-o", f"{home}/%j.out", "--requeue", script=CHECKPOINTING)
    fixed = site.sbatch("alice", *options, "-o", f"{home}/%j.out", "--no-requeue", script=CHECKPOINTING)
    for each in (job, fixed):
        site.wait_for(each, "RUNNING")
        assert site.job(each)["NodeList"] in ("n1", "n2")
    submit_line = ("sacct", "-j", str(job), "-nPX", "-o", "SubmitLine")
    wait_until("the submit line", lambda: bool(site.run("ctl", "root", *submit_line).stdout.strip()))
    site.run("ctl", "root", "scancel", *map(str, blocking))
    wait_until("free GPUs", lambda: not site.run("ctl", "root", "squeue", "-h", "-u", "bob").stdout.strip())

    assert almanac.moves(almanac.plan(), 0)[0] == (), "it started within an hour"
    made = almanac.plan()
    moves, counts = almanac.moves(made, 7200)
    assert [(move.job.job_id, move.line.gpu_type) for move in moves] == [(job, "hbm80g")]
    assert counts.dropped == {"cannot be requeued (--requeue)": 1}
    assert almanac.act(made, moves).requeued == 1

    def waits() -> bool:
        shown = site.job(job)
        return shown["JobState"] == "PENDING" and shown["Features"] == "hbm80g" and shown["Reason"] == "BeginTime"

    wait_until("the requeued job", waits)
    shown = site.job(job)
    delay = site.run("ctl", "root", "squeue", "-h", "-j", str(job), "-o", "%S").stdout.strip()
    print(f"== {site.release}: requeued, may start {delay}, Restarts={shown['Restarts']}")
    site.run("ctl", "root", "scontrol", "update", f"jobid={job}", "starttime=now")
    site.wait_for(job, "RUNNING")
    assert site.job(job)["NodeList"] in ("n3", "n4")
    assert site.job(job)["Restarts"] == "1"
    output = f"{home}/{job}.out"

    def text() -> str:
        return site.run("login", "root", "cat", output, check=False).stdout

    wait_until("its second run's output", lambda: "run 1 on" in text())
    places = [text().index(part) for part in ("run 0 on n", "checkpoint", "run 1 on n")]
    assert places == sorted(places), text()
    assert site.job(fixed)["Restarts"] == "0"
    almanac()
    history = almanac.log.history(almanac.cluster, int(time.time()))
    assert len(history.delays_s) == 1


@contextmanager
def _typed(site: Site) -> Iterator[None]:
    """n3 and n4 have GPUs of another type for a while."""
    conf = {host: site.read(host, f"{site.etc_dir}/slurm.conf") for host in HOSTS}
    gres = {host: site.read(host, f"{site.etc_dir}/gres.conf") for host in HOSTS}
    typed = re.sub(r"(?m)^(NodeName=n\[3-4\] .*Gres=gpu:)a100", r"\1h100", conf["ctl"].decode()).encode()
    lines = b"".join(
        f"NodeName=n[{nodes}] Name=gpu Type={name} File=/dev/nvidia[0-3]\n".encode()
        for nodes, name in (("1-2", "a100"), ("3-4", "h100"))
    )
    assert typed != conf["ctl"]
    try:
        _configure(site, dict.fromkeys(HOSTS, typed), dict.fromkeys(HOSTS, b"AutoDetect=off\n" + lines))
        yield
    finally:
        for user in ("alice", "bob"):
            site.run("ctl", "root", "scancel", "-u", user, check=False)
        wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout.strip())
        _configure(site, conf, gres)


def _configure(site: Site, conf: Mapping[str, bytes], gres: Mapping[str, bytes]) -> None:
    for host in HOSTS:
        site.write(host, f"{site.etc_dir}/slurm.conf", conf[host])
        site.write(host, f"{site.etc_dir}/gres.conf", gres[host])
    site.run("ctl", "root", "sv", "-w", "30", "restart", "slurmctld")
    for node in ("n3", "n4"):
        site.run(node, "root", "sv", "-w", "30", "restart", "slurmd")

    def are_there() -> bool:
        shown = site.run("ctl", "root", "sinfo", "-h", "-N", "-p", "all", "-o", "%T", check=False)
        return shown.stdout.split() == ["idle"] * 4

    wait_until("idle nodes", are_there)
    site.wait_for_nodes()


@pytest.mark.every_release
def test_jobs_are_placed_by_gres_types(site: Site, tmp_path: Path) -> None:
    """22.05 would give a changed job both types: almanac refuses."""
    if site.release == "22.05":
        with pytest.raises(ConfigError, match=r"22\.05"):
            require_placement(BY_GRES, CommandBackend(SiteCommands(site)).release())
        return
    with _typed(site):
        almanac = Almanac(site, tmp_path, BY_GRES, {"a100": 600, "h100": 500})
        require_placement(BY_GRES, almanac.backend.release())
        _fill(site, "h100:4")
        jobs = [
            site.sbatch("alice", option, "--mem=100", ANY, script=SLEEP) for option in ("--gres=gpu:h100:1", "-Gh100:1")
        ]
        silent = site.sbatch("alice", "--gres=gpu:h100:1", "--mem=100", script=SLEEP)
        _wait_for_reason(site, *jobs, silent)
        made = almanac.plan()
        first, second = made.changes
        assert almanac.act(replace(made, changes=(first,))).refused == 0
        site.wait_for(jobs[0], "RUNNING")
        assert "gres/gpu:a100=1" in site.job(jobs[0])["AllocTRES" if "AllocTRES" in site.job(jobs[0]) else "TRES"]
        assert site.job(jobs[0])["NodeList"] in ("n1", "n2")
        # The other waits with its new type, and gets its own back.
        filling = [site.sbatch("bob", "-N1", "--gres=gpu:a100:4", "--mem=100", script=SLEEP)]
        site.wait_for(filling[0], "RUNNING")
        filling += [site.sbatch("bob", "-N1", "--gres=gpu:a100:3", "--mem=100", script=SLEEP)]
        site.wait_for(filling[1], "RUNNING")
        assert almanac.act(replace(made, changes=(second,), read_s=time.time())).waiting == 1
        assert site.job(jobs[1])["TresPerJob"] == "gres/gpu:a100:1"
        assert almanac(is_clearing=True).undone == 1
        assert site.job(jobs[1])["TresPerJob"] == "gres/gpu:h100:1"
        assert site.job(silent)["TresPerNode"] == "gres/gpu:h100:1"
