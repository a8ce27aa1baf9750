"""Raising pending jobs to a larger slice, on a made-up Slurm that answers as 24.11 and 26.05 do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_slurm import LARGE, NOW_S, SMALL, FakeNode, FakeSlurm, Job, slice_job, sliced, start_raising

from almanac.actions_config import MigRaise
from almanac.errors import ConfigError
from slurm.backend import Reservation
from slurm_hooks.jobs.engine import JobOutcome, JobPlan, require_release
from slurm_hooks.jobs.log import ChangeHistory
from slurm_hooks.mig.raise_plan import ClusterState, chains, one_slice, plan_raises, read_state

MIDDLE = "2g.20gb"
ASK = {
    "TresPerJob": f"gres/gpu:{SMALL}:1", "TresPerNode": f"gres/gpu:{SMALL}:1", "TresPerTask": f"gres/gpu:{SMALL}=1",
}  # fmt: skip
IDLE = "idle, nobody waits for it"


def update(number: int, kind: str) -> str:
    return f"update jobid={number} TresPerJob=gres/gpu:{kind}:1"


@pytest.mark.parametrize("key", list(ASK))
def test_a_job_starts_on_an_idle_larger_slice(tmp_path: Path, key: str) -> None:
    made = start_raising(tmp_path, slice_job(key=key))
    assert made() == JobOutcome(started=1)
    raised = made.slurm.jobs[1]
    assert (raised.state, raised.submit_s, raised.priority) == ("RUNNING", 1_795_463_400, 100)
    assert raised.requests == {key: ASK[key].replace(SMALL, LARGE)}
    assert made.story == [f"raise: {IDLE}", "raised: the job waits no more"]


def test_other_terms_of_the_request_stay(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job(key="TresPerTask", text=f"cpu=4,gres/gpu:{SMALL}=1"))
    made()
    assert made.slurm.jobs[1].requests == {"TresPerTask": f"cpu=4,gres/gpu:{LARGE}=1"}


@pytest.mark.parametrize(
    ("why", "left"),
    [
        ("not opted in", {"comment": ""}),
        ("not opted in", {"comment": "xalmanac:larger"}),
        ("not opted in", {"comment": "almanac:larger2 almanac:larger.\u202e"}),
        ("not opted in", {"comment": "almanac:larger almanac:same"}),
        ("not opted in", {"comment": "almanac:larger" + 99_999 * " "}),
        ("not opted in", {"comment": "almanac:\nlarger"}),
        ("held", {"priority": 0, "reason": "JobHeldUser"}),
        ("does not wait", {"reason": "Dependency"}),
        ("does not wait", {"reason": "BeginTime"}),
        ("does not wait", {"reason": "None"}),
        ("an array", {"more": {"array_job_id": {"set": True, "infinite": False, "number": 1}}}),
        ("several", {"more": {"het_job_id": {"set": True, "infinite": False, "number": 1}}}),
        ("several", {"more": {"node_count": {"set": True, "infinite": False, "number": 2}}}),
        ("several", {"more": {"features": "a|b"}}),
        ("no larger", {"more": {"features": "other"}}),
        ("no larger", {"more": {"required_nodes": "n1"}}),
        ("no larger", {"more": {"required_nodes": "n[1-2]"}}),
        ("no larger", {"more": {"excluded_nodes": "n2"}}),
        ("several", {"more": {"shared": ["none"]}}),
        ("several", {"more": {"resv_name": "r"}}),
        ("several", {"more": {"licenses": "matlab:1"}}),
        ("no larger", {"more": {"cpus": {"set": True, "infinite": False, "number": 33}}}),
        ("no larger", {"more": {"memory_per_node": {"set": True, "infinite": False, "number": 64001}}}),
        ("no larger", {"partition": "other"}),
        ("no larger", {"partition": ""}),
    ],
)
def test_jobs_that_are_left_alone(tmp_path: Path, why: str, left: dict[str, Any]) -> None:
    made = start_raising(tmp_path, slice_job(**left))
    made()
    assert made.slurm.sent == []
    assert made.kinds == []
    assert [each[: len(why)] for each in list(made.why)] == [why]


@pytest.mark.parametrize(
    "requests",
    [
        {"TresPerJob": f"gres/gpu:{SMALL}:2"},
        {"TresPerJob": "gres/gpu:1"},
        {"TresPerJob": "gres/gpu"},
        {"TresPerJob": "gres/gpu:a100:1"},
        {"TresPerSocket": f"gres/gpu:{SMALL}:1"},
        {"TresPerJob": ASK["TresPerJob"], "TresPerNode": ASK["TresPerNode"]},
        {"TresPerNode": f"gres/gpu:{SMALL}:1,gres/tmp:5"},
        {"TresPerNode": f"gres/gpu:{SMALL}:1,gres/gpu:{MIDDLE}:1"},
        {"TresPerNode": "gres/shard:1"},
    ],
)
def test_requests_that_no_update_is_known_for(tmp_path: Path, requests: dict[str, str]) -> None:
    made = start_raising(tmp_path, slice_job(requests=requests))
    made()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    ("states", "more"),
    [
        (("IDLE", "DRAIN"), {}), (("DOWN",), {}), (("IDLE", "POWERED_DOWN"), {}), (("IDLE", "MAINTENANCE"), {}),
        (("IDLE", "NOT_RESPONDING"), {}), (("IDLE", "INVALID_REG"), {}), ((), {}), (("IDLE",), {"reservation": "r"}),
        (("IDLE",), {"gres_used": "gpu:?"}), (("IDLE",), {"gres_used": ""}), (("IDLE",), {"gres_used": "gpu:0"}),
    ],
)  # fmt: skip
def test_nodes_that_no_job_is_raised_to(tmp_path: Path, states: tuple[str, ...], more: dict[str, Any]) -> None:
    made = start_raising(
        tmp_path, slice_job(), nodes=[sliced()[0], FakeNode("n2", {LARGE: 1}, states=states, more=more)]
    )
    made()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    "other",
    [
        slice_job(2, text=f"gres/gpu:{LARGE}:4", comment="", reason="Resources"),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", comment="", reason="Dependency"),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", comment="", reason="QOSMaxJobsPerUserLimit"),
        slice_job(2, text="gres/gpu:8", comment=""),
        slice_job(2, requests={"TresPerSocket": f"gres/gpu:{LARGE}:1"}, reason="Dependency"),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", reason="BeginTime", more={"eligible_time": 1_795_464_000 + 3000}),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", reason="Cleaning", more={"job_state": ["PENDING", "EXPEDITING"]}),
    ],
)
def test_a_type_that_somebody_waits_for_is_not_given_away(tmp_path: Path, other: Job) -> None:
    made = start_raising(tmp_path, slice_job(), other)
    made.slurm.is_scheduling = False
    made()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    "other",
    [
        slice_job(2, text=f"gres/gpu:{LARGE}:1", reason="JobHeldUser", priority=0),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", reason="BadConstraints", priority=0),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", reason="BeginTime", more={"eligible_time": 1_795_464_000 + 9000}),
        slice_job(2, text=f"gres/gpu:{LARGE}:1", partition="elsewhere"),
    ],
)
def test_jobs_that_cannot_take_the_type_soon_do_not_count(tmp_path: Path, other: Job) -> None:
    made = start_raising(tmp_path, slice_job(), other)
    made()
    assert made.slurm.jobs[1].state == "RUNNING"
    assert made.slurm.sent == [update(1, LARGE)]


@pytest.mark.parametrize(("begin_s", "end_s", "gone"), [(3599, 9000, 0), (3600, 9000, 1), (-60, 1, 0), (-60, 0, 1)])
def test_a_reservation_that_begins_before_the_job_must_end_keeps_its_node(
    tmp_path: Path, begin_s: int, end_s: int, gone: int
) -> None:
    made = start_raising(tmp_path, slice_job())
    now_s = int(made.slurm.now_s)
    made.slurm.reserved = [Reservation(("n2",), now_s + begin_s, now_s + end_s)]
    assert made() == JobOutcome(started=gone)


def test_a_job_whose_own_type_is_idle_waits_for_slurm(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job(), nodes=[FakeNode("n1", {SMALL: 7, LARGE: 1}, {SMALL: 6})])
    made.slurm.is_scheduling = False
    made()
    assert made.slurm.sent == []


def test_the_first_jobs_of_the_queue_get_the_idle_slices_and_no_more(tmp_path: Path) -> None:
    made = start_raising(
        tmp_path, *(slice_job(number, priority=rank) for number, rank in enumerate((5, 9, 7, 8), 1)), nodes=sliced(2)
    )
    assert made() == JobOutcome(started=2)
    assert made.slurm.sent == [update(2, LARGE), update(4, LARGE)]


def test_a_limit_gives_the_job_its_own_type_back_at_once(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job())
    made.slurm.limits = {LARGE}
    assert made() == JobOutcome(undone=1)
    after = made.slurm.jobs[1]
    assert (after.requests, after.reason, after.priority) == ({"TresPerJob": ASK["TresPerJob"]}, "Resources", 100)
    assert made.story == [f"raise: {IDLE}", *(f"{what}: Slurm: QOSMAXGRESPERUSER" for what in ("undo", "undone"))]
    made()
    assert len(made.slurm.sent) == 2, "not again within an hour"
    made.slurm.now_s += 3601
    made()
    assert len(made.slurm.sent) == 4


def test_a_job_that_still_waits_gets_its_own_type_back(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job())
    taken = made.slurm.nodes[1].used
    made.slurm.before = lambda command: taken.update({LARGE: 1}) if command.startswith("update") else None
    assert made() == JobOutcome(waiting=1)
    made.slurm.now_s += 300
    assert made() == JobOutcome()
    assert made.slurm.jobs[1].types == [(LARGE, 1)], "within 10 minutes"
    made.slurm.now_s += 400
    assert made() == JobOutcome(undone=1)
    assert made.slurm.jobs[1].requests == {"TresPerJob": ASK["TresPerJob"]}
    late = "still waits after 12 min"
    assert made.story == [f"raise: {IDLE}", "raised: Slurm shows the new request", f"undo: {late}", f"undone: {late}"]


def test_opting_out_and_clearing_give_the_own_type_back(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job(1), slice_job(2), nodes=sliced(2))
    taken = made.slurm.nodes[1].used
    made.slurm.before = lambda command: taken.update({LARGE: 2}) if command.startswith("update") else None
    assert made() == JobOutcome(waiting=2)
    made.slurm.jobs[1].comment = ""
    assert made() == JobOutcome(undone=1)
    assert made(is_clearing=True) == JobOutcome(undone=1)
    assert [each.types for each in made.slurm.jobs.values()] == [[(SMALL, 1)]] * 2


def test_a_partition_can_opt_in_for_its_jobs(tmp_path: Path) -> None:
    made = start_raising(
        tmp_path, slice_job(1, comment="\ud800 ☃ {}"), slice_job(2, comment="almanac:same"), nodes=sliced(2)
    )
    made.settings = MigRaise(mode="apply", partitions=("all",))
    made()
    assert made.slurm.sent == [update(1, LARGE)]


def test_a_requeued_job_gets_its_own_type_back(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job())
    made()
    running = made.slurm.jobs[1]
    running.state, running.reason, running.restarts = "PENDING", "BeginTime", 1
    running.submit_s = int(made.slurm.now_s) + 60
    made.slurm.now_s += 60
    assert made() == JobOutcome(undone=1)
    assert made.story[-2:] == ["undo: Slurm: BEGINTIME (1, 0.000)", "undone: Slurm: BEGINTIME (1, 0.000)"]
    assert running.requests == {"TresPerJob": ASK["TresPerJob"]}


def test_an_unreadable_record_may_wait_for_any_type(tmp_path: Path) -> None:
    made = start_raising(tmp_path, slice_job(), slice_job(2, more={"submit_time": "?"}))
    made()
    assert made.slurm.sent == []
    assert list(made.why) == ["job that cannot be read: nothing is raised"]


def test_a_request_too_long_to_be_sent_keeps_no_other_job_from_its_slice(tmp_path: Path) -> None:
    long = ",".join([*["cpu=4"] * 300, f"gres/gpu:{SMALL}=1"])
    made = start_raising(tmp_path, slice_job(1, key="TresPerTask", text=long), slice_job(2))
    assert made().started == 1
    assert list(made.why) == ["its request is none that almanac can change"]
    assert made.slurm.sent == [update(2, LARGE)]


@pytest.mark.parametrize("release", ["22.05.8", "23.02.7", "23.11.0", "24.05.9", "", "unknown"])
def test_older_releases_are_refused(release: str) -> None:
    with pytest.raises(ConfigError, match="cannot change the GPU type"):
        require_release(release)


@pytest.mark.parametrize("release", ["24.11.5", "25.05.1", "26.05.5", "26.05.0-rc1"])
def test_newer_releases(release: str) -> None:
    require_release(release)


def test_order_of_sizes() -> None:
    types = {"1g.10gb", "3g.40gb", "2g.20gb", "7g.80gb", "a100", "1g.10gb+me", "a100_1g.5gb", "a100_2g.10gb", "tesla"}
    assert chains(types) == (("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"), ("a100_1g.5gb", "a100_2g.10gb"))
    assert chains({"2g.10gb", "1g.20gb", "1g.10gb", "4g.40gb", "3g.40gb"}) == (
        ("1g.10gb", "2g.10gb", "3g.40gb", "4g.40gb"),
    ), "1g.20gb has fewer compute slices than 2g.10gb"
    assert chains(types, ["1g.10gb", "a100"]) == (("1g.10gb", "a100"),)


@given(st.dictionaries(st.sampled_from(["TresPerJob", "TresPerNode", "TresPerTask", "TresPerSocket"]), st.text()))
def test_no_text_makes_another_command(requests: dict[Any, str]) -> None:
    found = one_slice(requests)
    if found:
        assert not set(found.of(LARGE)) & set(" \n\r\t'\"\\;")


TYPES = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]
PARTITIONS = ["a", "b", "c"]
types, counts = st.sampled_from(TYPES), st.integers(0, 3)
jobs = st.builds(
    lambda kind, count, comment, partition, reason, priority: slice_job(
        0, text=f"gres/gpu:{kind}:{count}" if kind else f"gres/gpu:{count}", comment=comment,
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


def planned(listed: list[Job], places: list[FakeNode], **values: Any) -> tuple[JobPlan, ClusterState]:
    for number, each in enumerate(listed, 1):
        each.job_id = number
    for number, node in enumerate(places):
        node.name = f"n{number}"
    slurm = FakeSlurm({each.job_id: each for each in listed}, places)
    state = read_state(slurm, "lab", slurm.reserved)
    return plan_raises(state, ChangeHistory(), MigRaise(mode="apply", **values), NOW_S), state


@given(st.lists(jobs, max_size=12), st.lists(nodes, max_size=5))
def test_every_plan_gives_away_only_what_is_idle_and_unwanted(listed: list[Job], places: list[FakeNode]) -> None:
    made, _ = planned(listed, places)
    given_away: Counter[str] = Counter()
    for order in made.changes:
        asked = listed[order.job.job_id - 1]
        own, new, home = (
            one_slice({order.line.key: order.line.own}),
            order.line.gpu_type,
            set(asked.partition.split(",")),
        )
        assert own
        assert asked.types == [(own.type, 1)]
        assert TYPES.index(new) > TYPES.index(own.type)
        assert asked.comment == "almanac:larger"
        assert asked.priority > 0
        assert asked.reason in ("Resources", "Priority")
        fit = [node for node in places if home & set(node.partitions) and not set(node.states) & {"DRAIN", "DOWN"}]
        assert not any(node.gres.get(own.type, 0) > node.used.get(own.type, 0) for node in fit)
        unwanted = [node for node in fit if not waits_for(listed, new, node)]
        assert any(node.gres.get(new, 0) > node.used.get(new, 0) for node in unwanted)
        given_away[new] += 1
    for kind, count in given_away.items():
        assert count <= sum(node.gres.get(kind, 0) - node.used.get(kind, 0) for node in places)
    ranks = [(-order.job.priority, order.job.job_id) for order in made.changes]
    assert ranks == sorted(ranks)
    assert made.counts.seen == len(made.changes) + made.counts.dropped.total()


def waits_for(listed: list[Job], kind: str, node: FakeNode) -> bool:
    return any(
        each.reason != "JobHeldUser"
        and set(each.partition.split(",")) & set(node.partitions)
        and {asked for asked, _ in each.types} & {kind, ""}
        for each in listed
    )


def test_a_large_site_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 pending jobs and 1,000 nodes; few larger slices are idle. Quadratic work would take hours."""
    listed = [slice_job(0, more={"features": f"f{number % 7}"}) for number in range(10_000)]
    places = [
        FakeNode("", {"1g.10gb": 7, "3g.40gb": 2}, {"1g.10gb": 7, "3g.40gb": number % 3}, features=("f1",))
        for number in range(1000)
    ]
    _, state = planned(listed, places)
    monkeypatch.setattr("slurm_hooks.mig.raise_plan.JOBS_PER_RUN", 1000)
    made = plan_raises(state, ChangeHistory(), MigRaise(mode="apply"), NOW_S)
    assert len(made.changes) > 900
