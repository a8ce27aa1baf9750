"""Raising pending jobs to a larger slice, on a made-up Slurm that answers as 24.11 and 26.05 do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.actions_config import MigRaise
from almanac.errors import CommandError, ConfigError, StoreError
from slurm_hooks.mig.raise_log import RaiseLog
from slurm_hooks.mig.raise_plan import RaisePlan, plan_raises
from slurm_hooks.mig.raise_run import RaiseActor, RaiseOutcome, read_state, require_release
from slurm_hooks.mig.raise_types import chains, one_slice

from .mig_raise_slurm import FakeNode, FakeSlurm, Job, Killed

SMALL, MIDDLE, LARGE = "1g.10gb", "2g.20gb", "3g.40gb"
ASK = {
    "TresPerJob": f"gres/gpu:{SMALL}:1", "TresPerNode": f"gres/gpu:{SMALL}:1", "TresPerTask": f"gres/gpu:{SMALL}=1",
}  # fmt: skip
ASK_LINE = f"TresPerJob={ASK['TresPerJob']}"
APPLY = MigRaise(mode="apply")


def job(number: int = 1, key: str = "TresPerJob", text: str = "", **values: Any) -> Job:
    return Job(number, {key: text or ASK[key]}, **values)


def full_and_idle(large: int = 1) -> list[FakeNode]:
    """A node whose small slices are all busy, and one with idle large ones."""
    return [FakeNode("n1", {SMALL: 7}, {SMALL: 7}), FakeNode("n2", {LARGE: large}, states=("IDLE",))]


@dataclass
class Site:
    """The fake Slurm, and almanac's record of it."""

    slurm: FakeSlurm
    folder: Path
    config: MigRaise = APPLY
    plans: list[RaisePlan] = field(default_factory=list)

    @property
    def log(self) -> RaiseLog:
        return RaiseLog(self.folder / "actions")

    def run(self, is_clearing: bool = False, look_s: float = 3.0) -> RaiseOutcome:
        now_s = int(self.slurm.clock())
        state = read_state(self.slurm, self.slurm, "lab")
        made = plan_raises(state, self.log.newest("lab", now_s), self.config, now_s, is_clearing)
        self.plans.append(made)
        actor = RaiseActor(self.slurm, self.log, "lab", self.slurm.clock, self.slurm.sleep, look_s)
        return actor.apply(made)

    def lines(self) -> list[dict[str, Any]]:
        texts = [path.read_text() for path in sorted((self.folder / "actions").glob("*.jsonl"))]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def why(self) -> list[str]:
        return list(self.plans[-1].counts.dropped)


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Site]:
    return lambda jobs, nodes=None: Site(
        FakeSlurm({each.job_id: each for each in jobs}, nodes or full_and_idle()), tmp_path
    )


@pytest.mark.parametrize("key", list(ASK))
def test_a_job_starts_on_an_idle_larger_slice(site: Callable[..., Site], key: str) -> None:
    made = site([job(key=key)])
    assert made.run().gone == 1
    raised = made.slurm.jobs[1]
    assert (raised.state, raised.submit_s, raised.priority) == ("RUNNING", 1_795_463_400, 100)
    assert raised.requests == {key: ASK[key].replace(SMALL, LARGE)}
    assert [line["what"] for line in made.lines()] == ["raise", "started"]


def test_other_terms_of_the_request_stay(site: Callable[..., Site]) -> None:
    made = site([job(key="TresPerTask", text=f"cpu=4,gres/gpu:{SMALL}=1")])
    made.run()
    assert made.slurm.jobs[1].requests == {"TresPerTask": f"cpu=4,gres/gpu:{LARGE}=1"}


