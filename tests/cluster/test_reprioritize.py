"""`almanac reprioritize` on a running Slurm: what really happens to a queue, an array, a het job, and who may do it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from advice_files import advice_file, family, hook_on, publish, uid_of
from backend_contract import check_acting, check_reading
from processes import wait_until
from site_commands import SiteCommands
from sites import Site

from advisor.artefacts import save
from advisor.service import train
from almanac.config import Config
from almanac.errors import NotAllowedError
from almanac.names import name_key
from almanac.records import Counts
from cli.app import App
from cli.job_changes import reprioritize as command
from slurm.backend import CommandBackend
from slurm_hooks.advice.publication_log import PublishedChange as Published
from slurm_hooks.advice.publication_log import changed_rows, record
from slurm_hooks.advice.sched import render
from telemetry.history import load_history
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

QUICK_S, LONG_S = 60.0, 20_000.0
QUICK, LONG = 11_878, 7_783
"""Site factors of one GPU: 1000 ln(8640000 / s), for QUICK_S, and for the partition's limit of an hour below LONG_S."""


@dataclass
class Almanac:
    """The command, and a store in which alice and bob ran "quick" jobs of QUICK_S and "long" ones of LONG_S."""

    site: Site
    folder: Path
    capsys: pytest.CaptureFixture[str]
    cluster: str

    def __call__(self, *argv: str, user: str = "root", code: int = 0) -> dict[str, Any]:
        commands = SiteCommands(self.site, user)
        app = App(str(self.folder / "almanac.toml"), str(self.folder / "store"), self.cluster, run=commands)
        self.capsys.readouterr()
        assert (command.main(args=["--json", *argv], standalone_mode=False, obj=app) or 0) == code
        said: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return said

    def ran(self, user: str, name: str, runs: int, elapsed_s: float, first_id: int, end_s: int) -> None:
        rows = [
            {
                "job_id": first_id + number, "submit_s": end_s - 30 * (runs - number) - int(elapsed_s),
                "start_s": end_s - 30 * (runs - number) - int(elapsed_s), "end_s": end_s - 30 * (runs - number),
                "elapsed_s": int(elapsed_s), "state": "COMPLETED", "user": user, "account": "ml", "partition": "all",
                "qos": "normal", "name": f"{name}-{number}", "name_key": name_key(f"{name}-{number}"),
                "node_count": 1, "cpu_count": 1, "gpu_count": 1, "gpu_count_req": 1, "time_limit_s": 3600,
            }
            for number in range(runs)
        ]  # fmt: skip
        Store.open(self.folder / "store").of(self.cluster).write("jobs", pa.Table.from_pylist(rows, schema=JOBS))

    @property
    def factors(self) -> dict[int, int]:
        return {
            number: factor.value for number, factor in CommandBackend(SiteCommands(self.site)).site_factors().items()
        }

    def wait_until_ranked(self, *jobs: int) -> None:
        wait_until(f"jobs {jobs} to be ranked", lambda: set(jobs) <= set(self.factors))


@pytest.fixture
def almanac(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Almanac:
    cluster = CommandBackend(SiteCommands(site)).cluster()
    (tmp_path / "almanac.toml").write_text('[priority]\nmode = "apply"\n')
    store = Store.create(tmp_path / "store")
    made = Almanac(site, tmp_path, capsys, cluster)
    now_s = int(time.time())
    for place, user in enumerate(("alice", "bob")):
        made.ran(user, "quick", 20, QUICK_S, 1_000_000 + 100 * place, now_s - 90_000)
        made.ran(user, "long", 20, LONG_S, 1_001_000 + 100 * place, now_s - 100_000)
    save(train(load_history(store.of(cluster), running=True), Config(), now_s), store.of(cluster).models_dir)
    return made


@pytest.fixture
def busy(site: Site, almanac: Almanac) -> int:
    """A job that has all nodes until it is cancelled: whatever else comes has to wait."""
    wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout.strip())
    job = site.sbatch("bob", "-N4", "--exclusive", "-J", "busy", "-t", "50", script="#!/bin/sh\nsleep 3000\n")
    site.wait_for(job, "RUNNING")
    return job


