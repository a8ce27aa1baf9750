"""Jobs that Slurm holds with BadConstraints after a change: they get their own request back and are released."""

from __future__ import annotations

from pathlib import Path

import pytest

from almanac.errors import NoModelError

from .placement_slurm import Job, Killed, Run
from .test_placement_run import start


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
        run.act(*made)
    run.slurm.before = lambda command: None


def test_a_job_with_bad_constraints_is_given_back_and_released(tmp_path: Path) -> None:
    run = bad(tmp_path)
    outcome = run()
    job = run.slurm.jobs[11]
    assert (outcome.undone, outcome.failed) == (1, ())
    assert (job.features, job.reason, job.priority) == ("[a100|h100]", "Priority", 100)
    assert run.slurm.sent == ["update jobid=11 Features=h100", "update jobid=11 Features=[a100|h100]", "release 11"]
    assert run.kinds == ["place", "undo", "release", "undone"]


@pytest.mark.parametrize("command", ["update jobid=11 Features=[a", "release"])
def test_a_run_is_killed_while_it_heals(tmp_path: Path, command: str) -> None:
    run = bad(tmp_path)
    kill_at(run, command)
    assert run.slurm.jobs[11].reason == "BadConstraints"
    outcome = run()
    job = run.slurm.jobs[11]
    assert (outcome.undone, outcome.failed) == (1, ())
    assert (job.features, job.reason, job.priority) == ("[a100|h100]", "Priority", 100)


def test_a_job_that_stays_held_is_reported_and_tried_again(tmp_path: Path) -> None:
    run = bad(tmp_path)
    kill_at(run, "release")
    run.slurm.keeps_bad = True
    assert run().failed == run().failed == ("11",)
    run.slurm.keeps_bad = False
    assert (run().undone, run().failed) == (1, ())
    assert run.slurm.jobs[11].priority == 100


def test_a_clearing_run_also_releases(tmp_path: Path) -> None:
    """`almanac place undo` does not leave a job held."""
    run = bad(tmp_path)
    kill_at(run, "release")
    assert run(is_clearing=True).undone == 1
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
