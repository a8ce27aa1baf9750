"""`almanac report` where Slurm is slow or has much: error output, large arrays, and an accounting that hangs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click.testing
import pytest
from asking_user import NOW_S, QUEUE, Reader, User, app_of, slurm
from fake_accounting import Accounting, job

from cli.report import command
from reports.job import answer
from reports.job.sources import find_jobs
from slurm import error_file
from slurm.commands import SlurmCommands
from slurm.named_jobs import named_jobs
from slurm.queued_job import QueuedJob


def run(app: User, *argv: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, argv, obj=app)


def test_only_the_owner_sees_the_end_of_the_error_output_and_accounting_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that failed, not of an older one with the same number; a command can have more than one line."""
    for module in (answer, error_file):
        monkeypatch.setattr(module, "ROOT", -1)
    for name in ("slurm-91.out", "own", "slurm-60_7.out", "slurm-94.out"):
        (tmp_path / name).write_text(f"last of {name}\n")
    failed = {"state": "FAILED", "exit_code": 1, "folder": str(tmp_path)}
    rows = [
        job(91, NOW_S - 60, user="alice", **failed),
        job(92, NOW_S - 60, user="alice", line="sbatch -e own --wrap x\ny", **failed),
        job(92, NOW_S - 10**8, user="alice", line="sbatch -e slurm-91.out x", **failed),
        job(67, NOW_S - 60, user="alice", array_job_id=60, array_task_id=7, **failed),
        job(94, NOW_S - 60, user="mallory", **failed),
    ]  # fmt: skip
    asked: list[Sequence[str]] = []

    def runner(argv: Sequence[str]) -> bytes:
        asked.append(argv)
        if argv[0] == "sacct":
            return Accounting(lambda: NOW_S, rows)(argv)
        return slurm(argv)

    answers = json.loads(run(app_of(tmp_path, runner=runner), "91,92,60_7", "--json").output)
    lines = {each["shown_id"]: each.get("error_lines") for each in answers}
    assert lines == {"91": ["last of slurm-91.out"], "92": ["last of own"], "60_7": ["last of slurm-60_7.out"]}
    assert sum("WorkDir" in " ".join(argv) for argv in asked) == 1
    operator = app_of(tmp_path, Reader, runner=runner)
    operator.is_operator = True
    [other] = json.loads(run(operator, "94", "--json").output)
    assert other["job"]["user"] == "mallory" and "error_lines" not in other
    monkeypatch.setattr(answer, "ROOT", os.getuid())
    assert "last of" not in run(app_of(tmp_path, runner=runner), "91").output


def test_a_large_array_is_found_without_comparing_each_job_with_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 tasks took 13 s."""
    monkeypatch.setattr(QueuedJob, "__eq__", pytest.fail)
    app = app_of(tmp_path)
    assert [job.shown_id for job in find_jobs(app, app.caller_jobs, named_jobs(["60"])).running] == ["60_2"]


def test_accounting_that_hangs_delays_no_job_that_the_queue_has(tmp_path: Path) -> None:
    (tmp_path / "queue").write_bytes(json.dumps({"jobs": QUEUE}).encode())
    for name, does in (("squeue", f"cat {tmp_path}/queue"), ("sacct", "exec sleep 60")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    app = app_of(tmp_path)
    app.commands = SlurmCommands(str(tmp_path))
    since_s = time.monotonic()
    done = run(app, "90,95")
    assert time.monotonic() - since_s < 30  # 2 s of them for accounting, which would take 60 s
    said = " ".join(done.output.split())
    assert "Failed after 10 min" in said and said.count("because Slurm's accounting did not answer") == 2