def test_a_queue_is_really_reordered(almanac: Almanac, site: Site, busy: int) -> None:
    options = ("-N4", "--exclusive", "--gpus-per-node=1")
    long = [site.sbatch("alice", *options, "-J", f"long-{number}") for number in range(2)]
    quick = [site.sbatch(user, *options, "-J", "quick-7") for user in ("alice", "bob")]
    almanac.wait_until_ranked(*long, *quick)
    dry = almanac()
    assert not dry["applied"]
    assert {change["job_id"] for change in dry["changes"]} == {*long, *quick}
    assert set(almanac.factors.values()) == {0}, "a dry run tells nothing"
    assert not (almanac.folder / "store/actions").exists()
    done = almanac("--apply")
    assert (done["outcome"]["waiting"], done["outcome"]["refused"], done["outcome"]["said"]) == (4, 0, [])
    factors = almanac.factors
    assert {change["job_id"]: change["new"] for change in done["changes"]} == {
        job: factors[job] for job in (*long, *quick)
    }
    assert min(factors[job] for job in quick) > max(factors[job] for job in long)
    again = almanac("--apply")
    assert (again["changes"], again["left_alone"]["has its site factor already"]) == ([], 4)
    site.run("ctl", "root", "scancel", str(busy))
    starts = {}
    for job in (*long, *quick):
        site.wait_for(job, "COMPLETED")
        starts[job] = site.job(job)["StartTime"]
    assert max(starts[job] for job in quick) < min(starts[job] for job in long)


def test_an_array_of_a_thousand_tasks_is_one_change(almanac: Almanac, site: Site, busy: int) -> None:
    array = site.sbatch("alice", "-G1", "-J", "quick-1", "--array=1-1000")
    almanac.wait_until_ranked(array)
    done = almanac("--apply")
    assert [(change["job_id"], change["new"]) for change in done["changes"]] == [(array, pytest.approx(QUICK, abs=2))]
    assert done["outcome"]["waiting"] == 1
    shown = site.run("ctl", "root", "squeue", "-h", "-r", "-j", str(array), "-o", "%Q").stdout.split()
    assert len(shown) == 1000
    assert min(map(int, shown)) >= QUICK - 2
    records = [job for job in CommandBackend(SiteCommands(site)).pending(Counts()) if job.array_job_id == array]
    assert [job.address for job in records] == [str(array)], "its tasks still have one record"


def test_tasks_with_records_of_their_own_are_told_apart(almanac: Almanac, site: Site, busy: int) -> None:
    """The site's tool gave two tasks a factor: they are left alone, and the rest is told."""
    array = site.sbatch("alice", "-G1", "-J", "quick-1", "--array=0-98:2")
    almanac.wait_until_ranked(array)
    site.run("ctl", "root", "scontrol", "update", f"jobid={array}_[4,6]", "sitefactor=77")
    done = almanac("--apply")
    assert [change["job_id"] for change in done["changes"]] == [array]
    assert done["left_alone"]["has a site factor that almanac did not set"] == 2
    own = [job.job_id for job in CommandBackend(SiteCommands(site)).pending(Counts()) if job.array_task_id is not None]
    factors = almanac.factors
    assert [factors[job] for job in own] == [77, 77]
    assert factors[array] == pytest.approx(QUICK, abs=2)


def test_each_part_of_a_heterogeneous_job_gets_its_own_site_factor(almanac: Almanac, site: Site, busy: int) -> None:
    het = site.sbatch("alice", "-G1", "-J", "quick-1", ":", "-G4", "-J", "quick-1")
    almanac.wait_until_ranked(het, het + 1)
    done = almanac("--apply")
    assert done["outcome"]["waiting"] == 2
    factors = almanac.factors
    assert factors[het] == pytest.approx(QUICK, abs=2)
    assert factors[het + 1] < factors[het], "four GPUs are four times the GPU-time"
    assert almanac("--apply")["changes"] == []


