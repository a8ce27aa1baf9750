"""Steps on real running jobs: the mail, the cancel, and what keeps a job, on a real slurmctld."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from lab import SlurmLab
from processes import wait_until
from site_commands import SiteCommands
from sites import REPOSITORY, Site
from testbed import Cluster

from advisor.watch.decide import WatchRules, decide
from advisor.watch.round import GPUS, JOBS, Round, WatchFinding
from cli.app import App
from cli.health import command as health
from cli.job_changes import carry_out
from cli.job_planners import watch_planner
from cli.watch import command
from slurm.backend import CommandBackend
from slurm.commands import SlurmCommands
from slurm.nodes import SlurmNode, read_nodes
from slurm.queue import read_running
from slurm_hooks.jobs.engine import JobOutcome
from telemetry.store.schema import JOBS as STORED_JOBS
from telemetry.store.store import Store

sys.path.append(str(REPOSITORY / "tests/reports/mail"))
from mail_server import MailServer

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]
CONFIG = """
[mail]
server = "127.0.0.1"
port = {port}
sender = "almanac@cluster.example"
recipient = "{{user}}@cluster.example"
[watch]
message = ["idle"]
cancel = ["idle"]
partitions = ["{partition}"]
cancel_min = 90
"""
SLEEP = "#!/bin/sh\nsleep 600\n"
HOUR_S = 3600


@dataclass
class Almanac:
    """almanac's steps for jobs that idle from their start on, on a clock that is later_s ahead."""

    site: Site
    folder: Path
    server: MailServer

    def round(self, cluster: str, later_s: int) -> tuple[Round, list[WatchFinding]]:
        now_s = int(time.time()) + later_s
        rows = [
            {**{name: getattr(job, name) for name in JOBS.names if hasattr(job, name)}, "is_shared": False,
             "is_interactive": not job.is_batch, "is_serving": False}
            for job in read_running(SiteCommands(self.site), cluster).jobs
        ]  # fmt: skip
        found = [
            WatchFinding(row["job_id"], row["start_s"], "idle", row["start_s"], now_s, 1.0, {}, "end it, or use it")
            for row in rows
        ]
        return Round(now_s, 120, pa.Table.from_pylist(rows, JOBS), GPUS.empty_table()), found

    def __call__(self, later_s: int, is_applied: bool = True) -> JobOutcome | None:
        cluster = CommandBackend(SiteCommands(self.site)).cluster()
        Store.create(self.folder / "store") if not (self.folder / "store").exists() else None
        app = App(
            str(self.folder / "almanac.toml"), str(self.folder / "store"), cluster,
            clock=lambda: time.time() + later_s, run=SiteCommands(self.site),
        )  # fmt: skip

        def look_again() -> tuple[Round, Iterable[WatchFinding]]:
            return self.round(cluster, later_s)

        plan, outcome = carry_out(watch_planner(*self.round(cluster, later_s), look_again), app, is_applied)
        assert plan.fault is None
        return outcome

    def submit(self, *options: str, user: str = "alice") -> int:
        job = self.site.sbatch(user, "-n", "1", "-t", "20", "--mem=100", *options, script=SLEEP)
        self.site.wait_for(job, "RUNNING")
        return job

    def mails(self) -> list[tuple[list[str], str]]:
        return [(to, str(mail["Subject"])) for _, to, mail in self.server.taken]


@pytest.fixture
def almanac(site: Site, tmp_path: Path) -> Iterator[Almanac]:
    wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout.strip())
    partition = site.run("ctl", "root", "sinfo", "-h", "-o", "%P").stdout.split("*")[0].split()[-1]
    with MailServer() as server:
        (tmp_path / "almanac.toml").write_text(CONFIG.format(port=server.port, partition=partition))
        yield Almanac(site, tmp_path, server)
    for user in ("alice", "bob"):
        site.run("ctl", "root", "scancel", f"--user={user}")


