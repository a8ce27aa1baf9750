"""The record of jobs that are changed again: a second placement, a stopped requeue, a reused number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_slurm import NOW_S, Job, Killed, Run, speeds_of, start

from almanac.errors import NoModelError
from slurm_hooks.jobs.engine import JobOutcome
from slurm_hooks.jobs.log import JobLine

from .test_placement_run import SOONER, running


def second(tmp_path: Path) -> Run:
    """A job that was placed on h100, and would now be placed on a100."""
    run = start(tmp_path, Job(11))
    run()
    run.slurm.sleep(700)
    run.speeds = speeds_of(a100=1800, h100=9000)
    return run


def test_a_refused_second_placement_is_not_the_owners(tmp_path: Path) -> None:
    run = second(tmp_path)
    run.slurm.is_deaf = True
    assert run() == JobOutcome(refused=1, said=("Access/permission denied for job 11",))
    assert run.slurm.jobs[11].features == "h100"
    run.slurm.is_deaf = False
    assert run() == JobOutcome(undone=1)
    assert run.slurm.jobs[11].features == "[a100|h100]"
    assert run.kinds == ["place", "placed", "place", "refused", "undo", "undone"]


def test_an_earlier_request_of_almanacs_is_the_owners_after_a_second_placement(tmp_path: Path) -> None:
    run = second(tmp_path)
    assert run() == JobOutcome(waiting=1)
    run.slurm.jobs[11].features = "h100"
    run(is_clearing=True)
    run()
    assert run.slurm.jobs[11].features == "h100"
    assert run.kinds[-1] == "owner"


@pytest.mark.parametrize(
    ("way", "why"),
    [("refused", "Slurm refused the requeue"), ("killed", "the run before ended before its requeue")],
)
def test_a_stopped_requeue_keeps_the_owners_request(tmp_path: Path, way: str, why: str) -> None:
    """Placed on h100, and running there; a requeue to a100 is stopped; then its node fails."""
    run = start(tmp_path, Job(11, comment="almanac:any-gpu,almanac:movable", limit_min=2880))
    run()
    job = run.slurm.jobs[11]
    job.state, job.nodes, job.start_s, job.reason = "RUNNING", "n2", int(run.slurm.now_s), "None"
    run.slurm.sleep(7200)
    run.speeds = speeds_of(a100=18_000, h100=72_000)
    made = run.plan()
    assert [move.line.gpu_type for move in made.requeues] == ["a100"]
    if way == "refused":
        run.slurm.refuses_requeue = True
        assert run.act(made) == JobOutcome(stopped=1, said=("Requested operation is presently disabled",))
    else:

        def kill(command: str) -> None:
            if command.startswith("scancel"):
                raise Killed

        run.slurm.before = kill
        with pytest.raises(Killed):
            run.act(made)
        run.slurm.before = lambda command: None
        run()
    assert run.story[-2:] == [f"requeue: {SOONER} (0, 0.100)", f"stopped: {why} (0, 0.100)"]
    run.slurm.sleep(60)
    job.state, job.nodes, job.start_s, job.reason, job.restarts = "PENDING", "", 0, "Resources", 1
    job.submit_s = int(run.slurm.now_s)
    assert run(is_clearing=True) == JobOutcome(undone=1)
    assert job.features == "[a100|h100]"


def test_requeues_of_an_earlier_job_do_not_count(tmp_path: Path) -> None:
    run = start(tmp_path, running(21))
    run.speeds = speeds_of(a100=72_000, h100=18_000)
    run()
    assert "requeue" in run.kinds
    run.slurm.sleep(86_400)
    now_s = int(run.slurm.now_s)
    run.slurm.jobs[21] = replace(running(21), submit_s=now_s - 9000, start_s=now_s - 7200)
    assert run() == JobOutcome(requeued=1)


@pytest.mark.parametrize(
    ("line", "job", "is_same"),
    [
        ({}, {}, True),
        ({}, {"submit_s": NOW_S + 500}, False),
        ({}, {"submit_s": NOW_S - 9000, "restarts": 1}, False),
        ({}, {"submit_s": NOW_S + 500, "restarts": 1}, True),
        ({"restarts": 1}, {"submit_s": NOW_S + 30, "restarts": 1}, True),
        ({"restarts": 1}, {"submit_s": NOW_S + 90_000, "restarts": 1}, False),
        ({"restarts": 2}, {"submit_s": NOW_S + 90_000, "restarts": 1}, False),
        ({"job_id": 12}, {}, False),
    ],
)
def test_a_line_is_about_one_submission(
    tmp_path: Path, line: dict[str, int], job: dict[str, int], is_same: bool
) -> None:
    """Time of the line: NOW_S. A requeue gives the job a later time of submission, on 22.05 after some seconds."""
    values = {"job_id": 11, "time_s": NOW_S, "submit_s": NOW_S - 7200, "restarts": 0, **line}
    texts = {"cluster": "lab", "own": "", "new": "h100", "gpu_type": "h100", "reason": ""}
    told = JobLine(what="placed", key="Features", **texts, **values)  # type: ignore[arg-type]
    run = start(tmp_path, replace(Job(11), **job))  # type: ignore[arg-type]
    [queued] = run.jobs()
    assert told.is_about(queued) is is_same


def test_no_requeue_when_the_gpus_are_gone_after_the_checkpoint(tmp_path: Path) -> None:
    run = start(tmp_path, running(21))
    run.speeds = speeds_of(a100=72_000, h100=18_000)

    def take(command: str) -> None:
        if command.startswith("squeue -a --json") and run.slurm.sent:
            run.slurm.jobs |= {number: running(number, "n2", comment="") for number in (31, 32)}

    run.slurm.before = take
    outcome = run()
    assert (outcome.requeued, outcome.stopped) == (0, 1)
    assert run.slurm.sent == ["scancel --signal=USR1 --batch 21"]
    assert run.slurm.jobs[21].state == "RUNNING"
    assert run.kinds == ["requeue", "stopped"]
    assert run.log.read("lab", int(run.slurm.now_s))[-1].reason == "the free GPUs of h100 are gone"
    run.slurm.before = lambda command: None
    del run.slurm.jobs[31], run.slurm.jobs[32]
    assert run() == JobOutcome(), "within an hour"
    run.slurm.sleep(3600)
    assert run() == JobOutcome(requeued=1)


def test_a_killed_requeue_that_runs_with_its_own_request_is_not_the_owners(tmp_path: Path) -> None:
    """Killed between the requeue and the new request; the job starts on its own type before the next run."""
    run = start(tmp_path, running(21))
    run.speeds = speeds_of(a100=72_000, h100=18_000)
    made = run.plan()

    def kill(command: str) -> None:
        if command.startswith("scontrol update"):
            raise Killed

    run.slurm.before = kill
    with pytest.raises(Killed):
        run.act(made)
    run.slurm.before = lambda command: None
    run.slurm.sleep(130)
    job = run.slurm.jobs[21]
    job.state, job.nodes, job.start_s, job.reason = "RUNNING", "n1", int(run.slurm.now_s), "None"
    run()
    assert run.story == [f"requeue: {SOONER} (0, 0.100)", "restarted: it runs again (1, 0.100)"]
    job.state, job.nodes, job.start_s, job.reason = "PENDING", "", 0, "Resources"
    job.restarts, job.submit_s = 2, int(run.slurm.now_s)
    run.slurm.sleep(10)
    assert run() == JobOutcome(waiting=1)
    assert "owner" not in run.kinds


def bad(tmp_path: Path) -> Run:
    """Slurm takes h100, and then finds no node for it."""
    run = start(tmp_path, Job(11))
    run.slurm.bad = {"h100"}
    return run


def kill_at(run: Run, start_of_command: str) -> None:
    def kill(command: str) -> None:
        if command.startswith(start_of_command):
            raise Killed

    made = run.plan()
    run.slurm.before = kill
    with pytest.raises(Killed):
        run.act(made)
    run.slurm.before = lambda command: None


def test_a_job_with_bad_constraints_is_given_back_and_released(tmp_path: Path) -> None:
    run = bad(tmp_path)
    outcome = run()
    job = run.slurm.jobs[11]
    assert (outcome.undone, outcome.failed) == (1, ())
    assert (job.features, job.reason, job.priority) == ("[a100|h100]", "Priority", 100)
    assert run.slurm.sent == ["update jobid=11 Features=h100", "update jobid=11 Features=[a100|h100]", "release 11"]
    assert run.story == [
        "place: 1 h on h100", "undo: Slurm: BadConstraints", "release: BadConstraints", "undone: BadConstraints"
    ]  # fmt: skip


def test_a_job_that_stays_held_is_reported_and_tried_again(tmp_path: Path) -> None:
    run = bad(tmp_path)
    kill_at(run, "release")
    run.slurm.keeps_bad = True
    assert run().failed == run().failed == ("11",)
    run.slurm.keeps_bad = False
    assert (run().undone, run().failed) == (1, ())
    assert run.slurm.jobs[11].priority == 100


def untrained(run: Run) -> None:
    def fail(jobs: object, types: object) -> None:
        raise NoModelError("nothing is known", "run almanac train")

    run.speeds = fail


def test_a_held_job_is_released_without_speeds(tmp_path: Path) -> None:
    run = bad(tmp_path)
    kill_at(run, "release")
    run.slurm.jobs[12] = Job(12)
    untrained(run)
    with pytest.raises(NoModelError):
        run()
    assert run.slurm.jobs[11].priority == 100
    assert run.kinds[-1] == "undone"


def test_a_job_that_still_waits_gets_its_own_request_back_without_speeds(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11))
    run()
    untrained(run)
    with pytest.raises(NoModelError):
        run()
    assert run.slurm.jobs[11].features == "h100", "within 10 minutes it stays"
    run.slurm.sleep(700)
    with pytest.raises(NoModelError):
        run()
    assert run.slurm.jobs[11].features == "[a100|h100]"
    assert run.kinds[-1] == "undone"


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
        run.act(made)
        if next(calls) <= call:
            break
        job = run.slurm.jobs[11]
        assert job.reason == reason or call == 1
        assert job.features == features or call == 1
    assert call > 4
