"""Workers in Slurm jobs: the job that is asked for, and what is said when it cannot run. No Slurm is needed here."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Dask
from almanac.errors import AlmanacError, CommandError, ConfigError, StoreError
from telemetry.metrics.slurm_workers import SlurmWorkers, slurm_workers


class FakeSlurm:
    """Understands `sbatch --test-only` and keeps the script; refuses everything else."""

    def __init__(self, refusal: str = "") -> None:
        self.script = ""
        self._refusal = refusal

    def __call__(self, argv: Sequence[str]) -> bytes:
        assert argv[:2] == ["sbatch", "--test-only"], argv
        self.script = Path(argv[2]).read_text()
        if self._refusal:
            raise CommandError(self._refusal)
        return b""


def test_the_job_is_as_configured(tmp_path: Path) -> None:
    section = Dask(
        cores=6,
        memory_gib=1.5,
        walltime="00:45:00",
        directives=("--partition=cpu", "--qos=low", "--constraint=a&b", "--exclusive"),
        interface="lo",
        worker_python="/shared/venv/bin/python",
    )
    slurm = FakeSlurm()
    with slurm_workers(section, slurm, tmp_path / "workers") as workers:
        assert workers.client.nthreads() == {}
    lines = slurm.script.splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert {"-t 00:45:00", "--partition=cpu", "--qos=low", "--constraint=a&b", "--exclusive"} <= options
    assert {"-n 1", "--cpus-per-task=6", "--mem=9G"} <= options
    [command] = [line for line in lines if "distributed.cli.dask_worker" in line]
    assert command.startswith("/shared/venv/bin/python -P -m distributed.cli.dask_worker tls://127.0.0.1:")
    for part in ("--nworkers 6", "--nthreads 1", "--memory-limit 1.50GiB"):
        assert part in command
    assert "--death-timeout 60" in command


def test_keys_are_the_callers_alone_and_go_with_the_run(tmp_path: Path) -> None:
    shared = tmp_path / "workers"
    with slurm_workers(Dask(interface="lo"), FakeSlurm(), shared):
        [folder] = shared.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize(("error", "kept"), [(ZeroDivisionError, True), (KeyboardInterrupt, False)])
def test_what_the_jobs_said_is_kept_where_the_run_failed(
    tmp_path: Path, error: type[BaseException], kept: bool
) -> None:
    with pytest.raises(error):
        with slurm_workers(Dask(interface="lo"), FakeSlurm(), tmp_path):
            [folder] = tmp_path.iterdir()
            (folder / f"{folder.name}-7.err").write_text("said")
            raise error
    assert [path.name for path in tmp_path.rglob("*.*")] == ([f"{folder.name}-7.err"] if kept else [])


def test_a_refusal_of_slurm_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="Slurm refused the workers' jobs: invalid partition") as caught:
        with slurm_workers(Dask(interface="lo"), FakeSlurm("invalid partition"), tmp_path):
            raise AssertionError("started")
    assert "[dask]" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [{"walltime": "1\n#SBATCH --uid=0"}, {"interface": "a b"}, {"worker_python": "/bin/sh;id"},
     {"worker_python": "/bin/sh${IFS}-c"}, {"directives": ("--exclusive\nid",)}],
)  # fmt: skip
def test_a_value_that_would_be_more_than_a_word_of_the_script_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"dask.{next(iter(settings))}"):
        with slurm_workers(Dask(**settings), FakeSlurm(), tmp_path):
            raise AssertionError("started")


def test_an_interface_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(AlmanacError, match="nope0"):
        with slurm_workers(Dask(interface="nope0"), FakeSlurm(), tmp_path):
            raise AssertionError("started")


def test_a_shared_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be created"):
        with slurm_workers(Dask(interface="lo"), FakeSlurm(), tmp_path / "file"):
            raise AssertionError("started")


class Counting:
    """A cluster of dask-jobqueue that counts the jobs it is asked for; all are submitted at once."""

    job_name = "almanac-x"
    scheduler_address = "tls://10.0.0.1:1234"

    def __init__(self) -> None:
        self.worker_spec: dict[int, None] = {}

    @property
    def workers(self) -> dict[int, None]:
        return self.worker_spec

    def scale(self, jobs: int) -> None:
        self.worker_spec = dict.fromkeys(range(jobs))


class Site:
    """A queue and a number of workers as the test sets them; time goes on 10 s at each look."""

    def __init__(self) -> None:
        self.queue: list[str] = []
        self.present = 0
        self.now_s = 0.0

    def nthreads(self) -> dict[int, int]:
        return dict.fromkeys(range(self.present), 1)

    def clock(self) -> float:
        self.now_s += 10
        return self.now_s

    def squeue(self, argv: Sequence[str]) -> bytes:
        assert argv[:4] == ["squeue", "-h", "-n", "almanac-x"]
        return "".join(f"{line}\n" for line in self.queue).encode()


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def workers(site: Site, tmp_path: Path) -> Callable[..., tuple[SlurmWorkers, Counting]]:
    def make(**settings: Any) -> tuple[SlurmWorkers, Counting]:
        cluster = Counting()
        made = SlurmWorkers(site, cluster, Dask(**settings), site.squeue, tmp_path, site.clock)  # type: ignore[arg-type]
        return made, cluster

    return make


def test_no_more_jobs_than_there_is_work_for(workers: Any) -> None:
    made, cluster = workers(jobs=4, cores=8)
    made.want(3)
    assert len(cluster.worker_spec) == 1
    made.want(17)
    assert len(cluster.worker_spec) == 3
    made.want(1000)
    assert len(cluster.worker_spec) == 4


def test_a_job_that_left_the_queue_is_replaced_as_often_as_there_are_jobs(workers: Any, site: Site) -> None:
    made, cluster = workers(jobs=2, cores=1)
    made.want(50)
    site.queue, site.present = ["1 RUNNING None"], 1
    asked = []
    for _ in range(5):
        made.tend()
        asked.append(len(cluster.worker_spec))
    assert asked == [3, 4, 4, 4, 4]


def test_jobs_that_all_end_at_once_end_the_wait(workers: Any, site: Site, tmp_path: Path) -> None:
    made, cluster = workers(jobs=2, cores=1)
    made.want(50)
    assert made.tend() == 0
    assert len(cluster.worker_spec) == 4
    (tmp_path / "almanac-x-3.err").write_text("line 1\nNo module named distributed\n")
    with pytest.raises(AlmanacError, match=r"all Slurm jobs .* have ended.*line 1 \| No module named") as caught:
        made.tend()
    assert str(tmp_path) in caught.value.hint


@pytest.mark.parametrize(
    ("queue", "hint"),
    [(["5 PENDING Priority", "6 PENDING Resources"], "squeue --start"),
     (["5 RUNNING None"], "must reach tls://10.0.0.1:1234")],
)  # fmt: skip
def test_the_end_of_the_wait_says_what_squeue_says(workers: Any, site: Site, queue: list[str], hint: str) -> None:
    made, _ = workers(jobs=len(queue), cores=1)
    made.want(50)
    site.queue = queue
    with pytest.raises(AlmanacError) as caught:
        for _ in range(70):
            made.tend()
    assert "; ".join(queue) in str(caught.value)
    assert hint in caught.value.hint


def test_ctrl_c_still_interrupts_where_dask_jobqueue_is_imported() -> None:
    program = "import signal, telemetry.metrics.slurm_workers\nassert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", program], check=True)
