"""`almanac mig apply` on a Slurm in memory, which ends the test where a promise is broken."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_world import HALVES, SEVEN, WHOLE, KilledError, World, change
from profiles import examples

from slurm_hooks.mig.include import gres_of_nodes
from telemetry.slurm.backend import Node, Reservation


def apply(world: World, *changes: object, **options: object) -> dict[str, str]:
    run = world.run(**options)
    run.drive()
    run.begin(changes)  # type: ignore[arg-type]
    run.drive()
    return {node: each.what for node, each in run.outcomes.items()}


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_a_free_node_gets_the_layout_and_is_resumed(tmp_path: Path, release: str) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN}, release)
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "done"}
    node = world.nodes["n1"]
    assert (node.layout, node.gres, node.states) == (HALVES, "gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1", {"IDLE"})
    assert world.logged() == ["drain", "apply", "write gres", "reconfigure", "verify", "resume", "done"]
    assert gres_of_nodes((tmp_path / "almanac-mig.conf").read_text())["n2"] == "gpu:1g.10gb:7,gpu:a100:1"


def test_what_is_not_free_or_not_allowed_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, {f"n{i}": SEVEN for i in range(1, 8)}, demand=frozenset({"1g.10gb"}))
    world.nodes["n1"].jobs = 1
    world.nodes["n2"].states = {"IDLE", "DRAIN"}
    world.nodes["n3"].states = {"IDLE", "PLANNED"}
    world.reserved = [Reservation(("n4",), int(world.now_s) + 600, int(world.now_s) + 900)]
    world.nodes["n5"].layout = WHOLE  # not what Slurm believes
    all_of_them = [change(f"n{i}", SEVEN, HALVES) for i in range(1, 7)]
    assert apply(world, *all_of_them, exclude="n6") == {f"n{i}": "refused" for i in range(1, 7)}
    assert world.logged() == []
    assert apply(world, change("n7", SEVEN, (("3g", "3g", "1g"), ("gpu",)))) == {"n7": "refused"}
    assert apply(world, change("n7", SEVEN, HALVES)) == {"n7": "done"}
    assert apply(world, change("n7", HALVES, SEVEN)) == {"n7": "refused"}, "once a day"
    world.now_s += 86_400
    assert apply(world, change("n7", HALVES, SEVEN)) == {"n7": "done"}


def test_the_last_node_in_service_with_a_type_in_demand_stays(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN, "n3": HALVES}, demand=frozenset({"1g.10gb"}))
    world.nodes["n2"].states = {"IDLE", "DRAIN"}
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "refused"}
    world.nodes["n2"].states = {"ALLOCATED"}
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "done"}


def test_one_node_at_a_time_is_changed_and_none_after_a_failure(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN, "n3": SEVEN})
    changes = [change(name, SEVEN, HALVES) for name in ("n1", "n2")]
    assert apply(world, *changes) == {"n1": "done", "n2": "refused"}
    world.faults = ["refused"]
    assert apply(world, change("n2", SEVEN, HALVES)) == {"n2": "failed"}
    assert world.nodes["n2"].reason.startswith("almanac mig failed: apply: ssh ended with 1: In use")
    assert "DRAIN" in world.nodes["n2"].states
    assert apply(world, change("n3", SEVEN, HALVES)) == {"n2": "failed", "n3": "refused"}
    world.nodes["n2"].states, world.nodes["n2"].reason = {"IDLE"}, ""  # repaired and resumed by hand
    assert apply(world, change("n3", SEVEN, HALVES)) == {"n2": "dropped", "n3": "done"}


@pytest.mark.parametrize("fault", ["half", "refused", "wrong"])
@pytest.mark.parametrize("to_old", [False, True])
def test_a_failed_change_can_be_taken_up_again_or_taken_back(tmp_path: Path, fault: str, to_old: bool) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN}, faults=[fault])
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    run = world.run()
    run.take_again("n1", to_old)
    run.drive()
    assert run.outcomes["n1"].what == "done"
    assert world.nodes["n1"].layout == (SEVEN if to_old else HALVES)
    assert world.nodes["n1"].states == {"IDLE"}


def test_a_job_that_came_before_the_drain_is_waited_for_or_the_node_is_given_back(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN})
    world.kill_at = 6  # right after the drain
    with pytest.raises(KilledError):
        apply(world, change("n1", SEVEN, HALVES))
    assert world.said == ["drain n1"]
    world.kill_at, world.nodes["n1"].jobs = None, 1
    assert apply(world) == {"n1": "undone"}
    assert (world.nodes["n1"].layout, world.nodes["n1"].states, world.nodes["n1"].jobs) == (SEVEN, {"IDLE"}, 1)


def drain(world: World, *changes: object, give_back: tuple[str, ...] = (), **options: object) -> dict[str, str]:
    """A run as `mig apply` makes it with mig.drain_busy, for changes of busy nodes."""
    run = world.run(**options)
    run.drive()
    run.give_back(give_back, "the test says so")
    run.begin(changes, is_patient=True)  # type: ignore[arg-type]
    run.drive()
    return {node: each.what for node, each in run.outcomes.items()}


def busy(tmp_path: Path, *nodes: str, **more: object) -> World:
    world = World(tmp_path, {f"n{i}": SEVEN for i in range(1, 5)}, **more)  # type: ignore[arg-type]
    for name in nodes:
        world.nodes[name].jobs, world.nodes[name].states = 1, {"ALLOCATED"}
    return world


def end_jobs(world: World) -> None:
    for node in world.nodes.values():
        node.jobs, node.states = 0, node.states - {"ALLOCATED"} | {"IDLE"}


def test_a_busy_node_is_drained_waited_for_over_days_and_changed_once_empty(tmp_path: Path) -> None:
    world = busy(tmp_path, "n1")
    assert drain(world, change("n1", SEVEN, HALVES)) == {"n1": "draining"}
    for _ in range(3):
        world.now_s += 86_400
        assert drain(world) == {"n1": "draining"}
    assert world.nodes["n1"].states == {"ALLOCATED", "DRAIN"}
    assert world.nodes["n1"].reason.startswith("almanac mig: 7*1g")
    end_jobs(world)
    assert drain(world) == {"n1": "done"}
    assert (world.nodes["n1"].layout, world.nodes["n1"].states) == (HALVES, {"IDLE"})


def test_a_draining_node_is_given_back_with_its_jobs(tmp_path: Path) -> None:
    world = busy(tmp_path, "n1")
    drain(world, change("n1", SEVEN, HALVES))
    assert drain(world, give_back=("n1", "n2")) == {"n1": "undone"}
    node = world.nodes["n1"]
    assert (node.layout, node.states, node.jobs, node.reason) == (SEVEN, {"ALLOCATED"}, 1, "")
    assert world.logged()[-4:] == ["undo", "verify", "resume", "undone"]


def test_a_draining_node_is_given_back_if_its_type_becomes_the_last_in_service(tmp_path: Path) -> None:
    world = busy(tmp_path, "n1", demand=frozenset({"1g.10gb"}))
    drain(world, change("n1", SEVEN, HALVES))
    for name in ("n2", "n3", "n4"):
        world.nodes[name].states = {"DOWN"}
    end_jobs(world)
    world.nodes["n2"].states = world.nodes["n3"].states = world.nodes["n4"].states = {"DOWN"}
    assert drain(world) == {"n1": "undone"}
    assert world.nodes["n1"].layout == SEVEN


def test_draining_nodes_leave_the_free_ones_their_turn_and_wait_for_it_themselves(tmp_path: Path) -> None:
    world = busy(tmp_path, "n1", "n2")
    assert drain(world, *(change(name, SEVEN, HALVES) for name in ("n1", "n2"))) == {"n1": "draining", "n2": "draining"}
    assert apply(world, change("n3", SEVEN, HALVES)) == {"n1": "draining", "n2": "draining", "n3": "done"}
    end_jobs(world)
    world.faults = ["refused"]
    assert drain(world) == {"n1": "failed", "n2": "draining"}, "one at a time, and none after a failure"
    assert drain(world) == {"n1": "failed", "n2": "draining"}
    world.nodes["n1"].states, world.nodes["n1"].reason = {"IDLE"}, ""
    outcomes = drain(world)
    assert outcomes["n1"] == "dropped"
    outcomes = outcomes if outcomes["n2"] == "done" else drain(world)
    assert outcomes["n2"] == "done"


def test_another_nodes_reconfigure_stops_at_a_changed_line_of_a_draining_node(tmp_path: Path) -> None:
    """It would end the jobs there."""
    world = busy(tmp_path, "n2")
    drain(world, change("n2", SEVEN, HALVES))
    conf = tmp_path / "almanac-mig.conf"
    conf.write_text(conf.read_text().replace("n2 CPUs=8 Gres=gpu:1g.10gb:7", "n2 CPUs=8 Gres=gpu:1g.10gb:6"))
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "failed", "n2": "draining"}
    assert "reconfigure" not in world.logged()


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
def test_a_kill_at_every_point_of_a_drain_loses_nothing(tmp_path: Path, release: str) -> None:
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        world = busy(folder, "n1", release_text=release, kill_at=number)
        try:
            drain(world, change("n1", SEVEN, HALVES))
            drain(world, give_back=("n1",))
            break
        except KilledError:
            world.kill_at = None
        drain(world)
        drain(world, give_back=("n1",))
        assert world.nodes["n1"].states == {"ALLOCATED"}, number
    assert number > 10


def test_drains_of_others_and_nodes_that_others_resumed_are_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN}, kill_at=9)
    with pytest.raises(KilledError):
        apply(world, change("n1", SEVEN, HALVES))
    world.kill_at, world.nodes["n1"].reason = None, "broken fan, bob"
    assert apply(world) == {"n1": "left"}
    assert world.nodes["n1"].reason == "broken fan, bob"
    assert "DRAIN" in world.nodes["n1"].states


def test_a_line_that_somebody_changed_in_the_include_file_stops_the_reconfigure(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN})
    conf = tmp_path / "almanac-mig.conf"
    conf.write_text(conf.read_text().replace("n2 CPUs=8 Gres=gpu:1g.10gb:7", "n2 CPUs=8 Gres=gpu:1g.10gb:6"))
    assert apply(world, change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    assert "n2 has Gres" in world.nodes["n1"].reason
    assert "reconfigure" not in world.logged()


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
def test_a_kill_at_every_point_is_taken_up_by_the_next_run(tmp_path: Path, release: str) -> None:
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        world = World(folder, {"n1": SEVEN, "n2": SEVEN}, release, kill_at=number, demand=frozenset({"1g.10gb"}))
        try:
            apply(world, change("n1", SEVEN, HALVES))
            break
        except KilledError:
            world.kill_at = None
        assert apply(world) in ({"n1": "done"}, {}), number
        assert world.nodes["n1"].states == {"IDLE"}
    assert number > 20


@examples(0.6)
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(["", "", "", "half", "refused", "wrong"]), max_size=12),
    kills=st.lists(st.integers(1, 30), max_size=6),
    release=st.sampled_from(["22.05.8", "24.11.5"]),
    demand=st.frozensets(st.sampled_from(["1g.10gb", "3g.40gb", "a100"])),
)
def test_no_promise_is_broken_by_any_sequence_of_failures_jobs_and_kills(
    seed: int, faults: list[str], kills: list[int], release: str, demand: frozenset[str]
) -> None:
    """The world raises where a node is resumed unverified, changed with a job, or not logged before."""
    with tempfile.TemporaryDirectory() as name:
        layouts = {"n1": SEVEN, "n2": SEVEN, "n3": HALVES, "n4": WHOLE}
        world = World(Path(name), layouts, release, faults=list(faults), seed=seed, demand=demand)
        changes = [change("n1", SEVEN, HALVES), change("n3", HALVES, WHOLE), change("n4", WHOLE, SEVEN)]
        for kill in [*kills, None]:
            world.kill_at = None if kill is None else world.effects + kill
            with contextlib.suppress(KilledError):
                apply(world, *changes)
        for each in world.nodes.values():
            ours = each.reason.startswith("almanac mig failed:")
            assert ours or "DRAIN" not in each.states, "neither finished nor given up"


@dataclass
class Operated(World):
    """An operator drains n1 with a reason, or resumes it (""), before the look number `at`."""

    at: int = 0
    reason: str = ""
    looks: int = 0
    told: int = 0
    was_ours: bool = False
    is_changed: bool = False

    def nodes_now(self) -> list[Node]:
        self.looks += 1
        node = self.nodes["n1"]
        if self.looks == self.at and node.is_listed:
            self.is_changed, self.told, self.was_ours = (
                True, len(self.said), node.reason.startswith("almanac mig:"),
            )  # fmt: skip
            node.states, node.reason = (node.states - {"DRAIN"}) | ({"DRAIN"} if self.reason else set()), self.reason
        return super().nodes_now()


@pytest.mark.parametrize(("release", "is_dynamic", "reason"), [
    ("22.05.8", False, "bad fan"), ("24.11.5", False, "bad fan"), ("24.11.5", False, ""), ("24.11.5", True, "bad fan"),
])  # fmt: skip
def test_no_order_follows_an_operators_change(tmp_path: Path, release: str, is_dynamic: bool, reason: str) -> None:
    """Whatever look at the node comes next, Slurm and the node are told nothing then."""
    dynamic = frozenset({"n1"}) if is_dynamic else frozenset()
    for look in range(1, 99):
        (folder := tmp_path / str(look)).mkdir()
        world = Operated(folder, {"n1": SEVEN, "n2": SEVEN}, release, dynamic=dynamic, at=look, reason=reason)
        apply(world, change("n1", SEVEN, HALVES))
        if world.looks < look:
            break
        if world.is_changed and (reason or world.was_ours):
            assert world.said[world.told :] == [], look
            assert world.nodes["n1"].reason == reason
    assert look > 8
