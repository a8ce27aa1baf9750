"""The pyslurm backend on a stand-in that does what pyslurm 25.11.2 does, which does not build with these tests' Slurm.

tests/cluster/pyslurm_check.py runs the same contract on the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_contract import check_acting, check_reading

from almanac.errors import CommandError, ConfigError
from almanac.records import Counts
from slurm.commands import SlurmCommands
from slurm.pyslurm_backend import PyslurmBackend, open_pyslurm, require_fit
from slurm.queued_job import QueuedJob

CONFIG = "ClusterName = lab\nPriorityType = priority/multifactor\n"


def _job(number: int, **values: Any) -> SimpleNamespace:
    """pyslurm.Job, as its 25.11 gives it: numbers that are 0 are None, but for the priority."""
    whole = {
        "id": number, "state": "PENDING", "user_name": "ann", "name": "train", "account": "ml", "partition": "all",
        "qos": "normal", "constraints": [], "gpus": {}, "cpus": 4, "num_nodes": 1, "time_limit": 60, "priority": 1,
        "submit_time": 1_790_000_000, "array_id": None, "array_task_id": None, "array_tasks_waiting": None,
        "heterogeneous_id": None, "heterogeneous_offset": None, "requeue_count": None,
        "state_reason": "Priority", "gres_per_node": {}, "array_tasks_parallel": None,
        "comment": None, "resource_sharing": "OK",
    }  # fmt: skip
    return SimpleNamespace(**{**whole, **values})


class Latin1:
    """A record of pyslurm whose bytes are no UTF-8: it decodes a field when that is read, and raises."""

    def __init__(self, record: SimpleNamespace, **values: bytes) -> None:
        self.record, self.values = record, values

    def __getattr__(self, name: str) -> Any:
        return self.values[name].decode() if name in self.values else getattr(self.record, name)


JOBS = [
    _job(1, state="RUNNING"),
    _job(2, gpus={"gpu": SimpleNamespace(count=2, type=None), "gpu:a100": SimpleNamespace(count=2, type="a100")}),
    _job(3, priority=0, time_limit=None, constraints=["gpu&hbm80g"]),
    _job(
        4, array_id=4, array_tasks_waiting="3-9%5", array_tasks_parallel=5, state_reason="Resources",
        gres_per_node={"gpu:a100": 1}, gpus={"gpu:a100": SimpleNamespace(count=1, type="a100")},
    ),
    _job(5, array_id=4),
    _job(6, array_id=4, array_task_id=2),
    _job(7, heterogeneous_id=7),
    _job(8, heterogeneous_id=7, heterogeneous_offset=1),
]  # fmt: skip
EMPTY = {
    "available_features": [], "configured_gres": {}, "allocated_gres": {}, "partitions": [], "reason": None,
    "total_cpus": None, "effective_cpus": None, "allocated_cpus": 0, "real_memory": None, "allocated_memory": 0,
    "last_busy_time": None, "boot_time": None,
}  # fmt: skip
NODE = {"available_features": ["gpu"], "configured_gres": {"gpu:a100": 4}, "partitions": ["all"], "total_cpus": 32}
NODES = [
    SimpleNamespace(**{**EMPTY, **NODE, "name": "n2", "state": "IDLE+POWERED_DOWN"}),
    SimpleNamespace(**{**EMPTY, "name": "n1", "state": "MIXED"}),
]


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
        self.refused = ""
        self.asked: list[int] = []

    def Job(self, number: int) -> SimpleNamespace:  # noqa: N802 - pyslurm's name
        def modify(changes: SimpleNamespace) -> None:
            self.asked.append(number)
            if self.refused:
                raise self.RPCError(self.refused)
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
    def commands(argv: Sequence[str]) -> bytes:
        if argv[0] == "scontrol":
            return CONFIG.encode()
        return "".join(f"{number}|1|{factor}|0|0\n" for number, factor in pyslurm.factors.items()).encode()

    return PyslurmBackend(commands, pyslurm)  # type: ignore[arg-type]


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
    assert (jobs[4].reason, jobs[4].gpus_per_node, jobs[4].task_count) == ("Resources", 1, 5)
    assert (jobs[5].reason, jobs[5].gpus_per_node, jobs[5].task_count) == ("Priority", 0, 1)
    assert [jobs[number].address for number in (7, 8)] == ["7+0", "7+1"]
    assert not any(job.is_exclusive for job in jobs.values())


@pytest.mark.parametrize("state", ["EXPEDITING", "REQUEUE_HOLD"])
def test_a_flag_in_place_of_the_state_and_whole_nodes(
    backend: PyslurmBackend, pyslurm: FakePyslurm, state: str
) -> None:
    """pyslurm shows one word: a job's flag, if it has one."""
    odd = {9: _job(9, state=state, num_nodes=2, resource_sharing="NO"), 1: JOBS[0]}
    pyslurm.Jobs = SimpleNamespace(load=lambda: odd)
    [job] = backend.pending(Counts())
    assert (job.job_id, job.is_exclusive, job.is_waiting, job.is_pending) == (9, True, True, False)


