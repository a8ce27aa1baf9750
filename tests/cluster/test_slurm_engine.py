"""`almanac summarize --engine slurm` on real Slurm: the workers are its jobs, and none is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import WorkerPlugin
from processes import wait_until
from testbed import Cluster

import telemetry.metrics.dask_engine
import telemetry.metrics.partials
from almanac.config import Config, Dask
from almanac.errors import AlmanacError
from demo import GeneratedSource, SiteShape
from slurm.commands import SlurmCommands
from telemetry.attribution.runs import ended_jobs, load_runs
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.dask_engine import DaskMapper
from telemetry.metrics.engine import ALWAYS, Results, compute, prepare
from telemetry.metrics.partials import Mapper, map_partials
from telemetry.metrics.slurm_workers import slurm_workers
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster

# The jobs' Python cannot import this module: what is sent to it goes by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DAYS = 2
CONFIG = """
[site]
cluster = "demo"
[store]
threads = 1
[dask]
jobs = 2
cores = 2
memory_gib = 0.5
directives = ["--partition=hbm80"]
walltime = "00:10:00"
"""


@dataclass(frozen=True)
class Site:
    """A store that the nodes see, and almanac run as root."""

    folder: Path
    cluster: Cluster

    @property
    def store(self) -> Store:
        return Store.open(self.folder / "store", threads=1)

    def summarize(self, *options: str, config: str = CONFIG) -> subprocess.Popen[str]:
        (self.folder / "almanac.toml").write_text(config)
        places = ["--config", str(self.folder / "almanac.toml"), "--store", str(self.folder / "store")]
        argv = [sys.executable, "-m", "cli.main", *places, "summarize", "-S", "2020-01-01", *options]
        return subprocess.Popen(
            argv, env={**os.environ, **self.cluster.lab.env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def queue(self) -> list[list[str]]:
        """Number, state and account of the jobs of workers that wait, run or are being ended."""
        rows = self.cluster.lab.run("squeue", "-h", "-a", "-u", "root", "-o", "%i %T %a").stdout.splitlines()
        return [row.split() for row in rows]

    def running(self) -> list[str]:
        return [number for number, state, _ in self.queue() if state == "RUNNING"]

    def wait_for_empty_queue(self) -> None:
        wait_until("an empty queue", lambda: not self.queue())


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Site:
    """Two days of a small generated site."""
    folder = cluster.lab.root / "dask"
    folder.mkdir()
    shape = dataclasses.replace(SiteShape.demo(), days=DAYS, start_s=1_741_046_400, users=6, jobs_per_day=60)
    store = Store.create(folder / "store")
    result = IngestResult("generated", shape.start_s, shape.end_s)
    ingest(GeneratedSource(shape), store.of("demo"), shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    return Site(folder, cluster)


def computed(site: Site, mapper: Mapper = map_partials) -> Results:
    store = site.store
    jobs = ended_jobs(load_runs(store.of("demo")), *ALWAYS)
    with store.connect() as db:
        prepared = prepare(db, store.of("demo").files("telemetry"), jobs, [], Config())
        return compute(db, prepared, Config(), mapper)


def assert_equal(there: Results, here: Results) -> None:
    assert here.jobs.num_rows > 50
    assert there.jobs.equals(here.jobs)
    assert there.gpus.equals(here.gpus)


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    _, said = run.communicate(timeout=300)
    return run.returncode, said


def test_the_command_computes_in_slurm_jobs_what_it_computes_here(site: Site) -> None:
    assert ended(site.summarize()) == (0, "")
    here = [site.store.of("demo").read(table) for table in ("job_metrics", "gpu_metrics")]
    for table in ("job_metrics", "gpu_metrics"):
        (site.folder / "store" / table).rename(site.folder / f"local-{table}")

    before = {number for number, *_ in site.cluster.lab.sacct("-S", "now-1hour", "-o", "JobIDRaw")}
    assert ended(site.summarize("--engine", "slurm")) == (0, "")
    site.wait_for_empty_queue()

    there = [site.store.of("demo").read(table) for table in ("job_metrics", "gpu_metrics")]
    assert here[0].num_rows > 50
    assert there == here
    fields = "JobIDRaw,Partition,ReqCPUS,ReqMem,Timelimit"

    def recorded() -> list[list[str]]:
        return [row for row in site.cluster.lab.sacct("-S", "now-1hour", "-o", fields) if row[0] not in before]

    wait_until("the job in accounting, which shows it some seconds late", recorded)
    rows = recorded()
    # Two chunks, one a day: one job of two workers is enough for them.
    assert [row[1:] for row in rows] == [["hbm80", "2", "1G", "00:10:00"]]
    assert list((site.folder / "store" / "workers").iterdir()) == []


class Waiting(WorkerPlugin):
    """Chunks are not begun before the file `go` is there; each that waits for it leaves a mark."""

    name = "waiting"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def setup(self, worker: Any) -> None:
        import time
        import uuid

        engine = telemetry.metrics.dask_engine
        real = engine.compute_partials

        def waiting(*arguments: Any) -> Any:
            (self._folder / f"begun-{os.environ['SLURM_JOB_ID']}-{uuid.uuid4()}").touch()
            while not (self._folder / "go").exists():
                time.sleep(0.05)
            return real(*arguments)

        engine.compute_partials = waiting


@pytest.fixture
def slurm(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCommands]:
    """Slurm's commands, with each hour of the store as a chunk."""
    for name, value in site.cluster.lab.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(telemetry.metrics.partials, "ROWS_PER_CHUNK", 1)
    yield SlurmCommands()
    site.wait_for_empty_queue()