@pytest.mark.parametrize(
    "left",
    [
        {"comment": ""},
        {"comment": "xalmanac:larger"},
        {"comment": "almanac:larger2 almanac:larger.\u202e"},
        {"comment": "almanac:larger almanac:same"},
        {"comment": "almanac:\nlarger"},
        {"priority": 0, "reason": "JobHeldUser"},
        {"reason": "Dependency"},
        {"reason": "BeginTime"},
        {"reason": "None"},
        {"more": {"array_job_id": {"set": True, "infinite": False, "number": 1}}},
        {"more": {"het_job_id": {"set": True, "infinite": False, "number": 1}}},
        {"more": {"node_count": {"set": True, "infinite": False, "number": 2}}},
        {"more": {"features": "a|b"}},
        {"more": {"features": "other"}},
        {"more": {"required_nodes": "n1"}},
        {"more": {"required_nodes": "n[1-2]"}},
        {"more": {"excluded_nodes": "n2"}},
        {"more": {"shared": ["none"]}},
        {"more": {"resv_name": "r"}},
        {"more": {"licenses": "matlab:1"}},
        {"more": {"cpus": {"set": True, "infinite": False, "number": 33}}},
        {"more": {"memory_per_node": {"set": True, "infinite": False, "number": 64001}}},
        {"partition": "other"},
        {"partition": ""},
    ],
)
def test_jobs_that_are_left_alone(site: Callable[..., Site], left: dict[str, Any]) -> None:
    made = site([job(**left)])
    made.run()
    assert made.slurm.sent == []
    assert made.lines() == []


@pytest.mark.parametrize(
    "requests",
    [
        {"TresPerJob": f"gres/gpu:{SMALL}:2"},
        {"TresPerJob": "gres/gpu:1"},
        {"TresPerJob": "gres/gpu"},
        {"TresPerJob": "gres/gpu:a100:1"},
        {"tres_per_socket": f"gres/gpu:{SMALL}:1"},
        {"TresPerJob": ASK["TresPerJob"], "TresPerNode": ASK["TresPerNode"]},
        {"TresPerNode": f"gres/gpu:{SMALL}:1,gres/tmp:5"},
        {"TresPerNode": f"gres/gpu:{SMALL}:1,gres/gpu:{MIDDLE}:1"},
        {"TresPerNode": "gres/shard:1"},
    ],
)
def test_requests_that_no_update_is_known_for(site: Callable[..., Site], requests: dict[str, str]) -> None:
    made = site([Job(1, requests)])
    made.run()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    ("states", "more"),
    [
        (("IDLE", "DRAIN"), {}), (("DOWN",), {}), (("IDLE", "POWERED_DOWN"), {}), (("IDLE", "MAINTENANCE"), {}),
        (("IDLE", "NOT_RESPONDING"), {}), (("IDLE", "INVALID_REG"), {}), ((), {}), (("IDLE",), {"reservation": "r"}),
        (("IDLE",), {"gres_used": "gpu:?"}), (("IDLE",), {"gres_used": ""}), (("IDLE",), {"gres_used": "gpu:0"}),
    ],
)  # fmt: skip
def test_nodes_that_no_job_is_raised_to(
    site: Callable[..., Site], states: tuple[str, ...], more: dict[str, Any]
) -> None:
    made = site([job()], [full_and_idle()[0], FakeNode("n2", {LARGE: 1}, states=states, more=more)])
    made.run()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    "other",
    [
        job(2, text=f"gres/gpu:{LARGE}:4", comment="", reason="Resources"),
        job(2, text=f"gres/gpu:{LARGE}:1", comment="", reason="Dependency"),
        job(2, text=f"gres/gpu:{LARGE}:1", comment="", reason="QOSMaxJobsPerUserLimit"),
        job(2, text="gres/gpu:8", comment=""),
        Job(2, {"tres_per_socket": f"gres/gpu:{LARGE}:1"}, reason="Dependency"),
        job(2, text=f"gres/gpu:{LARGE}:1", reason="BeginTime", more={"eligible_time": 1_795_464_000 + 3000}),
    ],
)
def test_a_type_that_somebody_waits_for_is_not_given_away(site: Callable[..., Site], other: Job) -> None:
    made = site([job(), other])
    made.slurm.is_scheduling = False
    made.run()
    assert made.slurm.sent == []