def test_states_are_sets_of_flags(backend: PyslurmBackend) -> None:
    first, second = backend.nodes()
    assert (first.name, first.states) == ("n1", {"MIXED"})
    assert (second.states, second.gres, second.features) == ({"IDLE", "POWERED_DOWN"}, "gpu:a100:4", ("gpu",))
    assert (first.cpu_count, second.cpu_count) == (0, 32)


def test_a_controller_that_does_not_answer(backend: PyslurmBackend, pyslurm: FakePyslurm) -> None:
    def fail() -> None:
        raise pyslurm.RPCError("Unable to contact slurm controller")

    pyslurm.Jobs = pyslurm.Nodes = pyslurm.slurmctld.Config = SimpleNamespace(load=fail)
    for ask in (lambda: backend.pending(Counts()), backend.nodes, backend.cluster):
        with pytest.raises(CommandError, match="Unable to contact"):
            ask()


CHANGES = [QueuedJob(number, str(number), 1, "ann", "x", site_factor=40) for number in (2, 4, 5)]


@pytest.mark.parametrize(
    "said", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"]
)
def test_a_lost_slurmctld_ends_the_changes_at_the_first_job(
    backend: PyslurmBackend, pyslurm: FakePyslurm, said: str
) -> None:
    """Each further job would wait 10 s. So said pyslurm 25.11.2, built for 26.05.5, of slurmctld killed or stopped."""
    pyslurm.refused = said
    with pytest.raises(CommandError, match="lost the connection to slurmctld"):
        backend.set_site_factors(CHANGES)
    assert pyslurm.asked == [2]


def test_changes_end_at_the_time_limit(pyslurm: FakePyslurm) -> None:
    seconds = iter(range(0, 100, 10))
    backend = PyslurmBackend(SimpleNamespace(), pyslurm, 15, lambda: next(seconds))  # type: ignore[arg-type]
    with pytest.raises(CommandError, match="timed out after 15 s, with 1 of 3 site factors set"):
        backend.set_site_factors(CHANGES)
    assert pyslurm.asked == [2]


def test_a_refusal_ends_nothing(backend: PyslurmBackend, pyslurm: FakePyslurm) -> None:
    pyslurm.refused = "Invalid user id"
    assert backend.set_site_factors(CHANGES) == [f"Invalid user id for job {number}" for number in (2, 4, 5)]


def test_text_that_is_not_utf8_is_read_as_slurms_json_is(backend: PyslurmBackend, pyslurm: FakePyslurm) -> None:
    jobs = {2: Latin1(JOBS[1], name=b"caf\xe9-1", account=b"caf\xe9"), 3: Latin1(JOBS[2], constraints=b"gpu&x\xe9,y")}
    nodes = {"n2": NODES[0], "n1": Latin1(NODES[1], reason=b"caf\xe9 broken", partitions=b"all,\xe9")}
    pyslurm.Jobs, pyslurm.Nodes = SimpleNamespace(load=lambda: jobs), SimpleNamespace(load=lambda: nodes)
    counts = Counts()
    first, second = backend.pending(counts)
    assert (first.name, first.account, counts.kept, counts.dropped) == ("caf\ufffd-1", "caf\ufffd", 2, {})
    assert second.constraints == "gpu&x\ufffd,y"
    assert [node.reason for node in backend.nodes()] == ["caf\ufffd broken", ""]
    assert backend.nodes()[0].partitions == ("all", "\ufffd")


