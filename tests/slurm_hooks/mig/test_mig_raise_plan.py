"""What every plan of raises must hold, on random queues and nodes; and how long a plan takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.actions_config import MigRaise
from slurm_hooks.mig.raise_plan import ClusterState, RaisePlan, plan_raises
from slurm_hooks.mig.raise_run import read_state

from .mig_raise_slurm import NOW_S, FakeNode, FakeSlurm, Job

TYPES = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]
PARTITIONS = ["a", "b", "c"]
types, counts = st.sampled_from(TYPES), st.integers(0, 3)
jobs = st.builds(
    lambda kind, count, comment, partition, reason, priority: Job(
        0, {"TresPerJob": f"gres/gpu:{kind}:{count}" if kind else f"gres/gpu:{count}"}, comment=comment,
        partition=partition, reason=reason, priority=priority,
    ),
    st.sampled_from(["", *TYPES, *TYPES, *TYPES]),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from(["almanac:larger", "", "almanac:larger,almanac:same"]),
    st.sampled_from([*PARTITIONS, "a,b"]),
    st.sampled_from(["Resources", "Priority", "Dependency", "QOSMaxGRESPerUser", "JobHeldUser"]),
    st.integers(0, 20),
)  # fmt: skip
nodes = st.builds(
    lambda gres, used, states, partitions: FakeNode(
        "", gres, {kind: min(used.get(kind, 0), count) for kind, count in gres.items()}, states, tuple(partitions)
    ),
    st.dictionaries(types, counts),
    st.dictionaries(types, counts),
    st.sampled_from([("IDLE",), ("MIXED",), ("MIXED", "PLANNED"), ("IDLE", "DRAIN"), ("DOWN",)]),
    st.sets(st.sampled_from(PARTITIONS), min_size=1),
)


def planned(listed: list[Job], places: list[FakeNode], **values: Any) -> tuple[RaisePlan, ClusterState]:
    for number, each in enumerate(listed, 1):
        each.job_id = number
    for number, node in enumerate(places):
        node.name = f"n{number}"
    slurm = FakeSlurm({each.job_id: each for each in listed}, places)
    state = read_state(slurm, slurm, "lab")
    return plan_raises(state, {}, MigRaise(mode="apply", **values), NOW_S), state


@given(st.lists(jobs, max_size=12), st.lists(nodes, max_size=5))
def test_every_plan_gives_away_only_what_is_idle_and_unwanted(listed: list[Job], places: list[FakeNode]) -> None:
    made, _ = planned(listed, places)
    given_away: Counter[str] = Counter()
    for order in made.orders:
        asked = listed[order.job.job_id - 1]
        new, home = order.new_type, set(asked.partition.split(","))
        assert asked.types == [(order.request.type, 1)]
        assert TYPES.index(new) > TYPES.index(order.request.type)
        assert asked.comment == "almanac:larger"
        assert asked.priority > 0
        assert asked.reason in ("Resources", "Priority")
        fit = [node for node in places if home & set(node.partitions) and not set(node.states) & {"DRAIN", "DOWN"}]
        assert not any(node.gres.get(order.request.type, 0) > node.used.get(order.request.type, 0) for node in fit)
        unwanted = [node for node in fit if not waits_for(listed, new, node)]
        assert any(node.gres.get(new, 0) > node.used.get(new, 0) for node in unwanted)
        given_away[new] += 1
    for kind, count in given_away.items():
        assert count <= sum(node.gres.get(kind, 0) - node.used.get(kind, 0) for node in places)
    ranks = [(-order.job.priority, order.job.job_id) for order in made.orders]
    assert ranks == sorted(ranks)
    assert made.counts.seen == len(made.orders) + made.counts.dropped.total()


def waits_for(listed: list[Job], kind: str, node: FakeNode) -> bool:
    return any(
        each.reason != "JobHeldUser"
        and set(each.partition.split(",")) & set(node.partitions)
        and {asked for asked, _ in each.types} & {kind, ""}
        for each in listed
    )


@given(st.lists(jobs, max_size=12), st.lists(nodes, max_size=5))
def test_the_order_of_nodes_and_records_changes_no_number(listed: list[Job], places: list[FakeNode]) -> None:
    made, state = planned(listed, places)
    turned = ClusterState(state.queue, tuple(reversed(state.nodes)), ())
    again = plan_raises(turned, {}, MigRaise(mode="apply"), NOW_S)
    if made.orders:
        assert again.orders[0].job.job_id == made.orders[0].job.job_id
        assert again.orders[0].new_type == made.orders[0].new_type


def test_a_large_site_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 pending jobs and 1,000 nodes; few larger slices are idle. Quadratic work would take hours."""
    listed = [
        Job(0, {"TresPerJob": "gres/gpu:1g.10gb:1"}, more={"features": f"f{number % 7}"}) for number in range(10_000)
    ]
    places = [
        FakeNode("", {"1g.10gb": 7, "3g.40gb": 2}, {"1g.10gb": 7, "3g.40gb": number % 3}, features=("f1",))
        for number in range(1000)
    ]
    _, state = planned(listed, places)
    monkeypatch.setattr("slurm_hooks.mig.raise_plan.JOBS_PER_RUN", 1000)
    made = plan_raises(state, {}, MigRaise(mode="apply"), NOW_S)
    assert len(made.orders) > 900