@pytest.mark.parametrize(
    "other",
    [
        job(2, text=f"gres/gpu:{LARGE}:1", reason="JobHeldUser", priority=0),
        job(2, text=f"gres/gpu:{LARGE}:1", reason="BadConstraints", priority=0),
        job(2, text=f"gres/gpu:{LARGE}:1", reason="BeginTime", more={"eligible_time": 1_795_464_000 + 9000}),
        job(2, text=f"gres/gpu:{LARGE}:1", partition="elsewhere"),
    ],
)
def test_jobs_that_cannot_take_the_type_soon_do_not_count(site: Callable[..., Site], other: Job) -> None:
    made = site([job(), other])
    made.run()
    assert made.slurm.jobs[1].state == "RUNNING"
    assert {number for number, _ in made.slurm.sent} == {1}


def test_a_job_whose_own_type_is_idle_waits_for_slurm(site: Callable[..., Site]) -> None:
    made = site([job()], [FakeNode("n1", {SMALL: 7, LARGE: 1}, {SMALL: 6})])
    made.slurm.is_scheduling = False
    made.run()
    assert made.slurm.sent == []


def test_the_first_jobs_of_the_queue_get_the_idle_slices_and_no_more(site: Callable[..., Site]) -> None:
    made = site([job(1, priority=5), job(2, priority=9), job(3, priority=7), job(4, priority=8)], full_and_idle(2))
    assert made.run().gone == 2
    assert [number for number, _ in made.slurm.sent] == [2, 4]


def test_a_limit_gives_the_job_its_own_type_back_at_once(site: Callable[..., Site]) -> None:
    made = site([job()])
    made.slurm.limits = {LARGE}
    assert made.run().undone == 1
    after = made.slurm.jobs[1]
    assert (after.requests, after.reason, after.priority) == ({"TresPerJob": ASK["TresPerJob"]}, "Resources", 100)
    assert [line["what"] for line in made.lines()] == ["raise", "undo", "undone"]
    made.run()
    assert len(made.slurm.sent) == 2, "not again within an hour"
    made.slurm.now_s += 3601
    made.run()
    assert len(made.slurm.sent) == 4


def test_a_job_that_still_waits_gets_its_own_type_back(site: Callable[..., Site]) -> None:
    made = site([job()])
    taken = made.slurm.nodes[1].used
    made.slurm.before = lambda command: taken.update({LARGE: 1}) if command.startswith("update") else None
    assert made.run().waiting == 1
    made.slurm.now_s += 300
    assert made.run().waiting == 0
    assert made.slurm.jobs[1].types == [(LARGE, 1)], "within 10 minutes"
    made.slurm.now_s += 400
    assert made.run().undone == 1
    assert made.slurm.jobs[1].requests == {"TresPerJob": ASK["TresPerJob"]}
    assert [line["what"] for line in made.lines()] == ["raise", "raised", "undo", "undone"]


@pytest.mark.parametrize("text", [f"gres/gpu:{SMALL}:1", f"gres/gpu:{MIDDLE}:1", f"gres/gpu:{LARGE}:2"])
def test_the_owners_later_change_wins(site: Callable[..., Site], text: str) -> None:
    made = site([job()])
    made.slurm.nodes.append(FakeNode("n3", {MIDDLE: 1}, {MIDDLE: 1}))
    taken = made.slurm.nodes[1].used
    made.slurm.before = lambda command: taken.update({LARGE: 1}) if command.startswith("update") else None
    made.run()
    made.slurm.set_request(made.slurm.jobs[1], "TresPerJob", text)
    made.slurm.before = lambda command: None
    taken.clear()
    made.slurm.is_scheduling = False
    for _ in range(3):
        made.slurm.now_s += 4000
        made.run()
    assert len(made.slurm.sent) == 1
    assert made.lines()[-1]["what"] == "owner"


def test_opting_out_and_clearing_give_the_own_type_back(site: Callable[..., Site]) -> None:
    made = site([job(1), job(2)], full_and_idle(2))
    taken = made.slurm.nodes[1].used
    made.slurm.before = lambda command: taken.update({LARGE: 2}) if command.startswith("update") else None
    assert made.run().waiting == 2
    made.slurm.jobs[1].comment = ""
    assert made.run().undone == 1
    assert made.run(is_clearing=True).undone == 1
    assert [each.types for each in made.slurm.jobs.values()] == [[(SMALL, 1)]] * 2