FITS = "class Job:\n    gpus = {}\n__version__ = '25.11.2'\n"
FLAGS = "import os, sys\nsys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL | os.RTLD_DEEPBIND)\n"
EXITS = "import os, sys\nsys.stderr.write('error: no\\nfatal: Could not establish a configuration source\\n')\n"
EXITS += "sys.stderr.flush()\nos._exit(1)\n"
CHILD_ONLY = FITS + FLAGS + "if 'pytest' in sys.modules:\n    raise OSError('libslurmfull.so: cannot open')\n"

Installed = Callable[..., SlurmCommands]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A pyslurm of this text on sys.path, which leaves a file `touched` when imported, and a scontrol."""

    def make(text: str, scontrol: str = "echo ClusterName=lab; echo 'SLURM_VERSION = 25.11.7'") -> SlurmCommands:
        (tmp_path / "pyslurm.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w').close()\n{text}")
        script = tmp_path / "scontrol"
        script.write_text(f"#!/bin/sh\n{scontrol}\n")
        script.chmod(0o755)
        return SlurmCommands(bin_dir=str(tmp_path), timeout_s=60)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    yield make  # type: ignore[misc]
    sys.modules.pop("pyslurm", None)


def test_without_slurm_conf_pyslurm_is_not_touched(installed: Installed, tmp_path: Path) -> None:
    """Slurm's library would end this process."""
    scontrol = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
    with pytest.raises(CommandError, match="Could not establish a configuration source"):
        open_pyslurm(installed(EXITS, scontrol))
    assert not (tmp_path / "touched").exists()


def test_a_library_that_ends_the_process_ends_another(installed: Installed, tmp_path: Path) -> None:
    """scontrol has a slurm.conf, the library of pyslurm does not."""
    with pytest.raises(ConfigError, match="exit code 1: fatal: Could not establish") as caught:
        open_pyslurm(installed(EXITS))
    assert "slurm.backend" in caught.value.hint
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("text", [FITS + FLAGS, CHILD_ONLY, FLAGS + "raise OSError('libslurmfull.so: cannot open')\n"])
def test_flags_of_libraries_are_as_they_were(installed: Installed, text: str) -> None:
    before = sys.getdlopenflags()
    try:
        if text == FITS + FLAGS:
            assert open_pyslurm(installed(text)).program() == "pyslurm 25.11.2"
        else:
            with pytest.raises(ConfigError, match="cannot be imported: libslurmfull"):
                open_pyslurm(installed(text))
        assert sys.getdlopenflags() == before
    finally:
        sys.setdlopenflags(before)


def test_the_probe_looks_where_we_import_from(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at what PYTHONPATH or the current folder would put in its way."""
    commands = installed(FITS)
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.chdir("/")
    assert open_pyslurm(commands).release() == "25.11.7"


@pytest.mark.parametrize(
    ("version", "has_gpus", "release", "fault"),
    [("25.11.2", True, "25.11.7", None), ("26.5.0", True, "26.05.5", None),
     ("25.11.2", True, "26.05.5", "does not support Slurm 26.05.5"),
     ("25.11.2", True, "25.1.7", "does not support Slurm 25.1.7"),
     ("25.05.0", True, "25.11.7", "pyslurm 25.05.0 does not support Slurm 25.11.7"),
     ("25.11.2", False, "25.11.7", "pyslurm 25.11.2 has no Job.gpus"), ("", True, "25.11.7", "does not support"),
     ("", True, "", "does not support"), ("25.111.0", True, "25.11.7", "does not support")],
)  # fmt: skip
def test_a_pyslurm_of_another_release_is_refused(version: str, has_gpus: bool, release: str, fault: str | None) -> None:
    found = {"version": version, "has_gpus": has_gpus}
    if fault is None:
        require_fit(found, release)
        return
    with pytest.raises(ConfigError, match=fault):
        require_fit(found, release)
