"""`almanac mig raise` on a running Slurm: the jobs, their limits, and their owners.

n1 has two 1g.5gb and n2 two 3g.20gb, each on GPU 0 (mig_site.py); the other GPUs are whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mig_site import mig_site
from processes import wait_until
from site_commands import SiteCommands
from sites import Site

from almanac.errors import ConfigError
from cli.app import App
from cli.job_changes import mig_raise as command
from slurm.backend import CommandBackend
from slurm.commands import Done
from telemetry.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

SMALL, LARGE = "1g.5gb", "3g.20gb"
ASK = "--comment=nightly almanac:larger"
SLEEP = "#!/bin/sh\nsleep 300\n"


@dataclass(frozen=True)
class Commands(SiteCommands):
    """The site's, with something that happens just before Slurm is told a change."""

    before: Callable[[], None] = field(default=lambda: None)

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        self.before()
        return super().feed(argv, stdin)


@dataclass
class Almanac:
    site: Site
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(
        self, *argv: str, before: Callable[[], None] = lambda: None, later_s: int = 0, code: int = 0
    ) -> dict[str, Any]:
        cluster = CommandBackend(SiteCommands(self.site)).cluster()
        Store.create(self.folder / "store") if not (self.folder / "store").exists() else None
        app = App(
            str(self.folder / "almanac.toml"), str(self.folder / "store"), cluster,
            clock=lambda: time.time() + later_s, run=Commands(self.site, before=before),
        )  # fmt: skip
        self.capsys.readouterr()
        assert (command.main(args=["--json", *argv], standalone_mode=False, obj=app) or 0) == code
        said: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return said

    def submit(self, *options: str, user: str = "alice") -> int:
        return self.site.sbatch(user, "-n", "1", "-t", "10", "--mem=100", *options, script=SLEEP)

    def waiting(self, *options: str) -> int:
        """A job that waits for resources or priority."""
        job = self.submit(*options)
        reasons = ("Resources", "Priority")
        wait_until(f"{job} to wait", lambda: self.site.job(job).get("Reason", "").split(",")[0] in reasons)
        return job


@pytest.fixture
def almanac(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Almanac:
    (tmp_path / "almanac.toml").write_text('[mig_raise]\nmode = "apply"\n')
    return Almanac(site, tmp_path, capsys)


@pytest.fixture(scope="module")
def _sliced(_running_site: Site) -> Iterator[Site]:
    """Slices on n1 and n2, and a slurmctld that knows their types and limits. 22.05 is only asked, and refused."""
    if _running_site.release == "22.05":
        yield _running_site
        return
    with mig_site(_running_site, ("n1", "n2"), "AccountingStorageEnforce=associations,limits,qos\n") as mig:
        mig.layout("n1", {SMALL: 2}, None, None, None)
        mig.layout("n2", {LARGE: 2}, None, None, None)
        yield _running_site


@pytest.fixture
def is_busy(_sliced: Site, site: Site, almanac: Almanac) -> bool:
    """Both small slices have jobs. False on 22.05, where there is nothing to try but the refusal."""
    if site.release == "22.05":
        return False
    wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout.strip())
    for job in [almanac.submit(f"--gres=gpu:{SMALL}:1", user="bob") for _ in range(2)]:
        site.wait_for(job, "RUNNING")
    return True


@pytest.mark.parametrize(
    "options",
    [
        ((f"--gres=gpu:{SMALL}:1",), (f"--gpus={SMALL}:1",)),
        ((f"--gpus-per-node={SMALL}",), (f"--gpus-per-task={SMALL}:1", "-c4")),
    ],
)
def test_waiting_jobs_start_on_idle_larger_slices(
    almanac: Almanac, site: Site, is_busy: bool, options: tuple[tuple[str, ...], ...]
) -> None:
    if not is_busy:
        return
    jobs = [almanac.waiting(*each, ASK) for each in options]
    other = almanac.waiting(*options[0])
    before = {job: site.job(job) for job in jobs}
    dry = almanac()
    assert [(each["job_id"], LARGE in each["new"]) for each in dry["changes"]] == [(job, True) for job in jobs]
    assert [site.job(job)["JobState"] for job in jobs] == ["PENDING"] * 2
    done = almanac("--apply")
    assert done["outcome"]["started"] == 2
    for job in jobs:
        now = site.job(job)
        assert (now["JobState"], now["NodeList"]) == ("RUNNING", "n2")
        assert f"gres/gpu:{LARGE}=1" in now["AllocTRES"]
        assert SMALL not in now["AllocTRES"], "22.05 would hold both"
        assert now["SubmitTime"] == before[job]["SubmitTime"]
        assert now["NumCPUs"] == before[job]["NumCPUs"]
    assert site.job(other)["JobState"] == "PENDING", "its owner did not opt in"


def test_a_limit_of_the_larger_type_costs_the_job_nothing(almanac: Almanac, site: Site, is_busy: bool) -> None:
    if not is_busy:
        return
    limit = f"MaxTRES=gres/gpu:{LARGE}="
    site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "alice", "set", f"{limit}0")
    try:
        job = almanac.waiting(f"--gres=gpu:{SMALL}:1", ASK)
        before = site.job(job)
        assert almanac("--apply")["outcome"]["undone"] == 1
        after = site.job(job)
        assert after["TresPerNode"] == before["TresPerNode"]
        assert (after["Reason"], int(after["Priority"]) > 0) == ("Resources", True)
        assert almanac("--apply")["changes"] == []
    finally:
        site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "alice", "set", f"{limit}-1")


def test_22_05_is_refused_and_left_alone(almanac: Almanac, site: Site) -> None:
    if site.release != "22.05":
        return
    job = site.sbatch("alice", "-H", "--gpus=a100:1", ASK)
    before = site.job(job)
    for argv in ((), ("--apply",), ("--clear", "--apply")):
        with pytest.raises(ConfigError, match="cannot change the GPU type of a pending job"):
            almanac(*argv)
    assert site.job(job) == before