def test_a_partition_can_opt_in_for_its_jobs(site: Callable[..., Site]) -> None:
    made = site([job(1, comment="\ud800 ☃ {}"), job(2, comment="almanac:same")], full_and_idle(2))
    made.config = replace(APPLY, partitions=("all",))
    made.run()
    assert [number for number, _ in made.slurm.sent] == [1]


def test_a_requeued_job_gets_its_own_type_back(site: Callable[..., Site]) -> None:
    made = site([job()])
    made.run()
    running = made.slurm.jobs[1]
    running.state, running.reason, running.restarts = "PENDING", "BeginTime", 1
    running.submit_s = int(made.slurm.now_s) + 60
    made.slurm.now_s += 60
    assert made.run().undone == 1
    assert running.requests == {"TresPerJob": ASK["TresPerJob"]}


def test_a_number_that_comes_again_is_another_job(site: Callable[..., Site]) -> None:
    made = site([job()])
    made.run()
    made.slurm.jobs[1] = job(text=f"gres/gpu:{LARGE}:1", submit_s=1_795_463_999)
    made.slurm.now_s += 9000
    made.run()
    assert len(made.slurm.sent) == 1


def test_nothing_is_sent_that_is_not_on_disk(site: Callable[..., Site]) -> None:
    made = site([job()])
    (made.folder / "actions").write_text("in the way")
    with pytest.raises(StoreError):
        made.run()
    assert made.slurm.sent == []


def test_an_unreadable_record_may_wait_for_any_type(site: Callable[..., Site]) -> None:
    made = site([job(), job(2, more={"priority": "?"})])
    made.run()
    assert made.slurm.sent == []
    assert made.why() == ["pending job that cannot be read: nothing is raised"]


def test_a_slurm_that_does_not_take_the_change(site: Callable[..., Site]) -> None:
    made = site([job()])
    made.slurm.is_deaf = True
    assert made.run().refused == 1
    assert made.slurm.jobs[1].types == [(SMALL, 1)]


def test_a_log_that_somebody_wrote_sends_no_other_command(site: Callable[..., Site]) -> None:
    made = site([job(text=f"gres/gpu:{LARGE}:1", reason="Resources")], [full_and_idle()[0]])
    (made.folder / "actions").mkdir()
    line = {
        "what": "raised", "time_s": 1, "cluster": "lab", "job_id": 1, "address": "1\nshutdown",
        "submit_s": 1_795_463_400, "restarts": 0, "key": "TresPerJob",
        "own": "gres/gpu:1g.10gb:1\nshutdown", "new": f"gres/gpu:{LARGE}:1",
        "type": SMALL, "new_type": LARGE, "reason": "",
    }  # fmt: skip
    (made.folder / "actions/mig-raise-2026-11-23.jsonl").write_text(json.dumps(line) + '\n{"what": "rai')
    made.run()
    assert made.slurm.sent == []


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


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(
            ["kill", "lost", "take", "free", "owner", "hold", "optout", "limit", "drain", "gone", "cancel"]
        ),
        st.integers(1, 4),
    ),
    max_size=6,
)


class World:
    """Things happen to jobs and nodes at given commands; every command must be in the record before it is sent."""

    def __init__(self, made: Site, events: list[tuple[int, str, int]]) -> None:
        self.made, self.events, self.count = made, list(events), 0
        self.changed: set[int] = set()
        self.sent_when_changed: dict[int, int] = {}

    def __call__(self, command: str) -> None:
        if command.startswith("update"):
            number = int(command.split("=")[1].split()[0])
            last = [line for line in self.made.lines() if line["job_id"] == number][-1]
            text = command.split(" ", 2)[2].split("=", 1)[1]
            assert last["what"] in ("raise", "undo")
            assert text == (last["new"] if last["what"] == "raise" else last["own"])
        self.count += 1
        for event in [each for each in self.events if each[0] <= self.count]:
            self.events.remove(event)
            self.happen(event[1], event[2], command)

    def happen(self, what: str, number: int, command: str) -> None:
        slurm, one = self.made.slurm, self.made.slurm.jobs.get(number)
        node = slurm.nodes[1]
        if what == "kill":
            raise Killed
        if what == "lost":
            raise CommandError("Unable to contact slurm controller")
        if what in ("take", "free"):
            node.used = {LARGE: 2} if what == "take" else {}
        elif what == "limit":
            slurm.limits ^= {LARGE}
        elif what == "drain":
            node.states = ("IDLE", "DRAIN")
        elif one and one.state == "PENDING" and what == "owner" and not command.startswith(("update", "release")):
            slurm.set_request(one, next(iter(one.requests)), f"gres/gpu:{SMALL}:2")
            self.changed.add(number)
        elif one and one.state == "PENDING" and what == "hold":
            one.reason, one.priority = "JobHeldUser", 0
        elif one and what == "optout":
            one.comment = ""
        elif one and what == "gone":
            del slurm.jobs[number]