def test_a_requeued_job_keeps_a_site_factor_that_is_known_as_ours(almanac: Almanac, site: Site, busy: int) -> None:
    job = site.sbatch("alice", "-G1", "-J", "quick-1", "--requeue", script="#!/bin/sh\nsleep 100\n")
    almanac.wait_until_ranked(job)
    almanac("--apply")
    factor = almanac.factors[job]
    site.run("ctl", "root", "scancel", str(busy))
    site.wait_for(job, "RUNNING")
    site.sbatch("bob", "-N4", "--exclusive", "-J", "busy", "-t", "50", script="#!/bin/sh\nsleep 3000\n")
    site.run("ctl", "root", "scontrol", "requeue", str(job))
    site.run("ctl", "root", "scontrol", "hold", str(job))
    site.wait_for(job, "PENDING")
    assert almanac("--apply")["changes"] == [], "held: it is left alone"
    site.run("ctl", "root", "scontrol", "release", str(job))
    # A requeued job waits two minutes before it is ranked again.
    site.run("ctl", "root", "scontrol", "update", f"jobid={job}", "starttime=now")
    almanac.wait_until_ranked(job)
    assert almanac.factors[job] == factor
    almanac.ran("alice", "quick", 8, 600, 1_002_000, int(time.time()) - 600)
    almanac("--apply")
    assert "has a site factor that almanac did not set" not in almanac("--apply")["left_alone"]


def test_held_jobs_explicit_priorities_and_jobs_that_wait_for_others(almanac: Almanac, site: Site, busy: int) -> None:
    held = site.sbatch("alice", "-G1", "-J", "quick-1", "-H")
    after = site.sbatch("alice", "-G1", "-J", "quick-1", "-d", f"afterok:{busy}")
    explicit = site.sbatch("alice", "-G1", "-J", "quick-1")
    no_gpu = site.sbatch("alice", "-J", "quick-1")
    almanac.wait_until_ranked(explicit, no_gpu)
    site.run("ctl", "root", "scontrol", "update", f"jobid={explicit}", "priority=70000")
    done = almanac("--apply")
    assert done["changes"] == []
    assert done["left_alone"] == {
        "held: it keeps its site factor until it is released": 1,
        "not ranked by Slurm yet (begin time, dependency, array limit)": 1,
        "has a priority that somebody set: a site factor does not count": 1,
        "asks for no GPU": 1,
    }
    assert site.job(explicit)["Priority"] == "70000"
    assert site.job(held)["JobState"] == site.job(after)["JobState"] == "PENDING"


def test_the_owner_may_not_and_an_operator_may(almanac: Almanac, site: Site, busy: int) -> None:
    job = site.sbatch("alice", "-G1", "-J", "long-1")
    almanac.wait_until_ranked(job)
    own = site.run("ctl", "alice", "scontrol", "update", f"jobid={job}", "sitefactor=99999", check=False)
    assert own.rc != 0
    with pytest.raises(NotAllowedError, match="ermission denied"):
        almanac("--apply", user="alice")
    array = site.sbatch("alice", "-G1", "-J", "long-1", "--array=1-3")
    almanac.wait_until_ranked(array)
    with pytest.raises(NotAllowedError, match="Invalid user id"):  # in other words for others' jobs
        almanac("--apply", user="bob")
    site.run("ctl", "root", "scancel", str(array))
    assert almanac.factors[job] == 0
    site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "bob", "set", "adminlevel=Operator")
    try:
        assert almanac("--apply", user="bob")["outcome"]["waiting"] == 1
    finally:
        site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "bob", "set", "adminlevel=None")
    assert almanac.factors[job] == pytest.approx(LONG, abs=2)