def test_a_job_cancelled_in_the_middle_changes_nothing(site: Site, slurm: SlurmCommands, tmp_path: Path) -> None:
    cancelled: list[str] = []

    def begun(job: str) -> int:
        return len(list(tmp_path.glob(f"begun-{job}-*")))

    def cancel_one(done: int, total: int, note: str) -> None:
        """Once both jobs hold chunks that they cannot end: one of the jobs goes, then the others may go on."""
        running = site.running()
        if cancelled or len(running) < 2 or not all(begun(job) for job in running):
            return
        site.cluster.lab.run("scancel", running[0])
        cancelled.append(running[0])
        wait_until("the job's end", lambda: running[0] not in site.running())
        (tmp_path / "go").touch()

    section = Dask(jobs=2, cores=1, memory_gib=0.5)
    with slurm_workers(section, slurm, tmp_path) as workers:
        workers.client.register_plugin(Waiting(tmp_path))
        store = site.store
        jobs = ended_jobs(load_runs(store.of("demo")), *ALWAYS)
        with store.connect() as db:
            prepared = prepare(db, store.of("demo").files("telemetry"), jobs, [], Config())
            there = compute(db, prepared, Config(), DaskMapper(lambda: workers), cancel_one)
    assert len(cancelled) == 1
    assert begun(cancelled[0])
    assert site.cluster.lab.wait_for_jobs(int(cancelled[0])) == {int(cancelled[0]): "CANCELLED"}
    site.wait_for_empty_queue()
    assert_equal(there, computed(site))


def test_a_job_that_has_gone_is_replaced(site: Site, slurm: SlurmCommands, tmp_path: Path) -> None:
    seen: list[str] = []

    def cancel_first(done: int, total: int, note: str) -> None:
        for job in site.running():
            if job not in seen:
                seen.append(job)
                if len(seen) == 1:
                    site.cluster.lab.run("scancel", job)
                else:
                    (tmp_path / "go").touch()

    with slurm_workers(Dask(jobs=1, cores=1, memory_gib=0.5), slurm, tmp_path) as workers:
        workers.client.register_plugin(Waiting(tmp_path))
        store = site.store
        with store.connect() as db:
            jobs, paths = ended_jobs(load_runs(store.of("demo")), *ALWAYS), store.of("demo").files("telemetry")
            prepared = prepare(db, paths, jobs, [], Config())
            there = compute(db, prepared, Config(), DaskMapper(lambda: workers), cancel_first)
    assert len(seen) == 2
    assert_equal(there, computed(site))


LATER = CONFIG.replace('hbm80"', 'hbm80", "--begin=now+1hour"')


@pytest.mark.parametrize("config", [CONFIG, LATER], ids=["running", "pending"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_run_that_is_stopped_leaves_no_job(site: Site, number: signal.Signals, code: int, config: str) -> None:
    run = site.summarize("--engine", "slurm", config=config)
    wait_until("the job", lambda: bool(site.queue() if config == LATER else site.running()))
    run.send_signal(number)
    assert ended(run)[0] == code
    site.wait_for_empty_queue()
    assert list((site.folder / "store" / "workers").iterdir()) == []


def test_jobs_that_do_not_start_are_shown_as_squeue_shows_them(
    site: Site, slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.metrics.dask_engine.WAIT_S", 3.0)
    section = Dask(jobs=1, cores=1, memory_gib=0.5, directives=("--begin=now+1hour",))
    with slurm_workers(section, slurm, tmp_path) as workers:
        workers.want(1)
        wait_until("the job", lambda: bool(site.queue()))
        with pytest.raises(AlmanacError, match=r"no Dask worker came within 3 s.*PENDING BeginTime"):
            while True:
                workers.tend()
                time.sleep(0.2)


def test_what_slurm_refuses_is_said_in_its_words(site: Site) -> None:
    code, said = ended(site.summarize("--engine", "slurm", config=CONFIG.replace("hbm80", "nope")))
    assert code == 5
    assert "invalid partition specified: nope" in said
    assert site.queue() == []