def test_idle_jobs_are_warned_and_cancelled_and_kept_ones_run_on(site: Site, almanac: Almanac) -> None:
    idle, task = almanac.submit(), almanac.submit("--array=3", user="bob")
    kept, later_kept = almanac.submit("--comment=nightly,almanac:keep"), almanac.submit(user="bob")
    ended = almanac.submit()
    assert almanac(HOUR_S // 2, is_applied=False) is None and not almanac.mails()
    first = almanac(HOUR_S // 2)
    assert first is not None and (first.told, first.refused) == (5, 0)
    subjects = {to[0]: subject for to, subject in almanac.mails()}
    assert subjects.keys() == {"alice@cluster.example", "bob@cluster.example"}
    assert all("2 jobs will be cancelled after" in subject for subject in subjects.values())
    assert (again := almanac(HOUR_S)) is not None and again.told == 0
    assert (second := almanac(HOUR_S * 3 // 2)) is not None and second.told == 5
    site.run("ctl", "bob", "scontrol", "update", f"jobid={later_kept}", "comment=almanac:keep:5h")
    site.run("ctl", "alice", "scancel", str(ended))
    site.wait_for(ended, "CANCELLED")
    last = almanac(HOUR_S * 7 // 4)
    assert last is not None and (last.cancelled, last.failed) == (2, ())
    for job in (idle, task):
        site.wait_for(job, "CANCELLED")
    assert all(site.job(job)["JobState"] == "RUNNING" for job in (kept, later_kept))
    assert sum("was cancelled: idle" in subject for _, subject in almanac.mails()) == 2
    lines = [
        line
        for path in (almanac.folder / "store/actions").glob("watch-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert (
        sum('"what": "cancel"' in line for line in lines) == sum('"what": "cancelled"' in line for line in lines) == 2
    )
    assert not any("alice" in line for line in lines)


def test_only_jobs_of_named_partitions_and_batch_jobs_are_warned(site: Site, almanac: Almanac) -> None:
    path = almanac.folder / "almanac.toml"
    path.write_text(path.read_text().replace('partitions = ["', 'partitions = ["x'))
    job = almanac.submit()
    for later_s in (1800, 5400, 9000, 12600):
        almanac(later_s)
    assert site.job(job)["JobState"] == "RUNNING"
    assert {subject for _, subject in almanac.mails()} == {f"Job {job}: idle"}


def test_parts_of_a_heterogeneous_job_are_not_cancelled(site: Site, almanac: Almanac) -> None:
    whole = almanac.submit("-n1", "--mem=100", ":", "-n1", "--mem=100")
    for later_s in (1800, 5400, 9000, 12600):
        outcome = almanac(later_s)
        assert outcome is not None and not outcome.cancelled
    assert site.job(whole)["JobState"] == "RUNNING"
    assert not any("will be cancelled" in subject for _, subject in almanac.mails())


def test_the_command_that_almanac_health_proposes_drains_the_node(site: Site, tmp_path: Path) -> None:
    """A record in which n1 ends every second job of a month, and the other nodes none."""
    now_s, rows = int(time.time()), []
    for day in range(30):
        for number in range(1, 5):
            start_s, is_bad = now_s - (30 - day) * 24 * HOUR_S, number == 1 and day % 2 == 0
            rows.append({
                "job_id": 10 * day + number, "submit_s": start_s - 60, "start_s": start_s, "user": "ann",
                "end_s": start_s + (1 if is_bad else 20) * HOUR_S, "gpu_count": 4, "node_count": 1,
                "node_list": f"n{number}", "state": "NODE_FAIL" if is_bad else "COMPLETED",
            })  # fmt: skip
    commands = SiteCommands(site)
    Store.create(tmp_path / "store").of("lab").write("jobs", pa.Table.from_pylist(rows, STORED_JOBS))
    (tmp_path / "almanac.toml").write_text("")
    app = App(str(tmp_path / "almanac.toml"), str(tmp_path / "store"), "lab", run=commands)
    shown = CliRunner().invoke(health, ["--json"], obj=app, catch_exceptions=False)
    (lemon,) = json.loads(shown.stdout)["lemons"]
    said = CliRunner().invoke(health, [], obj=app, catch_exceptions=False).stdout
    assert f"look at n1: {lemon['drain']}" in " ".join(said.split())

    def node() -> SlurmNode:
        return next(each for each in read_nodes(commands, ["n1"]) if each.name == "n1")

    assert "DRAIN" not in node().states
    try:
        site.run("ctl", "root", "sh", "-c", lemon["drain"])
        assert "DRAIN" in node().states and node().reason.startswith("almanac: 15 failures")
    finally:
        site.run("ctl", "root", "scontrol", "update", "nodename=n1", "state=resume", check=False)
    wait_until("n1 in service", lambda: "DRAIN" not in node().states)


@pytest.fixture
def quiet_lab(cluster: Cluster) -> Iterator[SlurmLab]:
    """The lab without jobs, before and after."""
    lab = cluster.lab
    wait_until("an empty queue", lambda: not lab.run("squeue", "-h").stdout.strip())
    yield lab
    for user in ("alice", "bob"):
        lab.run("scancel", f"--user={user}")
    wait_until("an empty queue", lambda: not lab.run("squeue", "-h").stdout.strip())


def test_the_command_finds_what_idles_by_its_counters_and_cancels_it(
    cluster: Cluster,
    quiet_lab: SlurmLab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of `almanac watch --apply`, with times of seconds where the rules have minutes and hours."""
    rules = WatchRules(silence_s=60, idle_s=10)
    monkeypatch.setattr("advisor.watch.live.decide", partial(decide, rules=rules))
    monkeypatch.setattr("advisor.watch.live.SPAN_S", 5)
    monkeypatch.setattr("advisor.watch.decide.SETTLE_S", 3)
    for name in ("HOUR_S", "LAST_CALL_S", "USER_PAUSE_S"):
        monkeypatch.setattr(f"advisor.watch.actions.{name}", 5)
    lab, jobs = quiet_lab, dict[str, int]()
    for name, user, profile, *options in (
        ("idle", "alice", "resting"), ("kept", "alice", "resting", "--comment=almanac:keep"),
        ("silent", "bob", "silent"), ("busy", "bob", "low"),
    ):  # fmt: skip
        jobs[name] = cluster.train(user, "-N1", "-n1", "--gpus=4", "-t", "20", *options, profile=profile, seconds=1200)
    Store.create(tmp_path / "store")
    with MailServer() as server:
        text = CONFIG.format(port=server.port, partition=lab.run("sinfo", "-h", "-o", "%R").stdout.split()[0])
        text += f'[prometheus]\nurl = "{cluster.prometheus.url}"\ndelay_s = 1\n'
        (tmp_path / "almanac.toml").write_text(text)
        commands = SlurmCommands(timeout_s=60, env=lab.env)

        def state(name: str) -> str:
            return lab.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", str(jobs[name])).stdout.strip()

        for name in jobs:
            lab.wait_for_state(jobs[name], "RUNNING")
        found = dict[str, Any]()

        def is_over() -> bool:
            time.sleep(3)
            app = App(str(tmp_path / "almanac.toml"), str(tmp_path / "store"), lab.cluster, run=commands)
            app.__dict__["config"] = replace(app.config, watch=replace(app.config.watch, cancel_min=0))
            capsys.readouterr()
            assert not command.main(args=["--apply", "--json"], standalone_mode=False, obj=app)
            found.update(json.loads(capsys.readouterr().out))
            assert (found["unknown"], {each["kind"] for each in found["findings"]} - {"idle"}) == ("", set())
            return state("idle") != "RUNNING"

        wait_until("the cancel of the idle job", is_over, seen=lambda: found)
        assert found["jobs_with_counters"] == 3
        wait_until("the end of the idle job", lambda: state("idle") == "CANCELLED")
        assert all(state(name) == "RUNNING" for name in ("kept", "silent", "busy"))
        mails = [(to, str(mail["Subject"])) for _, to, mail in server.taken]
    assert {to[0] for to, _ in mails} == {"alice@cluster.example"}
    assert sum("was cancelled: idle" in subject for _, subject in mails) == 1
    assert {each["job_id"] for each in found["findings"]} <= {jobs["idle"], jobs["kept"]}
