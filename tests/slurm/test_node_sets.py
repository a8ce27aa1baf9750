"""Members of node sets, and their demand now: on recorded nodes and queues of three releases, and on made ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.actions_config import NodeSet
from almanac.errors import ConfigError
from slurm.node_sets import LiveDemand, can_serve, is_asleep, is_busy, live_demand, members, wants_nodes
from slurm.nodes import SlurmNode, nodes_of
from slurm.queue import parse_queue
from slurm.queued_job import QueuedJob

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = sorted(path.parent.name for path in FIXTURES.glob("*/queue_cases.tsv"))
SAMPLES = Path(__file__).parents[3] / "shared/slurm-samples"


def node(name: str = "n1", *states: str, **values: Any) -> SlurmNode:
    whole: dict[str, Any] = {"features": ("gpu",), "gres": "gpu:a100:4", "partitions": ("all",), "cpu_count": 32}
    return SlurmNode(name, frozenset(states or ("IDLE",)), **{**whole, **values})


def job(number: int = 1, **values: Any) -> QueuedJob:
    whole: dict[str, Any] = {"partition": "all", "gpu_count": 1, "reason": "Resources"}
    return QueuedJob(number, str(number), 1, "ann", "x", **{**whole, **values})


def wanted_nodes(nodes: list[SlurmNode], pending: list[QueuedJob]) -> int:
    return live_demand([node.name for node in nodes], nodes, pending).wanted


NODES = [node(f"n{number}") for number in range(1, 5)]


def test_members_by_hostlist_feature_and_partition() -> None:
    nodes = [
        node("n10", features=("gpu", "hbm80g")),
        node("n2", partitions=("all", "big")),
        node("n1", features=("gpu", "hbm80g")),
    ]
    assert members(NodeSet("a", nodes="n[1-3]"), nodes) == ("n1", "n2"), "n3 is no node of this Slurm"
    assert members(NodeSet("a", feature="hbm80g"), nodes) == ("n1", "n10")
    assert members(NodeSet("a", feature="hbm80"), nodes) == (), "a feature is a whole word"
    assert members(NodeSet("a", partition="big"), nodes) == ("n2",)
    assert members(NodeSet("a", partition="big", exclude="n2"), nodes) == ("n2",), "it is a member that stays on"
    with pytest.raises(ConfigError, match="not a host list"):
        members(NodeSet("a", nodes="n[1-"), nodes)


def test_states() -> None:
    for states, reason, serves, busy, asleep in [
        ("IDLE", "", True, False, False), ("MIXED", "", True, True, False),
        ("ALLOCATED COMPLETING", "", True, True, False), ("IDLE COMPLETING", "", True, True, False),
        ("IDLE PLANNED", "", True, False, False), ("IDLE RESERVED", "", True, False, False),
        ("IDLE DRAIN POWER_DOWN", "anything", True, False, True),
        ("MIXED DRAIN POWER_DOWN", "POWER_DOWN_ASAP", True, True, False),
        ("IDLE POWERING_DOWN", "", True, False, True), ("IDLE POWERED_DOWN", "", True, False, True),
        ("IDLE POWERED_DOWN NOT_RESPONDING", "", True, False, True), ("IDLE DRAIN POWER_DRAIN", "", True, False, True),
        ("IDLE DRAIN POWERED_DOWN", "broken fan", False, False, True),
        ("IDLE DRAIN", "almanac: did not wake", False, False, False), ("IDLE MAINT", "", False, False, False),
        ("IDLE POWERED_DOWN POWER_UP", "", True, False, False),
        ("IDLE NOT_RESPONDING POWERING_UP", "", True, False, False), ("MIXED POWERED_DOWN", "", True, True, False),
        ("IDLE NOT_RESPONDING", "", False, False, False), ("DOWN", "", False, False, False),
        ("DOWN POWERED_DOWN", "ResumeTimeout reached", False, False, True),
        ("DOWN COMPLETING", "", False, False, False), ("IDLE FAIL", "", False, False, False),
        ("IDLE MAINTENANCE", "", False, False, False), ("MIXED DRAIN", "", False, True, False),
        ("FUTURE", "", False, False, False), ("UNKNOWN", "", False, False, False), ("", "", False, False, False),
    ]:  # fmt: skip
        one = SlurmNode("n1", frozenset(states.split()), reason=reason)
        assert (can_serve(one), is_busy(one), is_asleep(one)) == (serves, busy, asleep)


def test_a_draining_node_counts_while_its_job_runs() -> None:
    nodes = [node("n1", "MIXED", "DRAIN"), node("n2"), node("n3", "IDLE", "DRAIN"), node("n4", "IDLE", "POWERED_DOWN")]
    assert live_demand(["n1", "n2", "n3", "n4"], nodes, []) == LiveDemand(3, 1, 0, 1)


def test_nodes_of_other_sets_and_unknown_names_count_for_nothing() -> None:
    assert live_demand(["n2", "n77"], NODES, [job()]) == LiveDemand(1, 0, 1, 0)
    assert live_demand([], NODES, [job()]) == LiveDemand(0, 0, 0, 0)


def test_wanted() -> None:
    for jobs, wanted in [
        ([], 0), ([job()], 1), ([job(n, gpu_count=1) for n in range(8)], 2),
        ([job(n, gpu_count=3) for n in range(3)], 3), ([job(gpu_count=16, node_count=1)], 4),
        ([job(gpu_count=8, node_count=1)], 2), ([job(gpu_count=8, node_count=2, gpus_per_node=4)], 2),
        ([job(gpu_count=2, node_count=2)], 2), ([job(n, gpu_count=2, node_count=2) for n in range(2)], 4),
        ([job(gpu_count=0, cpu_count=1)], 1), ([job(n, gpu_count=0, cpu_count=1) for n in range(40)], 2),
        ([job(n, gpu_count=1, cpu_count=32) for n in range(3)], 3),
        ([job(n, gpu_count=0, cpu_count=1, is_exclusive=True) for n in range(3)], 3),
        ([job(gpu_count=1, task_count=10)], 3), ([job(gpu_count=1, task_count=1000)], 4),
        ([job(gpu_count=4, node_count=99)], 4), ([job(gpu_count=8, gpus_per_node=8)], 0),
        ([job(partition="other")], 0), ([job(partition="other,all")], 1), ([job(constraints="gpu&hbm80g")], 0),
        ([job(constraints="gpu|hbm80g")], 1), ([job(gpu_type="a100")], 1), ([job(gpu_type="h100")], 0),
        ([job(priority=0), job(2, reason="Dependency"), job(3, reason="BeginTime")], 0),
        ([job(reason=reason) for reason in ("JobArrayTaskLimit", "AssocGrpGRES", "QOSMaxJobsPerUserLimit")], 0),
        ([job(reason=reason, gpu_count=4) for reason in ("Priority", "None", "")], 3),
        ([job(reason="ReqNodeNotAvail, UnavailableNodes:n3")], 1), ([job(reason="SomethingNew")], 1),
    ]:  # fmt: skip
        assert live_demand([f"n{number}" for number in range(1, 5)], NODES, jobs).wanted == wanted


def test_the_queue_in_node_minutes() -> None:
    names = [f"n{number}" for number in range(1, 5)]
    jobs = [job(1, gpu_count=1, task_count=3), job(2, gpu_count=99, node_count=25), job(3, priority=0)]
    jobs.append(job(4, partition="other"))
    run_s = {1: 600.0, 2: 60.0}
    assert live_demand(names, NODES, jobs, run_s).queued_node_min == 3 * 10 / 4 + 4, "at most all four nodes"
    assert live_demand(names, NODES, jobs, run_s) == live_demand(names, NODES, jobs[::-1], run_s)
    assert live_demand(names, NODES, jobs).queued_node_min is None
    assert live_demand(names, NODES, jobs, {1: 600.0}).queued_node_min is None, "unknown is not zero"
    assert live_demand(names, NODES, [], {}).queued_node_min == 0


def test_a_job_counts_in_each_set_that_it_fits() -> None:
    nodes = [node("n1", features=("hbm40g",)), node("n2", features=("hbm80g",))]
    assert [live_demand([name], nodes, [job(gpu_count=4)]).wanted for name in ("n1", "n2")] == [1, 1]


def test_jobs_that_fit_few_nodes_want_no_others() -> None:
    nodes = [*NODES, node("n5", features=("hbm80g",))]
    jobs = [job(n, gpu_count=4, constraints="hbm80g") for n in range(100)]
    assert wanted_nodes(nodes, jobs) == 1
    assert wanted_nodes(nodes, [*jobs, job(200, gpu_count=8)]) == 3


def test_nodes_with_two_types_of_gpus() -> None:
    nodes = [node("n1", gres="gpu:a100:4(S:0,1),gpu:v100:2(S:1),lustre:1")]
    assert wanted_nodes(nodes, [job(gpu_type="v100", gpus_per_node=2, gpu_count=2)]) == 1
    assert wanted_nodes(nodes, [job(gpu_type="v100", gpus_per_node=4, gpu_count=4)]) == 0
    assert wanted_nodes(nodes, [job(gpus_per_node=6, gpu_count=6)]) == 1


def record(number: int = 1, **given: Any) -> dict[str, Any]:
    """A pending record of a site without gres/gpu in AccountingStorageTRES."""
    plain = {"job_id": number, "submit_time": 100, "job_state": ["PENDING"], "user_name": "u", "name": "x", "cpus": 8}
    more = {"tres_req_str": "cpu=8,mem=4G,node=1,billing=8", "node_count": 1, "partition": "all", "priority": 1}
    return {**plain, **more, "state_reason": "Resources", **given}


def test_nodes_that_parts_of_gpus_fill() -> None:
    """Six jobs; nodes with more CPUs than they need."""
    for gres, asked, wanted in [
        ("gpu:a100:8", {"tres_per_job": "gres/gpu:8"}, 6),
        ("gpu:a100:1,shard:a100:8", {"tres_req_str": "cpu=8,gres/shard=8", "tres_per_node": "gres/shard:8"}, 6),
        ("gpu:a100:1,shard:a100:8", {"tres_per_node": "gres/shard:8"}, 6),
        ("gpu:a100:1,shard:8(S:0)", {"tres_per_node": "gres:shard:4"}, 3),
        ("gpu:a100:1,shard:8", {"tres_per_node": "gres/shard"}, 1),
        ("gpu:a100:1,mps:100", {"tres_per_node": "gres/mps:50"}, 3),
        ("gpu:a100:2,mps:200", {"tres_per_node": "gres/mps:100"}, 6),
        ("gpu:a100:2,shard:16", {"tres_per_node": "gres/shard:5"}, 3),
        ("gpu:a100:4,shard:32", {"tres_per_node": "gres/shard:9"}, 0),
        ("gpu:a100:2,shard:16", {"tres_per_node": "gres/shard:8", "node_count": 2}, 10),
        ("gpu:a100:1,shard:8", {"tres_per_node": "gres/shard:9"}, 0),
        ("gpu:a100:1", {"tres_per_node": "gres/shard:1"}, 0),
    ]:
        nodes = [node(f"n{number}", gres=gres, cpu_count=128) for number in range(10)]
        data = json.dumps({"jobs": [record(number, **asked) for number in range(1, 7)]}).encode()
        assert wanted_nodes(nodes, list(parse_queue(data, "lab").jobs)) == wanted


@pytest.mark.parametrize("release", RELEASES)
def test_a_recorded_queue(release: str) -> None:
    queue = (FIXTURES / release / "queue.json").read_bytes()
    cases = dict(line.split("\t") for line in (FIXTURES / release / "queue_cases.tsv").read_text().splitlines())
    jobs = {one.job_id: one for one in parse_queue(queue, "lab").waiting().jobs}
    assert not wants_nodes(jobs[int(cases["held"])])
    assert wants_nodes(jobs[int(cases["plain"])])
    assert jobs[int(cases["two_nodes"])].gpus_per_node == 2
    nodes = nodes_of(json.loads((FIXTURES / release / "nodes.json").read_bytes())["nodes"])
    assert {one.cpu_count for one in nodes} == {32}
    demand = live_demand([one.name for one in nodes], nodes, list(jobs.values()))
    assert demand.wanted == demand.total > 0, "its queue is longer than the cluster is large"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="recorded samples of node power are not here")
@pytest.mark.parametrize("release", RELEASES)
def test_a_recorded_sleep_and_wake(release: str) -> None:
    seen = []
    for step in ("a1", "a2", "a3", "a4", "a5", "a6", "b11", "b12", "b13", "c_busy"):
        nodes = nodes_of(json.loads((SAMPLES / release / f"power_{step}.json").read_bytes())["nodes"])
        found = live_demand(["n4"], nodes, [])
        seen.append((found.total, found.active, found.asleep))
    assert seen == [(1, 0, 1)] * 3 + [(1, 0, 0)] * 3 + [(1, 1, 0)] * 4


_STATES = st.frozensets(
    st.sampled_from(
        ["IDLE", "MIXED", "ALLOCATED", "DOWN", "DRAIN", "POWERED_DOWN", "POWERING_UP", "POWER_DOWN", "FAIL", "UNKNOWN",
         "NOT_RESPONDING", "COMPLETING", "MAINTENANCE", "SOMETHING_NEW"]
    ), max_size=4,
)  # fmt: skip
_NODES = st.lists(
    st.builds(
        node, st.sampled_from([f"n{n}" for n in range(12)]), features=st.sampled_from([(), ("a",), ("a", "b")]),
        gres=st.sampled_from(["", "gpu:4", "gpu:a100:8", "gpu:a100:2,gpu:v100:2"]), cpu_count=st.integers(0, 64),
    ).flatmap(lambda one: st.builds(lambda states: SlurmNode(
        one.name, states, one.features, one.gres, one.partitions, one.reason, one.cpu_count), _STATES)),
    max_size=12, unique_by=lambda one: one.name,
)  # fmt: skip
_JOBS = st.lists(
    st.builds(
        job, gpu_count=st.integers(-1, 40), cpu_count=st.integers(-1, 300), node_count=st.integers(-1, 9),
        gpus_per_node=st.integers(0, 9), constraints=st.sampled_from(["", "a", "a&b", "c", "a|c", "[", "a*2&b"]),
        partition=st.sampled_from(["", "all", "x", "all,x", ","]), task_count=st.integers(-2, 10**12),
        reason=st.sampled_from(["", "Resources", "Dependency", "\x00", "None"]), is_exclusive=st.booleans(),
        gpu_type=st.sampled_from(["", "a100", "zz"]),
    ), max_size=8,
)  # fmt: skip


@given(_NODES, _JOBS, _JOBS)
def test_counts_are_ordered_and_more_jobs_never_want_less(
    nodes: list[SlurmNode], jobs: list[QueuedJob], more: list[QueuedJob]
) -> None:
    names = [one.name for one in nodes]
    few, many = live_demand(names, nodes, jobs), live_demand(names, nodes, [*jobs, *more])
    assert 0 <= few.active <= few.total <= len(nodes)
    assert 0 <= few.asleep <= few.total - few.active
    assert 0 <= few.wanted <= many.wanted <= few.total
    assert live_demand(names, nodes[::-1], jobs[::-1]) == few


def test_ten_thousand_nodes_and_fifty_thousand_jobs_are_counted() -> None:
    nodes = [node(f"n{number}", features=("gpu", f"host{number}")) for number in range(10_000)]
    jobs = [job(number, constraints=f"host{number % 500}&gpu", cpu_count=number % 32) for number in range(50_000)]
    found = live_demand([one.name for one in nodes], nodes, jobs)
    assert found.wanted == 500
