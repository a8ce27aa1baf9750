"""Running and pending jobs, from the recorded queues of three releases (fixtures/slurm/README.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import CommandError
from telemetry.sources.live_jobs import LiveJob, live_jobs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
RELEASES = ["22.05.8", "24.11.5", "26.05.5"]
NOW_S = 1_800_000_000


def recorded(release: str) -> list[LiveJob]:
    """All that the recorded queue has, asked for by every number that it holds."""
    data = (FIXTURES / release / "squeue.json").read_bytes()
    ids = [job["job_id"] for job in json.loads(data)["jobs"]]
    return live_jobs(lambda argv: data, ids, int((FIXTURES / release / "now_s.txt").read_text()), "lab")


@pytest.mark.parametrize("release", RELEASES)
def test_a_running_job_has_its_gpus_and_its_time_so_far(release: str) -> None:
    running = [job for job in recorded(release) if job.is_running]
    two_nodes, *_, task = running
    assert [(row["host"], row["gpu"]) for row in two_nodes.bindings] == [
        (host, gpu) for host, gpus in zip(hosts(two_nodes), ((1, 2), (0, 1)), strict=True) for gpu in gpus
    ]
    assert {(row["job_id"], row["origin"], row["seen_s"]) for row in two_nodes.bindings} == {
        (two_nodes.job_id, "squeue", two_nodes.row["start_s"])
    }
    shown = {name: two_nodes.row[name] for name in ("user", "state", "gpu_count", "cpu_count", "node_count")}
    assert shown == {"user": "alice", "state": "RUNNING", "gpu_count": 4, "cpu_count": 2, "node_count": 2}
    assert two_nodes.row["host_mem_alloc_mib"] == 2000 and two_nodes.row["gpu_type"] == "a100"
    assert 0 <= two_nodes.row["elapsed_s"] <= 10 and "end_s" not in two_nodes.row
    assert task.shown_id == f"{task.row['array_job_id']}_0" and len(task.bindings) == 1


def hosts(job: LiveJob) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["host"] for row in job.bindings))


@pytest.mark.parametrize("release", RELEASES)
def test_a_pending_job_says_why_it_waits_and_for_how_long(release: str) -> None:
    pending = {job.reason: job for job in recorded(release) if not job.is_running}
    assert set(pending) == {"PartitionTimeLimit", "Resources", "JobArrayTaskLimit"}
    assert (pending["Resources"].expected_start_s or 0) > pending["Resources"].row["submit_s"]
    assert pending["PartitionTimeLimit"].expected_start_s is None
    rest = pending["JobArrayTaskLimit"]
    assert rest.shown_id == f"{rest.job_id}_[1-3%1]"
    assert rest.is_named(rest.job_id, None) and rest.is_named(rest.job_id, {2, 9})
    assert not rest.is_named(rest.job_id, {0, 4}) and not rest.is_named(rest.job_id + 1, None)


def one(**changes: Any) -> LiveJob | None:
    """A job as 22.05 shows it; None where it is passed over."""
    job = {"job_id": 7, "user_id": 1000, "user_name": "ann", "job_state": "RUNNING", "submit_time": NOW_S - 900,
           "start_time": NOW_S - 600, "time_limit": 60, "nodes": "n1", "node_count": 1, "cpus": 4, "array_job_id": 0,
           "tres_alloc_str": "cpu=4,mem=16E,gres/gpu=1", "gres_detail": ["gpu:1(IDX:3)"], **changes}  # fmt: skip
    found = live_jobs(lambda argv: json.dumps({"jobs": [job]}).encode(), [7], NOW_S)
    return found[0] if found else None


@pytest.mark.parametrize(
    ("changes", "elapsed_s"),
    [
        ({}, 600),
        ({"start_time": NOW_S + 5}, 0),  # slurmctld's clock is ahead
        ({"job_state": ["SUSPENDED"], "pre_sus_time": 200, "suspend_time": NOW_S - 400}, 200),
        ({"pre_sus_time": 200, "suspend_time": NOW_S - 100}, 300),  # resumed
        ({"job_state": ["RUNNING", "SIGNALING"]}, 600),
    ],
)
def test_the_time_so_far_is_slurms(changes: dict[str, Any], elapsed_s: int) -> None:
    job = one(**changes)
    assert job and job.is_running and job.row["elapsed_s"] == elapsed_s
    assert job.row["host_mem_alloc_mib"] is None


@pytest.mark.parametrize(
    "changes",
    [{"job_state": "COMPLETED"}, {"job_state": ["COMPLETED", "COMPLETING"]}, {"job_state": 5}, {"job_id": "7"},
     {"submit_time": None}, {"start_time": 0}, {"job_id": 8}],
)  # fmt: skip
def test_what_has_ended_or_cannot_be_read_is_passed_over(changes: dict[str, Any]) -> None:
    assert one(**changes) is None


@pytest.mark.parametrize("detail", [["gpu:2(IDX:x)"], ["gpu:1(IDX:0)", "gpu:1(IDX:1)"], [], "gpu", 5, None])
def test_a_job_whose_gpus_cannot_be_read_has_none_bound(detail: Any) -> None:
    job = one(gres_detail=detail)
    assert job and job.bindings == () and job.row["gpu_count"] == 1


def test_a_requeued_job_waits_again() -> None:
    job = one(job_state=["PENDING", "REQUEUED"], state_reason="BeginTime", start_time=NOW_S + 120, restart_cnt=1)
    assert job and (job.is_running, job.reason, job.expected_start_s) == (False, "BeginTime", NOW_S + 120)


def test_an_id_that_slurm_does_not_know_is_no_fault() -> None:
    def unknown(argv: Sequence[str]) -> bytes:
        raise CommandError("squeue failed with exit code 1: slurm_load_jobs error: Invalid job id specified")

    assert live_jobs(unknown, [7], NOW_S) == []

    def silent(argv: Sequence[str]) -> bytes:
        raise CommandError("squeue timed out")

    with pytest.raises(CommandError, match="timed out"):
        live_jobs(silent, [7], NOW_S)
