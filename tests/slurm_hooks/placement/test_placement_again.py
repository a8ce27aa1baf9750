"""What the record keeps of jobs that are changed again: a second placement, a stopped requeue, a reused number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_hooks.placement.log import PlacementLine

from .placement_slurm import NOW_S, Job, Killed, Run, speeds_of
from .test_placement_run import running, start


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
    assert run().refused == 1
    assert run.slurm.jobs[11].features == "h100"
    run.slurm.is_deaf = False
    assert run().undone == 1
    assert run.slurm.jobs[11].features == "[a100|h100]"
    assert run.kinds == ["place", "placed", "place", "refused", "undo", "undone"]


def test_a_second_placement_is_killed_between_the_record_and_the_change(tmp_path: Path) -> None:
    run = second(tmp_path)
    made, _ = run.plan()

    def kill(command: str) -> None:
        if command.startswith("update"):
            raise Killed

    run.slurm.before = kill
    with pytest.raises(Killed):
        run.act(made)
    run.slurm.before = lambda command: None
    assert run().undone == 1
    assert run.slurm.jobs[11].features == "[a100|h100]"
    assert run.kinds == ["place", "placed", "place", "refused", "undo", "undone"]


def test_an_earlier_request_of_almanacs_is_the_owners_after_a_second_placement(tmp_path: Path) -> None:
    run = second(tmp_path)
    assert run().placed == 1
    run.slurm.jobs[11].features = "h100"
    run(is_clearing=True)
    run()
    assert run.slurm.jobs[11].features == "h100"
    assert run.kinds[-1] == "owner"


@pytest.mark.parametrize("way", ["refused", "killed"])
def test_a_stopped_requeue_keeps_the_owners_request(tmp_path: Path, way: str) -> None:
    """Placed on h100, where it runs; a requeue to a100 is stopped; then its node fails."""
    run = start(tmp_path, Job(11, comment="almanac:any-gpu,almanac:movable", limit_min=2880))
    run()
    job = run.slurm.jobs[11]
    job.state, job.nodes, job.start_s, job.reason = "RUNNING", "n2", int(run.slurm.now_s), "None"
    run.slurm.sleep(7200)
    run.speeds = speeds_of(a100=18_000, h100=72_000)
    made = run.plan()
    assert [move.gpu_type for move in made[1]] == ["a100"]
    if way == "refused":
        run.slurm.refuses_requeue = True
        assert run.act(*made).stopped == 1
    else:

        def kill(command: str) -> None:
            if command.startswith("scancel"):
                raise Killed

        run.slurm.before = kill
        with pytest.raises(Killed):
            run.act(*made)
        run.slurm.before = lambda command: None
        run()
    assert run.kinds[-2:] == ["requeue", "stopped"]
    run.slurm.sleep(60)
    job.state, job.nodes, job.start_s, job.reason, job.restarts = "PENDING", "", 0, "Resources", 1
    job.submit_s = int(run.slurm.now_s)
    assert run(is_clearing=True).undone == 1
    assert job.features == "[a100|h100]"


def test_a_number_that_slurm_uses_again(tmp_path: Path) -> None:
    """The earlier job 11 was restarted once and placed on h100; so is the new one, by its own owner."""
    run = start(tmp_path, Job(11, restarts=1))
    run()
    run.slurm.sleep(86_400)
    run.slurm.jobs[11] = Job(11, user="bob", features="h100", comment="", restarts=1, submit_s=NOW_S + 80_000)
    run()
    assert run(is_clearing=True).undone == 0
    assert run.slurm.jobs[11].features == "h100"


def test_requeues_of_an_earlier_job_do_not_count(tmp_path: Path) -> None:
    run = start(tmp_path, running(21))
    run.speeds = speeds_of(a100=72_000, h100=18_000)
    run()
    assert "requeue" in run.kinds
    run.slurm.sleep(86_400)
    now_s = int(run.slurm.now_s)
    run.slurm.jobs[21] = replace(running(21), submit_s=now_s - 9000, start_s=now_s - 7200)
    assert run().requeued == 1


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
    told = PlacementLine(what="placed", key="Features", **texts, **values)  # type: ignore[arg-type]
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
    assert run.log.read(int(run.slurm.now_s))[-1].reason == "the free GPUs of h100 are gone"
    run.slurm.before = lambda command: None
    del run.slurm.jobs[31], run.slurm.jobs[32]
    assert run().requeued == 0, "within an hour"
    run.slurm.sleep(3600)
    assert run().requeued == 1


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
        run.act(*made)
    run.slurm.before = lambda command: None
    run.slurm.sleep(130)
    job = run.slurm.jobs[21]
    job.state, job.nodes, job.start_s, job.reason = "RUNNING", "n1", int(run.slurm.now_s), "None"
    run()
    assert run.kinds == ["requeue", "restarted"]
    job.state, job.nodes, job.start_s, job.reason = "PENDING", "", 0, "Resources"
    job.restarts, job.submit_s = 2, int(run.slurm.now_s)
    run.slurm.sleep(10)
    assert run().placed == 1
    assert "owner" not in run.kinds