@examples(0.6)
@given(EVENTS, st.lists(st.sampled_from(["in", "out", "held"]), min_size=4, max_size=4), st.integers(0, 2))
def test_whatever_happens_no_job_is_left_worse(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, str, int]], kinds: list[str], free: int
) -> None:
    jobs = [
        job(number, comment="almanac:larger" if kind != "out" else "", **held(kind))
        for number, kind in enumerate(kinds, 1)
    ]
    slurm = FakeSlurm({each.job_id: each for each in jobs}, full_and_idle(2))
    slurm.nodes[1].used = {LARGE: 2 - free}
    made = Site(slurm, tmp_path_factory.mktemp("raise"))
    world = World(made, events)
    slurm.before = world
    for _ in range(8):
        try:
            made.run()
        except (Killed, CommandError):
            slurm.schedule()
        slurm.now_s += 200
    slurm.before = lambda command: None
    made.run(is_clearing=True)
    made.run(is_clearing=True)
    for one in slurm.jobs.values():
        if one.state == "PENDING" and one.job_id not in world.changed:
            assert one.requests == {"TresPerJob": ASK["TresPerJob"]}
            assert one.reason != "BadConstraints"
            assert one.priority > 0 or one.reason == "JobHeldUser"
    untouched = {number for number, kind in enumerate(kinds, 1) if kind != "in"}
    assert not untouched & {number for number, _ in slurm.sent}


def held(kind: str) -> dict[str, Any]:
    return {"reason": "JobHeldUser", "priority": 0} if kind == "held" else {}


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"comment": "almanac:same"},
        {"priority": 0, "reason": "JobHeldUser"},
        {"partition": "other"},
        {"requests": {"TresPerJob": "gres/gpu:2g.20gb:1"}},
        {"more": {"features": "ib"}},
        {"more": {"admin_comment": "leave it"}},
        {"submit_s": 7, "user": "bob"},
        {"state": "RUNNING"},
    ],
)
def test_no_order_follows_a_change_of_the_job(tmp_path: Path, change: dict[str, Any], is_limited: bool) -> None:
    """Whatever look of a run the change comes before. With a limit on the larger type, the job is healed, too."""
    for look in range(1, 9):
        (folder := tmp_path / str(look)).mkdir()
        site = Site(FakeSlurm({1: job()}, full_and_idle(), is_scheduling=is_limited), folder)
        slurm, after, looks = site.slurm, list[str](), 0
        slurm.limits = {LARGE} if is_limited else set()
        state = read_state(slurm, slurm, "lab")
        made = plan_raises(state, {}, APPLY, int(slurm.clock()))

        def before(command: str, slurm: FakeSlurm = slurm, after: list[str] = after, look: int = look) -> None:
            nonlocal looks
            if not command.startswith("squeue"):
                after.append(command)
                return
            looks += 1
            if looks == look:
                after.clear()
                slurm.jobs[1] = replace(slurm.jobs[1], **change)
                slurm.is_scheduling = False

        slurm.before = before
        RaiseActor(slurm, site.log, "lab", slurm.clock, slurm.sleep, 3.0).apply(made)
        if looks < look:
            break
        # A look decides anew whether a raised job needs its own type back: that undoes nothing of its owner's.
        assert all(line == f"update jobid=1 {ASK_LINE}" for line in after) if look > 1 else after == []
        assert {name: getattr(slurm.jobs[1], name) for name in change if name != "requests" or look == 1} == {
            name: value for name, value in change.items() if name != "requests" or look == 1
        }
    assert looks >= 2 or look > 1
