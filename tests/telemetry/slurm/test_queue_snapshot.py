"""The GPU jobs of one moment, from recorded output of squeue of every release, and from spoiled output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import CommandError
from telemetry.slurm.queue_snapshot import LiveGpuJob, LiveQueue, live_queue

SAMPLES = Path(__file__).parents[1] / "fixtures/slurm"
RELEASES = ("22.05.8", "24.11.5", "26.05.5")


def queue(release: str, name: str) -> LiveQueue:
    return live_queue((SAMPLES / release / name).read_bytes(), "lab")


def record(**other: Any) -> dict[str, Any]:
    plain = {
        "job_id": 7, "job_state": ["PENDING"], "submit_time": 100, "priority": 5, "tres_req_str": "cpu=1,gres/gpu=2",
        "tres_per_node": "gres/gpu:h100:2", "partition": "gpu", "user_name": "alice", "name": "x", "cluster": "lab",
        "state_reason": "Priority", "node_count": 1,
    }  # fmt: skip
    return {**plain, **other}


def one(**other: Any) -> LiveGpuJob:
    (job,) = live_queue(json.dumps({"jobs": [record(**other)]}).encode(), "lab").jobs
    return job


@pytest.mark.parametrize("release", RELEASES)
def test_every_gpu_job_that_waits_or_runs_is_read(release: str) -> None:
    cases = dict(line.split("\t") for line in (SAMPLES / release / "queue_cases.tsv").read_text().splitlines())
    assert "held" in cases
    found = queue(release, "queue.json")
    assert found.unreadable == 0
    waiting = [job for job in found.jobs if job.start_s is None]
    assert {job.is_ready for job in waiting} == {True, False}
    assert all(job.priority > 0 and job.nodes == () for job in waiting)
    assert any(job.request.node_count == 2 for job in waiting)


@pytest.mark.parametrize("release", RELEASES)
def test_running_jobs_have_their_type_and_their_gpus_by_node(release: str) -> None:
    running = [job for job in queue(release, "squeue.json").jobs if job.start_s is not None]
    assert len(running) > 2
    assert {job.request.gpu_type for job in running} == {"a100"}
    wide = [job for job in running if len(job.nodes) == 2]
    assert wide
    assert all(len(job.node_gpus) == 2 and sum(job.node_gpus) == job.request.gpu_count for job in wide)


def test_what_a_record_says() -> None:
    job = one(time_limit={"set": True, "infinite": False, "number": 90}, features="ib&h100")
    assert (job.request.gpu_count, job.request.gpu_type, job.request.constraints) == (2, "h100", "ib&h100")
    assert (job.request.time_limit_s, job.priority, job.is_ready, job.count) == (5400, 5, True, 1)
    array = one(array_job_id=7, array_task_string="0-9%4", array_max_tasks=4, state_reason="JobArrayTaskLimit")
    assert (array.count, array.is_ready) == (4, False)
    running = one(job_state=["RUNNING"], start_time=200, nodes="n[1-2]", gres_detail=["gpu:h100:1(IDX:0)"] * 2)
    assert (running.nodes, running.node_gpus, running.start_s) == (("n1", "n2"), (1, 1), 200)


@pytest.mark.parametrize("untold", [None, {"set": False, "infinite": False, "number": 0}])
def test_a_job_whose_priority_is_not_told_stands_last_and_is_not_held(untold: object) -> None:
    assert 0 < one(priority=untold).priority <= one(priority=1).priority


def test_held_foreign_ended_and_cpu_jobs_are_left_out() -> None:
    left_out = [
        record(priority=0), record(cluster="other"), record(job_state=["COMPLETED"]),
        record(tres_req_str="cpu=1", tres_per_node=""),
    ]  # fmt: skip
    assert live_queue(json.dumps({"jobs": left_out}).encode(), "lab") == LiveQueue((), 0)


def test_what_cannot_be_read_is_counted() -> None:
    spoiled = [
        record(job_state=None), record(submit_time=None), record(features=["a"]),
        record(job_state=["RUNNING"]), record(job_state=["RUNNING"], start_time=5, nodes="n[1-999999999]"),
        record(job_state=["RUNNING"], start_time=5, nodes="@all"),
    ]  # fmt: skip
    assert live_queue(json.dumps({"jobs": [*spoiled, record()]}).encode(), "lab").unreadable == len(spoiled)
    with pytest.raises(CommandError):
        live_queue(b"{}", "lab")
