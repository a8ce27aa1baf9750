"""The pyslurm backend on a stand-in with what its 25.11 documents: it does not build against the Slurm of these tests.

tests/cluster/pyslurm_check.py runs the same contract on the real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_contract import check_acting, check_reading

from almanac.errors import CommandError, ConfigError
from almanac.records import Counts
from telemetry.slurm import pyslurm_backend
from telemetry.slurm.pyslurm_backend import PyslurmBackend, load_pyslurm

CHECK = Path(__file__).parents[2] / "cluster/pyslurm_check.py"
CONFIG = "ClusterName = lab\nPriorityType = priority/multifactor\n"


def _job(number: int, **values: Any) -> SimpleNamespace:
    """pyslurm.Job, as its 25.11 gives it: numbers that are 0 are None, but for the priority."""
    whole = {
        "id": number, "state": "PENDING", "user_name": "ann", "name": "train", "account": "ml", "partition": "all",
        "qos": "normal", "constraints": [], "gpus": {}, "cpus": 4, "num_nodes": 1, "time_limit": 60, "priority": 1,
        "submit_time": 1_790_000_000, "array_id": None, "array_task_id": None, "array_tasks_waiting": None,
        "heterogeneous_id": None, "heterogeneous_offset": None, "requeue_count": None,
    }  # fmt: skip
    return SimpleNamespace(**{**whole, **values})


JOBS = [
    _job(1, state="RUNNING"),
    _job(2, gpus={"gpu": SimpleNamespace(count=2, type=None), "gpu:a100": SimpleNamespace(count=2, type="a100")}),
    _job(3, priority=0, time_limit=None, constraints=["gpu&hbm80g"]),
    _job(4, array_id=4, array_tasks_waiting="3-9", gpus={"gpu:a100": SimpleNamespace(count=1, type="a100")}),
    _job(5, array_id=4),
    _job(6, array_id=4, array_task_id=2),
    _job(7, heterogeneous_id=7),
    _job(8, heterogeneous_id=7, heterogeneous_offset=1),
]
NODES = [
    SimpleNamespace(name="n2", state="IDLE+POWERED_DOWN", available_features=["gpu"], configured_gres={"gpu:a100": 4},
                    partitions=["all"], reason=None),
    SimpleNamespace(name="n1", state="MIXED", available_features=[], configured_gres={}, partitions=[], reason=None),
]  # fmt: skip


class FakePyslurm:
    """Keeps factors as slurmctld would; a factor that is false is not told, as in 25.11."""

    class RPCError(Exception):
        pass

    def __init__(self) -> None:
        self.factors = dict.fromkeys((2, 4, 5, 6, 7, 8), 0)
        self.Jobs = SimpleNamespace(load=lambda: {job.id: job for job in JOBS})
        self.Nodes = SimpleNamespace(load=lambda: {node.name: node for node in NODES})
        self.slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: SimpleNamespace(cluster_name="lab")))
        self.JobSubmitDescription = SimpleNamespace

    def Job(self, number: int) -> SimpleNamespace:  # noqa: N802 - pyslurm's name
        def modify(changes: SimpleNamespace) -> None:
            if number not in self.factors:
                raise self.RPCError("Invalid job id specified")
            if changes.site_factor:
                self.factors[number] = int(changes.site_factor)

        return SimpleNamespace(modify=modify)


@pytest.fixture
def pyslurm() -> FakePyslurm:
    return FakePyslurm()


@pytest.fixture
def backend(pyslurm: FakePyslurm) -> PyslurmBackend:
    from telemetry.slurm.backend import SiteFactor

    commands: Any = SimpleNamespace(
        configuration=lambda: CONFIG,
        site_factors=lambda: {number: SiteFactor(points) for number, points in pyslurm.factors.items()},
    )
    return PyslurmBackend(pyslurm, commands)


def test_the_contract_is_kept(backend: PyslurmBackend) -> None:
    check_reading(backend)
    check_acting(backend, [2, 6, 8])


def test_pending_jobs(backend: PyslurmBackend) -> None:
    jobs = {job.job_id: job for job in backend.pending(Counts())}
    assert sorted(jobs) == [2, 3, 4, 5, 6, 7, 8]
    assert (jobs[2].gpu_count, jobs[2].gpu_type, jobs[2].time_limit_s) == (2, "a100", 3600)
    assert jobs[3].is_held
    assert (jobs[3].constraints, jobs[3].time_limit_s) == ("gpu&hbm80g", None)
    assert [jobs[number].address for number in (4, 5, 6)] == ["4_[3-9]", "4_0", "4_2"]
    assert [jobs[number].array_task_id for number in (4, 5, 6)] == [None, 0, 2]
    assert jobs[4].gpu_count == 1
    assert [jobs[number].address for number in (7, 8)] == ["7+0", "7+1"]


def test_states_are_sets_of_flags(backend: PyslurmBackend) -> None:
    first, second = backend.nodes()
    assert (first.name, first.states) == ("n1", {"MIXED"})
    assert (second.states, second.gres, second.features) == ({"IDLE", "POWERED_DOWN"}, "gpu:a100:4", ("gpu",))


def test_a_controller_that_does_not_answer(backend: PyslurmBackend, pyslurm: FakePyslurm) -> None:
    def fail() -> None:
        raise pyslurm.RPCError("Unable to contact slurm controller")

    pyslurm.Jobs = pyslurm.Nodes = pyslurm.slurmctld.Config = SimpleNamespace(load=fail)
    for ask in (lambda: backend.pending(Counts()), backend.nodes, backend.cluster):
        with pytest.raises(CommandError, match="Unable to contact"):
            ask()


def test_a_pyslurm_that_cannot_be_imported_is_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libslurmfull.so: cannot open shared object file")

    monkeypatch.setattr(pyslurm_backend.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match="libslurmfull") as caught:
        load_pyslurm()
    assert "slurm.backend" in caught.value.hint


def test_the_check_says_that_nothing_was_checked(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text("raise ImportError('of another release')\n")
    done = subprocess.run(
        [sys.executable, str(CHECK)], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (77, "")
    assert done.stdout.startswith("pyslurm cannot be imported: nothing checked (")
    assert "of another release" in done.stdout
