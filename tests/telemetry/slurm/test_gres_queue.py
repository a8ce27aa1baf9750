"""Pending jobs and nodes by GRES type, as Slurm 24.11 and 26.05 wrote them, and with holes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import CommandError
from telemetry.slurm.gres_queue import ANY_TYPE, GresJob, gres_queue, in_service, read_gres_nodes

FIXTURES = Path(__file__).parents[1] / "fixtures/slurm"
RELEASES = ("24.11.5", "26.05.5")


def recorded(release: str) -> dict[int, GresJob]:
    queue = gres_queue((FIXTURES / release / "mig_squeue.json").read_bytes(), "dock")
    assert queue.unreadable == 0
    return {job.job_id: job for job in queue.jobs}


def changed(release: str, name: str, **values: Any) -> bytes:
    content = json.loads((FIXTURES / release / name).read_text())
    for record in next(iter(content.values())):
        record.update(values)
    return json.dumps(content).encode()


@pytest.mark.parametrize("release", RELEASES)
def test_what_jobs_ask_for(release: str) -> None:
    jobs = recorded(release)
    assert {number: dict(job.requests) for number, job in jobs.items()} == {
        37: {"TresPerNode": "gres/gpu:1g.10gb:1"},
        38: {"TresPerJob": "gres/gpu:1g.10gb:1"},
        39: {"TresPerNode": "gres/gpu:1g.10gb:1"},
        40: {"TresPerTask": "gres/gpu:1g.10gb=1"},
        41: {"TresPerTask": "cpu=4,gres/gpu:1g.10gb=1"},
        42: {"TresPerNode": "gres/gpu:1g.10gb:1", "TresPerTask": "cpu=4"},
        43: {"TresPerJob": "gres/gpu:1g.10gb:1"},
        44: {"TresPerNode": "gres/gpu:1g.10gb:1"},
    }
    assert {job.asked_types for job in jobs.values()} == {frozenset({"1g.10gb"})}
    last = jobs[44]
    assert (last.reason, last.priority, last.partitions, last.is_plain, last.is_array) == (
        "PRIORITY", 1, ("all",), True, False,
    )  # fmt: skip
    assert (last.required_nodes, last.constraints, last.node_count, last.memory_mib, last.time_limit_s) == (
        "n[1,3]", "mig", 2, 500, 3600,
    )  # fmt: skip
    assert last.comment == 'almanac:larger x"y'
    assert (jobs[41].cpus, jobs[41].memory_mib) == (4, 400)


@pytest.mark.parametrize("release", RELEASES)
def test_what_nodes_have_free(release: str) -> None:
    nodes = read_gres_nodes(lambda argv: (FIXTURES / release / "mig_nodes.json").read_bytes())
    assert {node.node.name: dict(node.free) for node in nodes} == {
        "n1": {"1g.10gb": 0},
        "n2": {"3g.40gb": 2},
        "n3": {"1g.10gb": 0, "2g.20gb": 1, "a100": 1},
    }
    assert (nodes[2].free_cpus, nodes[2].free_memory_mib) == (31, 63900)
    assert len(in_service(nodes)) == 3


@pytest.mark.parametrize(
    "holes",
    [
        {"gres_used": None}, {"gres_used": "gpu:1g.10gb:x"}, {"gres_used": "gpu"}, {"gres_used": "N/A"},
        {"gres": ""}, {"gres": "(null)"}, {"gres": "gpu:4"}, {"gres": "gpu:1g.10gb:1:2"},
    ],
)  # fmt: skip
def test_an_unreadable_node_has_nothing_free(holes: dict[str, Any]) -> None:
    nodes = read_gres_nodes(lambda argv: changed("24.11.5", "mig_nodes.json", **holes))
    assert not any(count for node in nodes for count in node.free.values())


@pytest.mark.parametrize(
    "holes",
    [
        {"priority": None}, {"submit_time": 0}, {"job_id": "x"}, {"job_state": None}, {"comment": ["x"]},
        {"tres_per_job": 4}, {"state_reason": {}},
    ],
)  # fmt: skip
def test_an_unreadable_job_is_counted(holes: dict[str, Any]) -> None:
    queue = gres_queue(changed("24.11.5", "mig_squeue.json", **holes), "dock")
    assert (queue.jobs, queue.unreadable) == ((), 11 if "job_state" in holes else 8)


@pytest.mark.parametrize(
    ("texts", "types"),
    [
        ({"TresPerJob": "gres/gpu:4"}, {ANY_TYPE}),
        ({"TresPerJob": "gres:gpu"}, {ANY_TYPE}),
        ({"TresPerNode": "gres:gpu:a100:2,gres/gpu:1g.5gb:1,tmp:4"}, {"a100", "1g.5gb"}),
        ({"TresPerTask": "cpu=4,gres/gpu:1g.5gb=3"}, {"1g.5gb"}),
        ({"TresPerNode": "gres/shard:2"}, {ANY_TYPE}),
        ({}, {ANY_TYPE}),
    ],
)
def test_types_that_a_request_waits_for(texts: dict[Any, str], types: set[str]) -> None:
    job = GresJob(1, "1", "ann", 1, 0, 1, "RESOURCES", texts, ("all",), wants_gpu=True)
    assert job.asked_types == types


def test_no_list_is_an_error() -> None:
    with pytest.raises(CommandError):
        gres_queue(b'{"errors": []}', "dock")
    with pytest.raises(CommandError):
        read_gres_nodes(lambda argv: b"")
