"""The one reader of squeue's JSON: every recorded job of every release, values checked by hand, and spoiled records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import CommandError
from slurm.queue import Queue, parse_job, parse_queue, read_queue
from slurm.queued_job import ANY_TYPE, QueuedJob, task_count
from slurm.releases import records
from slurm.states import JOB_WAITS, has_ended

FIXTURES = Path(__file__).parent / "fixtures"
RECORDED = sorted(
    path for path in FIXTURES.glob("*/*.json") if path.name.endswith(("queue.json", "expediting.json", "raw_name.json"))
)
T0 = 1_795_725_422


def recorded(name: str, number: int) -> QueuedJob:
    data = (FIXTURES / name).read_bytes()
    [found] = [job for job in records(data, "jobs") or () if job["job_id"] == number]
    return parse_job(found)


def record(**other: Any) -> dict[str, Any]:
    """A pending job of a site without gres/gpu in AccountingStorageTRES, as 22.05 shows it."""
    plain = {
        "job_id": 7, "job_state": "PENDING", "submit_time": 100, "priority": 5, "cpus": 8, "node_count": 1,
        "tres_req_str": "cpu=8,mem=4G,node=1,billing=8", "partition": "gpu", "user_name": "alice", "name": "x",
        "cluster": "lab", "state_reason": "Priority",
    }  # fmt: skip
    return {**plain, **other}


def read(*found: dict[str, Any], cluster: str = "lab") -> Queue:
    return parse_queue(json.dumps({"jobs": found}).encode(), cluster)


def one(**other: Any) -> QueuedJob:
    [job] = read(record(**other)).jobs
    return job


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recorded_job_is_read(path: Path) -> None:
    found = records(path.read_bytes(), "jobs")
    assert found
    for each in found:
        job = parse_job(each)
        views = [job.is_waiting, job.holds_nodes, has_ended(job.states)]
        assert views.count(True) == 1, job.states
        assert job.shown_id.encode() and job.name.encode() and job.is_named(job.job_id)
        assert job.row(2**31)["job_id"] == job.job_id
        if job.has_started and job.gpu_count:
            assert sum(job.node_gpus) == sum(job.given.values()) == job.gpu_count
            assert sum(len(indices) for _, indices in job.gpu_indices()) == job.gpu_count
    live = [each for each in found if not has_ended(parse_job(each).states)]
    assert len(parse_queue(path.read_bytes(), "").jobs) == len(live)


ODD = "25.11.7/odd_queue.json"


def test_odd_jobs_have_the_values_that_slurm_showed() -> None:
    for name, number, values in [
        ("22.05.8/queue.json", 2060, {"gpu_count": 16, "gpu_type": "a100", "asked_gpus": 0, "given": {"a100": 16},
                                      "node_gpus": (4, 4, 4, 4), "is_exclusive": True, "is_plain": False}),
        (ODD, 3, {"gpu_count": 8, "asked_gpus": 0, "node_count": 2, "nodes": ("n1", "n2"), "is_exclusive": True}),
        (ODD, 44, {"gpu_count": 0, "node_count": 2, "is_exclusive": True, "reason_key": "RESOURCES"}),
        (ODD, 41, {"gpu_count": 1, "is_exclusive": False, "is_plain": False}),
        (ODD, 1, {"is_waiting": True, "is_pending": False, "is_held": True, "restarts": 2}),
        ("25.11.7/expediting.json", 1, {"is_waiting": True, "is_pending": False, "is_held": False, "gpu_count": 1,
                                        "start_s": None, "nodes": ()}),
        (ODD, 8, {"address": "8", "shown_id": "8_[3-5%2]", "task_count": 2, "is_common_record": True, "gpu_count": 1}),
        (ODD, 9, {"address": "8_1", "shown_id": "8_1", "task_count": 1, "array_task_id": 1, "is_running": True}),
        ("22.05.8/queue.json", 2071, {"task_count": 3, "tasks": "0-20:2%3", "shown_id": "2071_[0-20:2%3]"}),
        (ODD, 12, {"address": "11+1", "shown_id": "11+1", "gpu_count": 2, "script_key": "", "is_plain": False}),
        (ODD, 14, {"address": "13+1", "gpu_count": 4, "gpus_per_node": 2, "is_held": True}),
        (ODD, 15, {"gpu_count": 0, "shares": (("shard", 2),), "given": {}, "asked_types": frozenset()}),
        (ODD, 16, {"gpu_count": 0, "shares": (("shard", 4),), "requests": {"TresPerNode": "gres/shard:4"}}),
        (ODD, 34, {"name": "123", "priority": 0, "gpu_count": 1}),
        (ODD, 35, {"partitions": ("all", "hbm80"), "partition": "all,hbm80"}),
        (ODD, 36, {"node_count": 2, "gpu_count": 2, "gpus_per_node": 1}),
        (ODD, 37, {"gpu_count": 0, "asked_types": frozenset()}),
        (ODD, 39, {"gpu_count": 4, "requests": {"TresPerJob": "gres/gpu:4", "TresPerNode": "gres/gpu:2"}}),
        (ODD, 42, {"memory_mib": 0, "gpu_count": 1}),
        (ODD, 47, {"time_limit_s": None, "reason_key": "PARTITIONTIMELIMIT"}),
        (ODD, 48, {"has_started": True, "is_waiting": False, "is_running": False, "holds_nodes": True}),
        (ODD, 17, {"waits_for_jobs": True, "reason_key": "DEPENDENCY"}),
        (ODD, 28, {"restarts": 1, "expected_start_s": 1_795_725_555, "start_s": None}),
        (ODD, 6, {"gpu_indices()": [("n3", (3,)), ("n4", (1,))], "start_s": T0 + 2, "node_list": "n[3-4]"}),
        ("24.11.5/mig_squeue.json", 41, {"gpu_count": 1, "gpu_type": "1g.10gb", "cpu_count": 4, "memory_mib": 400,
                                         "asked_types": frozenset({"1g.10gb"}), "is_plain": True,
                                         "requests": {"TresPerTask": "cpu=4,gres/gpu:1g.10gb=1"}}),
        ("26.05.5/mig_squeue.json", 44, {"comment": 'almanac:larger x"y', "required_nodes": "n[1,3]", "node_count": 2,
                                         "constraints": "mig", "memory_mib": 500, "time_limit_s": 3600}),
        ("26.05.5/squeue.json", 37, {"gpu_count": 4, "gpu_type": "a100", "given": {"a100": 4}, "node_gpus": (2, 2)}),
        ("25.11.7/raw_name.json", 57, {"name": "bad\ufffd\ufffdutf8"}),
    ]:  # fmt: skip
        job = recorded(name, number)
        found = {each: getattr(job, each.removesuffix("()")) for each in values}
        assert {each: value() if each.endswith("()") else value for each, value in found.items()} == values


def test_gpus_that_slurms_sums_leave_out_are_read_from_the_request() -> None:
    for asked, count in [
        ({"tres_per_job": "gres/gpu:8"}, 8), ({"tres_per_job": "gres:gpu:a100:8"}, 8),
        ({"tres_per_node": "gres/gpu:8"}, 8), ({"tres_per_job": "gres/gpu:4"}, 4),
        ({"tres_per_node": "gres:gpu:4", "node_count": {"set": True, "infinite": False, "number": 2}}, 8),
        ({"tres_per_task": "cpu=1,gres/gpu=2", "tasks": 4}, 8), ({"tres_per_task": "gres:gpu:8"}, 8),
        ({"tres_per_socket": "gres/gpu:4", "sockets_per_node": 2}, 8), ({"tres_per_node": "gres:gpu"}, 1),
        ({"tres_per_job": "gres/gpu:8", "tres_per_node": "gres/gpu:2"}, 8), ({"tres_per_node": "license:x:8"}, 0),
        ({"tres_req_str": "cpu=8,gres/gpu:a100=8"}, 8), ({"tres_req_str": "cpu=8,gres/gpu=8", "tres_per_job": "x"}, 8),
    ]:  # fmt: skip
        job = one(**asked)
        assert (job.gpu_count, job.asked_gpus, bool(job.asked_types)) == (count, count, count > 0)


def test_gpus_that_slurms_sums_leave_out_are_read_from_the_nodes() -> None:
    detail = ["gpu:a100:4(IDX:0-3)"] * 4
    job = one(job_state="RUNNING", start_time=5, nodes="n[1-4]", gres_detail=detail, tres_alloc_str="cpu=4,node=4")
    assert (job.gpu_count, job.gpu_type, job.asked_gpus) == (16, "a100", 0)
    mixed = one(
        job_state="RUNNING", start_time=5, nodes="n[1-2]", gres_detail=["gpu:a100:1(IDX:0)", "gpu:v100:2(IDX:0-1)"]
    )
    assert (mixed.gpu_count, mixed.gpu_type, mixed.given) == (3, "", {"a100": 1, "v100": 2})


@pytest.mark.parametrize("untold", [{"priority": None}, {"priority": {"set": False, "infinite": False, "number": 0}}])
def test_a_priority_that_is_not_told_is_not_zero(untold: dict[str, Any]) -> None:
    job = one(**untold)
    assert job.priority is None and not job.is_held
    assert one(priority=0).is_held


def test_what_people_chose_may_be_a_number() -> None:
    job = one(name=123, comment=5, partition=7)
    assert (job.name, job.comment, job.partitions) == ("123", "5", ("7",))


def test_jobs_of_another_cluster_and_ended_ones_are_left_out() -> None:
    ended = ({"job_state": each} for each in (["COMPLETED"], "FAILED", ["CANCELLED"]))
    kept = [
        {"job_id": 8, "cluster": "LAB"},
        {"job_id": 9, "cluster": ""},
        {"job_id": 6, "job_state": ["SOMETHING_NEW"]},
    ]
    kept += [{"job_id": 10, "job_state": ["COMPLETED", "COMPLETING"], "start_time": 5}]
    queue = read(*(record(**each) for each in (*ended, {"cluster": "other"}, *kept)))
    assert ([job.job_id for job in queue.jobs], queue.unreadable) == ([6, 8, 9, 10], 0)
    assert len(read(record(cluster="other"), cluster="").jobs) == 1


@pytest.mark.parametrize(
    ("reason", "key"),
    [("ReqNodeNotAvail, UnavailableNodes:n3", "REQNODENOTAVAIL"), ("None", "NONE"), ("", ""),
     ("Resources", "RESOURCES"), ("Priority,n[1-2]", "PRIORITY"), ("Nodes_required", "NODESREQUIRED")],
)  # fmt: skip
def test_a_reason_is_what_stands_before_the_comma(reason: str, key: str) -> None:
    assert (one(state_reason=reason).reason_key, one(state_reason=reason).reason) == (key, reason)


@pytest.mark.parametrize("flag", sorted(JOB_WAITS - {"PENDING"}))
def test_a_job_waits_whatever_else_slurm_does_with_it(flag: str) -> None:
    for states in ([flag, "PENDING"], flag, flag.lower()):
        job = one(job_state=states)
        assert (job.is_waiting, job.is_pending, job.holds_nodes, job.has_started) == (True, False, False, False)
    assert one(job_state=["PENDING", "COMPLETING"], gres_detail=["gpu:2(IDX:0-1)"], nodes="n1").given == {}


@pytest.mark.parametrize(
    "holes",
    [
        {"job_id": None}, {"job_id": "7"}, {"submit_time": 0}, {"submit_time": {"set": False, "number": 5}},
        {"job_state": None}, {"job_state": 5}, {"job_state": []}, {"job_state": [5]}, {"name": ["a"]}, {"comment": {}},
        {"tres_req_str": 5}, {"tres_per_job": 4}, {"state_reason": {}}, {"features": ["a"]}, {"user_name": True},
        {"job_state": ["RUNNING"], "start_time": 5, "nodes": "n[1-999999999]"},
        {"job_state": ["RUNNING"], "start_time": 5, "nodes": "@all"}, {"dependency": 5}, {"submit_line": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_cannot_be_read_is_counted_and_the_others_kept(holes: dict[str, Any]) -> None:
    queue = read(record(**holes), record(job_id=8))
    assert ([job.job_id for job in queue.jobs], queue.unreadable) == ([8], 1)
    assert queue.example in ("job 7", "job None")


@pytest.mark.parametrize("answer", [b"", b"slurm_load_jobs error", b"[]", b'{"jobs": null}', b"{}", b"[" * 100_000])
def test_no_list_of_jobs_is_no_empty_queue(answer: bytes) -> None:
    with pytest.raises(CommandError, match="no list of jobs"):
        parse_queue(answer, "lab")


@pytest.mark.parametrize(
    ("texts", "types"),
    [
        ({"TresPerJob": "gres/gpu:4"}, {ANY_TYPE}), ({"TresPerJob": "gres:gpu"}, {ANY_TYPE}), ({}, {ANY_TYPE}),
        ({"TresPerNode": "gres:gpu:a100:2,gres/gpu:1g.5gb:1,tmp:4"}, {"a100", "1g.5gb"}),
        ({"TresPerTask": "cpu=4,gres/gpu:1g.5gb=3"}, {"1g.5gb"}), ({"TresPerNode": "gres/shard:2"}, {ANY_TYPE}),
    ],
)  # fmt: skip
def test_types_that_a_request_waits_for(texts: dict[Any, str], types: set[str]) -> None:
    assert QueuedJob(1, "1", 1, requests=texts, gpu_count=1).asked_types == types


def test_task_counts() -> None:
    for tasks, most, count in [
        ("", 0, 1), ("5", 0, 1), ("1-3", 0, 3), ("1-3%2", 2, 2), ("0-8:2", 0, 5), ("1,5,7", 0, 3), ("1,3,5,...", 0, 3),
        ("9-1", 0, 1), ("1-3:0", 0, 3), ("x", 4, 1), ("0-" + "9" * 5000, 0, 1), ("1-3", -4, 3), ("9" * 39, 0, 1),
    ]:  # fmt: skip
        assert task_count(tasks, most) == count


@pytest.mark.parametrize(
    ("changes", "elapsed_s"),
    [
        ({}, 600), ({"start_time": 1005}, 0),  # slurmctld's clock is ahead
        ({"job_state": ["SUSPENDED"], "pre_sus_time": 200, "suspend_time": 600}, 200),
        ({"pre_sus_time": 200, "suspend_time": 900}, 300), ({"job_state": ["RUNNING", "SIGNALING"]}, 600),  # resumed
    ],
)  # fmt: skip
def test_the_time_so_far_is_slurms(changes: dict[str, Any], elapsed_s: int) -> None:
    job = one(**{"job_state": "RUNNING", "start_time": 400, "tres_alloc_str": "cpu=4,mem=16E,gres/gpu=1", **changes})
    row = job.row(1000)
    assert (row["elapsed_s"], row["host_mem_alloc_mib"], row["gpu_count"]) == (elapsed_s, None, 1)
    assert row["state"] in job.states


@pytest.mark.parametrize("detail", [["gpu:2(IDX:x)"], ["gpu:1(IDX:0)", "gpu:1(IDX:1)"], [], "gpu", 5, None])
def test_indices_that_cannot_be_read_are_an_error(detail: Any) -> None:
    job = one(job_state="RUNNING", start_time=400, nodes="n1", gres_detail=detail, tres_alloc_str="gres/gpu=1")
    with pytest.raises(ValueError, match=r"unreadable GPU indices|differ in number"):
        job.gpu_indices()


def test_an_id_that_slurm_does_not_know_is_an_empty_queue() -> None:
    def unknown(argv: Sequence[str]) -> bytes:
        assert argv == ["squeue", "-a", "--json", "-j", "7,9"]
        raise CommandError("squeue failed with exit code 1: slurm_load_jobs error: Invalid job id specified")

    assert read_queue(unknown, "lab", [9, 7, 9]) == Queue(())

    def silent(argv: Sequence[str]) -> bytes:
        raise CommandError("squeue timed out")

    with pytest.raises(CommandError, match="timed out"):
        read_queue(silent, "lab", [7])
