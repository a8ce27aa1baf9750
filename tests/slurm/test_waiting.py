"""Reasons to wait in words, exit codes and what they mean, and jobs that the queue keeps after their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm.queue import parse_queue
from slurm.queued_job import QueuedJob
from slurm.releases import exit_of
from slurm.states import exit_text
from slurm.waiting import what_helps, why_waiting

RECORDED = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("reason", "why", "helps"),
    [
        ("Priority", "jobs with a higher priority come first (Priority)", "timelimit=TIME"),
        ("JobHeldUser", "its owner holds it (JobHeldUser)", "scontrol release 12"),
        ("QOSMaxGRESPerUser", "its QOS has reached a limit (QOSMaxGRESPerUser)", "fewer GPUs"),
        ("DependencyNeverSatisfied", "it will never start", "scancel 12"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "is down, drained, or reserved", "timelimit"),
        ("", "Slurm has not looked at it yet", "ask again"), ("None", "Slurm has not looked at it yet", "ask again"),
        ("New\x1b[31m{id}", "Slurm gives this reason (New?[31m{id})", ""),
    ],
)  # fmt: skip
def test_a_reason_says_why_and_what_helps(reason: str, why: str, helps: str) -> None:
    job = QueuedJob(12, "12; rm -rf /", 1, reason=reason)
    assert why in why_waiting(job) and helps in what_helps(job)
    assert ";" not in what_helps(job).replace("; fewer", "") and why_waiting(job).isprintable()


@pytest.mark.parametrize(
    ("code", "signal", "said"),
    [
        (127, 0, "exit code 127: command not found"), (126, 0, "exit code 126: a program that cannot be run"),
        (137, 0, "exit code 137: killed"), (139, None, "exit code 139: segmentation fault"), (3, 0, "exit code 3"),
        (0, 9, "signal 9: killed"), (0, 64, "signal 64"), (0, 0, ""), (None, None, ""), (255, 0, "exit code 255"),
    ],
)  # fmt: skip
def test_an_exit_code_has_its_meaning(code: int | None, signal: int | None, said: str) -> None:
    assert exit_text(code, signal).startswith(said) and len(exit_text(code, signal, is_short=True)) <= 16


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (768, (3, 0)), (9, (0, 9)), (0, (0, 0)), (None, None), (-1, None), ("3", None),
        ({"return_code": {"set": True, "number": 127}, "signal": {"id": {"set": False, "number": 0}}}, (127, 0)),
        ({"return_code": {"set": False}, "signal": {"id": {"set": True, "number": 9}}}, (0, 9)), ({}, None),
        ({"return_code": 1, "signal": "x"}, (1, 0)),
    ],
)  # fmt: skip
def test_an_exit_has_a_form_in_each_release(value: Any, found: tuple[int, int] | None) -> None:
    assert exit_of(value) == found


def test_the_queue_keeps_jobs_that_have_just_ended() -> None:
    data = (RECORDED / "22.05.8/squeue.json").read_bytes()
    assert parse_queue(data, "").ended == ()
    queue = parse_queue(data, "", with_ended=True)
    assert {job.job_id for job in queue.jobs} == {job.job_id for job in parse_queue(data, "").jobs}
    failed = next(job for job in queue.ended if job.job_id == 2)
    row = failed.row(2 * 10**9)
    assert (row["state"], row["exit_code"], row["exit_signal"], row["elapsed_s"]) == ("FAILED", 3, 0, 0)
    assert failed.has_ended and not failed.is_waiting and not failed.has_started


def test_a_job_whose_nodes_are_cleaned_up_has_ended() -> None:
    records = json.loads((RECORDED / "22.05.8/squeue.json").read_bytes())["jobs"]
    record = next(each for each in records if each["job_state"] == "COMPLETED") | {"job_state": "COMPLETING"}
    queue = parse_queue(json.dumps({"jobs": [record]}).encode(), "", with_ended=True)
    assert [job.row(0)["state"] for job in queue.ended] == ["COMPLETING"] and not queue.jobs
    assert len(parse_queue(json.dumps({"jobs": [record]}).encode(), "").jobs) == 1
