"""Slurm's JSON in which something is of another kind: a record costs itself, and no other error comes out."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.names import name_key
from almanac.records import Counts
from slurm.nodes import nodes_of
from slurm.queue import parse_queue
from slurm.releases import records
from slurm.sacct import parse_json
from telemetry.sources.hook_records import SqueueSource
from telemetry.store.schema import BINDINGS

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = ["22.05.8", "24.11.5"]
NOW_S = 1_795_003_200
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=3),
    st.sampled_from([10**400, "\ud800", "PENDING", "RUNNING", [], {}, [1], [None], {"set": True, "number": 10**400}]),
)  # fmt: skip
PENDING = {
    "job_id": 7, "cluster": "lab", "job_state": ["PENDING"], "submit_time": NOW_S - 60, "user_name": "ann", "name": "x",
    "account": "ml", "partition": "gpu", "qos": "normal", "features": "hbm40g", "tres_req_str": "cpu=1,gres/gpu=2",
    "cpus": {"set": True, "infinite": False, "number": 4}, "node_count": 1, "time_limit": 60, "priority": 5,
    "array_job_id": 6, "array_task_id": None, "array_task_string": "1-3", "het_job_id": 0, "het_job_offset": 0,
    "restart_cnt": 0,
}  # fmt: skip


@cache
def recorded(release: str, name: str, key: str) -> str:
    """The first three records of a release's answer."""
    return json.dumps(json.loads((FIXTURES / release / name).read_bytes())[key][:3])


def spoil(data: st.DataObject, content: Any) -> None:
    """Replace or remove one place, at any depth."""
    at = content
    while True:
        place = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[place], (dict, list)) or not at[place] or data.draw(st.integers(0, 3)) == 0:
            break
        at = at[place]
    at[place] = data.draw(ODD)


@given(st.data())
def test_pending_jobs(data: st.DataObject) -> None:
    jobs, counts = [copy.deepcopy(PENDING), {**PENDING, "job_id": 8}], Counts()
    spoil(data, jobs[0])
    found = parse_queue(json.dumps({"jobs": jobs}).encode(), "lab").waiting_jobs(counts)
    assert counts.seen == counts.kept + counts.dropped.total() == len(found) + counts.dropped.total()
    assert 8 in [job.job_id for job in found]
    assert all(name_key(job.name) and job.user.encode() is not None for job in found)


@pytest.mark.parametrize("state", [0, [0], {"current": ["PENDING"]}, 1.5, True])
def test_a_state_that_cannot_be_read_is_counted(state: Any) -> None:
    """Some tools that stand in for squeue give Slurm's own number of a state."""
    counts = Counts()
    jobs = [{**PENDING, "job_state": state}, {**PENDING, "job_id": 8}]
    found = parse_queue(json.dumps({"jobs": jobs}).encode(), "lab").waiting_jobs(counts)
    assert [job.job_id for job in found] == [8]
    assert (dict(counts.dropped), counts.examples) == (
        {"job that cannot be read": 1},
        {"job that cannot be read": "job 7"},
    )


@examples(0.6)
@given(st.data(), st.sampled_from(RELEASES))
def test_running_jobs(data: st.DataObject, release: str) -> None:
    jobs = json.loads(recorded(release, "squeue.json", "jobs"))
    for job in jobs:
        job.update(job_state=["RUNNING"], gres_detail=["gpu:a100:2(IDX:0,3)"], start_time=5, nodes="n1")
    spoil(data, jobs)
    text = json.dumps({"jobs": jobs}).encode()
    [batch] = SqueueSource(lambda argv: text, lambda: NOW_S).read(0, NOW_S)
    assert batch.rows.schema == BINDINGS
    assert batch.counts.seen == batch.counts.kept + batch.counts.dropped.total()


@examples(0.6)
@given(st.data())
def test_nodes(data: st.DataObject) -> None:
    node = {"name": "n1", "state": ["IDLE"], "state_flags": ["DRAIN"], "features": ["a"], "gres": "gpu:1",
            "partitions": "gpu,cpu", "reason": ""}  # fmt: skip
    nodes = [copy.deepcopy(node), {**node, "name": "n2"}]
    spoil(data, nodes[0])
    found = nodes_of(records(json.dumps({"nodes": nodes}).encode(), "nodes") or [])
    assert [each.states for each in found if each.name == "n2"] == [{"IDLE", "DRAIN"}]
    assert all((each.name + each.reason + each.gres).encode() is not None for each in found)


def test_a_node_whose_state_cannot_be_read_is_unknown() -> None:
    found = nodes_of([{"name": "n1", "state": 2}, {"name": "n2", "state": "idle"}])
    assert [(each.name, set(each.states)) for each in found] == [("n1", {"UNKNOWN"}), ("n2", {"IDLE"})]


@examples(0.6)
@given(st.data())
def test_names_of_accounting(data: st.DataObject) -> None:
    job = {"job_id": 7, "cluster": "lab", "name": "x", "time": {"submission": NOW_S}, "comment": {"administrator": ""}}
    jobs = [copy.deepcopy(job), {**job, "job_id": 8}]
    spoil(data, jobs[0])
    texts = parse_json(json.dumps({"jobs": jobs}).encode(), "lab")
    assert texts[8, NOW_S].name == "x"
    pa.array([job_id for job_id, _ in texts], pa.int64())
    pa.array([text.name for text in texts.values()], pa.string())
    assert all(text.name is None or name_key(text.name) for text in texts.values())
