"""What the record keeps of jobs that are changed again: a second placement, a stopped requeue, a reused number."""

from __future__ import annotations

from pathlib import Path

import pytest

from .placement_slurm import Job, Killed, Run, speeds_of
from .test_placement_run import start


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
