"""`almanac publish` as root, then `almanac report` and `almanac jobs` as a user who may not read the store."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from almanac.errors import StoreError
from cli.app import App
from cli.publish import command
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

USER = "nobody"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root publishes for others")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A store of root's with a job of nobody's and one of daemon's, published. pytest's own folder is shut to them."""
    root = Path(tempfile.mkdtemp(prefix="almanac-own-", dir="/var/tmp"))
    root.chmod(0o755)
    now_s = int(time.time())
    (root / "almanac.toml").write_text(
        f'[hooks]\nadvice_dir = "{root}/advice"\ngroup = "root"\n[store]\npath = "{root}/store"\n'
    )
    store = Store.create(root / "store")
    rows = [
        {"job_id": job_id, "submit_s": now_s - 7200, "user": user, "name": "train", "name_key": "train",
         "state": "COMPLETED", "start_s": now_s - 7100, "end_s": now_s - 3600, "elapsed_s": 3500, "gpu_count": 1,
         "node_list": "n1", "node_count": 1}
        for job_id, user in ((10, USER), (11, "daemon"))
    ]  # fmt: skip
    store.of("c").write("jobs", pa.Table.from_pylist(rows, TABLES["jobs"].schema))
    metrics = [{"job_id": row["job_id"], "submit_s": row["submit_s"], "verdict": "no telemetry"} for row in rows]
    store.of("c").write("job_metrics", pa.Table.from_pylist(metrics, TABLES["job_metrics"].schema))
    said = almanac(root, "publish", "--json")
    assert said.returncode == 0, said.stderr
    own = json.loads(said.stdout)["own_reports"]
    assert (own["reports"], own["lists"]) == (2, 2)
    yield root
    shutil.rmtree(root)


BECOME = """
import difflib, os, subprocess, sys
import pyarrow.compute, slurm.accounting, slurm.commands, slurm.named_jobs
import almanac.hardware, cli.jobs, cli.main, cli.report, reports.job.conclusions, reports.published.caller
almanac.hardware.gpu_models(), reports.job.rules.packaged()
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[1]))
cli.main.main(sys.argv[3:])
"""
"""Import and read all first: root's Python need not be open to others."""


def almanac(root: Path, *argv: str, user: str = "root") -> subprocess.CompletedProcess[str]:
    account = pwd.getpwnam(user)
    ids = (str(account.pw_uid), str(account.pw_gid))
    return subprocess.run(
        [sys.executable, "-c", BECOME, *ids, "--config", str(root / "almanac.toml"), *argv],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def as_user(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return almanac(root, *argv, user=USER)


def test_the_store_is_closed_and_the_report_is_there(place: Path) -> None:
    assert (place / "store").stat().st_mode & 0o777 == 0o750
    done = as_user(place, "report", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert [report["job"]["user"] for report in json.loads(done.stdout)] == [USER]
    done = as_user(place, "jobs", "--json")
    assert [row["job_id"] for row in json.loads(done.stdout)] == [10]


def test_another_users_job_is_as_one_that_never_was(place: Path) -> None:
    done, never = as_user(place, "report", "11"), as_user(place, "report", "98")
    assert done.returncode == never.returncode != 0
    assert re.sub(r"\b11\b", "98", done.stderr) == never.stderr and "job 98" in never.stderr
    assert "daemon" not in done.stderr + done.stdout
    assert as_user(place, "jobs", "-u", "daemon").returncode == 6


def test_publishing_again_writes_nothing(place: Path) -> None:
    own = json.loads(almanac(place, "publish", "--json").stdout)["own_reports"]
    assert (own["reports"], own["lists"], own["removed"]) == (0, 0, 0)
    assert "0 reports written; 0 lists of users' jobs written, 0 removed" in almanac(place, "publish").stdout


def test_a_job_without_a_report_yet_is_listed_and_says_so(place: Path) -> None:
    """Job 12 has ended, and its metrics are not computed."""
    now_s = int(time.time())
    row = {"job_id": 12, "submit_s": now_s - 600, "user": USER, "state": "COMPLETED", "start_s": now_s - 500,
           "end_s": now_s - 100, "elapsed_s": 400, "gpu_count": 1, "node_list": "n1", "node_count": 1}  # fmt: skip
    Store.open(place / "store").of("c").write("jobs", pa.Table.from_pylist([row], TABLES["jobs"].schema))
    assert almanac(place, "publish").returncode == 0
    done = as_user(place, "jobs", "--ended-since", "now-1hour", "--json")
    assert [row["job_id"] for row in json.loads(done.stdout)] == [12], done.stderr
    done = as_user(place, "report", "12")
    assert done.returncode == 4 and "the report is not published yet" in done.stderr


def test_own_reports_are_published_although_run_times_are_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the speed table cannot be read", "run almanac train")

    monkeypatch.setattr("slurm_hooks.advice.type_files.publish_times", fail)
    done = CliRunner().invoke(command, ["--json"], obj=App(str(place / "almanac.toml")))
    assert isinstance(done.exception, StoreError)
    assert json.loads(done.stdout)["own_reports"]["unwritable"] == 0
