"""Random faults and kills: whatever happens, the owner's request comes back, and nobody stays held."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from almanac.errors import AlmanacError

from .placement_slurm import NOW_S, SCRIPT, FakeSlurm, Job, Killed, Run, speeds_of
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


@pytest.mark.parametrize("seed", range(10))
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


CHANGES: dict[str, dict[str, object]] = {
    "another request": {"features": "ib"},
    "no consent": {"comment": ""},
    "a hold": {"priority": 0, "reason": "JobHeldUser"},
    "an operator's hold": {"priority": 0, "reason": "JobHeldAdmin"},
    "another partition": {"partition": "all"},
    "another limit": {"limit_min": 60},
    "nodes to leave out": {"more": {"excluded_nodes": "n2"}},
    "an operator's mark": {"more": {"admin_comment": "leave it"}},
    "another QOS": {"more": {"qos": "high"}},
    "no requeue": {"requeue": False},
    "its number is another job's": {"submit_s": NOW_S + 1, "user": "bob"},
    "its end": {},
}


def _changed_at(run: Run, number: int, change: dict[str, object], call: int) -> tuple[bool, list[str]]:
    """Act on a plan; before its command number `call` that is no order to Slurm, somebody changes the job.

    Returns if it came to that, and the orders that Slurm got after it.
    """
    slurm, made, calls = run.slurm, run.plan(), itertools.count(1)
    job, after = slurm.jobs[number], []

    def before(command: str) -> None:
        if command.startswith(("update", "release", "scancel", "scontrol requeue", "scontrol update")):
            after.append(command)
        elif next(calls) == call:
            after.clear()
            for name, value in change.items():
                setattr(job, name, value)
            if not change:
                del slurm.jobs[number]

    slurm.before = before
    run.act(*made)
    return next(calls) > call, after


@pytest.mark.parametrize(("name", "is_old"), [*((name, False) for name in CHANGES), ("a hold", True)])
def test_no_order_follows_a_change_of_the_job(tmp_path: Path, name: str, is_old: bool) -> None:
    """Whatever look of a run the change comes before, of a pending and of a running job."""
    for number, state in ((11, "PENDING"), (21, "RUNNING")):
        for call in itertools.count(1):
            job = Job(11) if number == 11 else running(21, script=SCRIPT.replace("@30", "@4"))
            (folder := tmp_path / f"{number}-{call}").mkdir()
            run = start(folder, job, is_old=is_old)
            run.speeds = speeds_of(a100=72_000, h100=18_000)
            came, after = _changed_at(run, number, CHANGES[name], call)
            if not came:
                break
            assert after == [], (state, call)
            assert {key: getattr(job, key) for key in CHANGES[name]} == CHANGES[name]
        assert call > 2, "the plan was acted on"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin"])
@pytest.mark.parametrize("features", ["h100", "ib", "[a100|h100]"])
def test_a_job_that_is_healed_is_not_released_from_its_owners_hold(tmp_path: Path, reason: str, features: str) -> None:
    """Slurm gave the job up with almanac's request: its own comes back, and it is released, unless held."""
    for call in itertools.count(1):
        (folder := tmp_path / str(call)).mkdir()
        run = start(folder, Job(11), bad={"h100"})
        made, calls = run.plan(), itertools.count(1)

        def before(command: str, run: Run = run, calls: Iterator[int] = calls, call: int = call) -> None:
            job = run.slurm.jobs[11]
            if command.startswith("squeue") and next(calls) == call and run.slurm.sent:
                job.priority, job.reason, job.features = 0, reason, features

        run.slurm.before = before
        run.act(*made)
        if next(calls) <= call:
            break
        job = run.slurm.jobs[11]
        assert job.reason == reason or call == 1
        assert job.features == features or call == 1
    assert call > 4
