"""Random faults and kills: whatever happens, the owner's request comes back, and nobody stays held."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from almanac.errors import AlmanacError

from .placement_slurm import FakeSlurm, Job, Killed, Run, speeds_of
from .test_placement_run import running, start

OWN = {11: "[a100|h100]", 12: "", 13: "a100"}


def step(run: Run, rng: random.Random) -> None:
    """One run of `almanac place`, with a fault in one of three."""
    slurm = run.slurm
    slurm.is_deaf, slurm.refuses_requeue = rng.random() < 0.15, rng.random() < 0.2
    slurm.bad = {"h100"} if rng.random() < 0.2 else set()
    run.speeds = rng.choice([speeds_of(a100=72_000, h100=18_000), speeds_of(a100=18_000, h100=72_000)])
    left = rng.randrange(1, 40)

    def kill(command: str) -> None:
        nonlocal left
        left -= 1
        if left == 0 and rng.random() < 0.7:
            raise Killed

    slurm.before = kill
    with contextlib.suppress(Killed, AlmanacError):
        run(is_clearing=rng.random() < 0.1)
    slurm.before = lambda command: None
    slurm.sleep(rng.choice([60, 300, 700, 4000]))


def live(slurm: FakeSlurm, rng: random.Random) -> None:
    """A job starts, ends on a failed node and waits again, or finds its node full."""
    job = slurm.jobs[rng.choice([*OWN])]
    now_s = int(slurm.now_s)
    if job.state == "PENDING" and job.priority and rng.random() < 0.5:
        job.state, job.nodes, job.start_s = "RUNNING", "n1" if job.features == "a100" else "n2", now_s
        job.reason = "None"
    elif job.state == "RUNNING" and rng.random() < 0.3:
        job.state, job.nodes, job.start_s, job.reason = "PENDING", "", 0, "Resources"
        job.restarts, job.submit_s = job.restarts + 1, now_s
    elif job.state == "PENDING" and job.reason == "BeginTime":
        job.reason = "Resources"


@pytest.mark.parametrize("seed", range(25))
def test_the_owners_request_comes_back(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    comment = "almanac:any-gpu,almanac:movable"
    jobs = [Job(number, features=text, comment=comment, limit_min=2880) for number, text in OWN.items()]
    run = start(tmp_path, *jobs, running(31, "n1", comment=""))
    for _ in range(12):
        step(run, rng)
        live(run.slurm, rng)
    slurm = run.slurm
    slurm.is_deaf, slurm.bad = False, set()
    for job in jobs:
        if job.state == "RUNNING":
            job.state, job.nodes, job.start_s, job.reason = "PENDING", "", 0, "Resources"
            job.restarts, job.submit_s = job.restarts + 1, int(slurm.now_s)
    for _ in range(2):
        run(is_clearing=True)
        slurm.sleep(60)
    assert {job.job_id: job.features for job in jobs} == OWN, run.kinds
    assert all(job.priority > 0 for job in jobs), run.kinds
    assert "owner" not in run.kinds