def test_clear_undoes_it_and_a_restart_of_slurmctld_does_not(almanac: Almanac, site: Site, busy: int) -> None:
    ours = [site.sbatch("alice", "-G1", "-J", name) for name in ("quick-1", "long-1")]
    other = site.sbatch("alice", "-G1", "-J", "quick-1")
    almanac.wait_until_ranked(*ours, other)
    site.run("ctl", "root", "scontrol", "update", f"jobid={other}", "sitefactor=77")
    assert almanac("--apply")["outcome"]["waiting"] == 2
    before = almanac.factors
    site.wait_until_accounted(*ours, other)
    site.restart_controller()
    almanac.wait_until_ranked(*ours, other)
    assert almanac.factors == before
    assert almanac("--apply")["changes"] == []
    assert len(almanac("--clear")["changes"]) == 2
    assert almanac.factors == before, "a dry run"
    assert almanac("--clear", "--apply")["outcome"]["undone"] == 2
    factors = almanac.factors
    assert ([factors[job] for job in ours], factors[other]) == ([0, 0], 77)


@pytest.mark.parametrize(
    ("name", "change", "honest"),
    [
        ("quick-7", ("jobname=long-1",), LONG),
        ("quick-7", ('jobname=q"',), None),
        ("quick-7", ("gres=gpu:4",), None),
        ('q"', ("comment=x",), None),
    ],
)
def test_a_site_factor_from_job_submit_does_not_outlive_what_it_was_given_for(
    almanac: Almanac, site: Site, busy: int, name: str, change: tuple[str, ...], honest: int | None
) -> None:
    """The owner changes a waiting job's name or GPU count: the next run still knows that the factor is ours."""
    now_s = int(time.time())
    rows = tuple(sorted((family(name_key(key), 1, QUICK) for key in ("quick-7", "q`")), key=lambda row: row.key))
    file = advice_file(*rows)
    publish(site, uid_of(site, "alice"), render(file))
    store = Store.open(almanac.folder / "store")
    record(store.of(almanac.cluster), changed_rows([Published("alice", None, file)], now_s))
    hook_on(site)
    job = site.sbatch("alice", "--gres=gpu:1", "-J", name)
    almanac.wait_until_ranked(job)
    assert almanac.factors[job] == QUICK
    site.run("ctl", "alice", "scontrol", "update", f"jobid={job}", *change)
    done = almanac("--apply")
    assert "has a site factor that almanac did not set" not in done["left_alone"]
    factor = almanac.factors[job]
    assert factor < QUICK
    if honest is not None:
        assert factor == pytest.approx(honest, abs=2)


@pytest.fixture
def kinds(almanac: Almanac, site: Site, busy: int) -> dict[str, int]:
    """One pending job of each kind that Slurm ranks."""
    made: dict[str, Callable[[], int]] = {
        "plain": lambda: site.sbatch("alice", "-G1", "-C", "gpu&hbm80g"),
        "forged": lambda: site.sbatch("alice", "-G1", "-J", "innocent\n7|99|5|0|0"),
        "array": lambda: site.sbatch("alice", "-G1", "--array=1-9%3"),
        "het": lambda: site.sbatch("alice", "-G1", ":", "-G2"),
        "partitions": lambda: site.sbatch("alice", "-G1", "-p", "all,hbm80"),
    }
    jobs = {kind: submit() for kind, submit in made.items()}
    almanac.wait_until_ranked(*jobs.values())
    return jobs


def test_the_commands_keep_the_contract_of_a_backend(kinds: dict[str, int], site: Site) -> None:
    backend = CommandBackend(SiteCommands(site))
    jobs = {job.job_id: job for job in check_reading(backend)}
    assert set(kinds.values()) <= set(jobs)
    assert jobs[kinds["forged"]].name == "innocent\n7|99|5|0|0"
    assert jobs[kinds["plain"]].constraints == "gpu&hbm80g"
    assert jobs[kinds["partitions"]].partition == "all,hbm80"
    assert {node.name for node in backend.nodes()} == {"n1", "n2", "n3", "n4"}
    check_acting(backend, list(kinds.values()))
    site.run("ctl", "root", "scontrol", "update", f"jobid={kinds['array']}_[2]", "sitefactor=5")
    check_reading(backend)
    split = [job.job_id for job in backend.pending(Counts()) if job.array_job_id == kinds["array"]]
    assert len(split) == 2
    check_acting(backend, [*split, kinds["het"] + 1])
