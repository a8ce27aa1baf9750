"""`almanac mig apply` on a Slurm in memory, which ends the test where a promise is broken."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_world import HALVES, SEVEN, WHOLE, World, change
from profiles import examples
from watched import KilledError

from advisor.mig.decide import LayoutChange
from cli.mig import _TODO
from slurm.backend import Reservation
from slurm.queue import parse_job
from slurm_hooks.mig.sides import AGAIN_S, SlurmSide, SlurmView, gres_of_nodes, release, stuck_jobs
from slurm_hooks.mig.steps import MigState, NodeChange, Stage, parameters


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_a_free_node_gets_the_layout_and_is_resumed(tmp_path: Path, release: str) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN}, release)
    assert world.apply(change("n1", SEVEN, HALVES)) == {"n1": "done"}
    node = world.nodes["n1"]
    assert (node.layout, node.gres, node.states) == (HALVES, "gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1", {"IDLE"})
    assert [f"{row['what']}: {row['reason']}" for row in world.rows()] == [
        "drain: almanac mig: 7*1g, gpu -> 3g+4g, gpu", "apply: 3g+4g, gpu through mig-parted",
        f"write gres: {tmp_path / 'almanac-mig.conf'}: gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1",
        "reconfigure: Slurm reads the new Gres", "verify: 3g+4g, gpu on the node", "resume: verified",
        "done: 3g+4g, gpu",
    ]  # fmt: skip
    assert world.now_s == World.now_s, "no step waits"
    assert gres_of_nodes((tmp_path / "almanac-mig.conf").read_text())["n2"] == "gpu:1g.10gb:7,gpu:a100:1"


def test_what_is_not_free_or_not_allowed_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, {f"n{i}": SEVEN for i in range(1, 8)}, demand=frozenset({"1g.10gb"}))
    world.nodes["n1"].jobs = 1
    world.nodes["n2"].states = {"IDLE", "DRAIN"}
    world.nodes["n3"].states = {"IDLE", "PLANNED"}
    world.reserved = [Reservation(("n4",), int(world.now_s) + 600, int(world.now_s) + 900)]
    world.nodes["n5"].layout = WHOLE  # not what Slurm believes
    all_of_them = [change(f"n{i}", SEVEN, HALVES) for i in range(1, 7)]
    assert world.apply(*all_of_them, exclude="n6") == {f"n{i}": "refused" for i in range(1, 7)}
    assert world.why == [
        "it has a job", "it is DRAIN+IDLE", "it is IDLE+PLANNED", "it is reserved, or soon will be",
        "the node itself has another layout than the plan begins at", "it is not in mig.nodes, or it is excluded",
    ]  # fmt: skip
    conf = tmp_path / "almanac-mig.conf"
    own = conf.read_text()
    conf.write_text(own.replace("NodeName=n7 ", "NodeName=n[7-7] "))
    assert world.apply(change("n7", SEVEN, HALVES)) == {"n7": "refused"}, "no line of its own"
    conf.write_text(own)
    assert world.logged() == []
    assert world.apply(change("n7", SEVEN, (("3g", "3g", "1g"), ("gpu",)))) == {"n7": "refused"}
    assert world.apply(change("n7", HALVES, SEVEN)) == world.apply(change("n7", SEVEN, SEVEN)) == {"n7": "refused"}
    assert world.apply(change("n7", SEVEN, HALVES)) == {"n7": "done"}
    assert world.apply(change("n7", HALVES, SEVEN)) == {"n7": "refused"}, "once a day"
    world.now_s += 86_400
    assert world.apply(change("n7", HALVES, SEVEN)) == {"n7": "done"}


def test_the_last_node_in_service_with_a_type_in_demand_stays(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN, "n3": HALVES}, demand=frozenset({"1g.10gb"}))
    world.nodes["n2"].states = {"IDLE", "DRAIN"}
    assert world.apply(change("n1", SEVEN, HALVES)) == {"n1": "refused"}
    world.nodes["n2"].states = {"ALLOCATED"}
    assert world.apply(change("n1", SEVEN, HALVES)) == {"n1": "done"}


def test_one_node_at_a_time_is_changed_and_none_after_a_failure(tmp_path: Path) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN, "n3": SEVEN})
    changes = [change(name, SEVEN, HALVES) for name in ("n1", "n2")]
    assert world.apply(*changes) == {"n1": "done", "n2": "refused"}
    world.faults = ["refused"]
    assert world.apply(change("n2", SEVEN, HALVES)) == {"n2": "failed"}
    assert world.nodes["n2"].reason.startswith("almanac mig failed: apply: ssh ended with 1: In use")
    assert "DRAIN" in world.nodes["n2"].states
    assert world.apply(change("n3", SEVEN, HALVES)) == {"n2": "failed", "n3": "refused"}
    world.nodes["n2"].states, world.nodes["n2"].reason = {"IDLE"}, ""  # repaired and resumed by hand
    assert world.apply(change("n3", SEVEN, HALVES)) == {"n2": "dropped", "n3": "done"}
    assert world.why == ["the node was resumed by hand", ""]


@pytest.mark.parametrize("fault", ["half", "refused", "wrong"])
@pytest.mark.parametrize("to_old", [False, True])
def test_a_failed_change_can_be_taken_up_again_or_taken_back(tmp_path: Path, fault: str, to_old: bool) -> None:
    world = World(tmp_path, {"n1": SEVEN, "n2": SEVEN}, faults=[fault])
    assert world.apply(change("n1", SEVEN, HALVES)) == {"n1": "failed"}
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
        world.apply(change("n1", SEVEN, HALVES))
    assert world.said == ["drain n1"]
    world.kill_at, world.nodes["n1"].jobs = None, 1
    assert world.apply() == {"n1": "undone"}
    assert (world.nodes["n1"].layout, world.nodes["n1"].states, world.nodes["n1"].jobs) == (SEVEN, {"IDLE"}, 1)


def drain(world: World, *changes: LayoutChange, give_back: Collection[str] = ()) -> dict[str, str]:
    return world.apply(*changes, give_back=give_back, is_patient=True)


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
    assert world.apply(change("n3", SEVEN, HALVES)) == {"n1": "draining", "n2": "draining", "n3": "done"}
    end_jobs(world)
    world.faults = ["refused"]
    assert drain(world) == {"n1": "failed", "n2": "draining"}, "one at a time, and none after a failure"
    assert drain(world) == {"n1": "failed", "n2": "draining"}
    world.nodes["n1"].states, world.nodes["n1"].reason = {"IDLE"}, ""
    outcomes = drain(world)
    assert outcomes["n1"] == "dropped"
    outcomes = outcomes if outcomes["n2"] == "done" else drain(world)
    assert outcomes["n2"] == "done"


def test_a_reconfigure_stops_at_a_changed_line_of_another_node(tmp_path: Path) -> None:
    """It would end the jobs there."""
    world = busy(tmp_path, "n2")
    drain(world, change("n2", SEVEN, HALVES))
    conf = tmp_path / "almanac-mig.conf"
    conf.write_text(conf.read_text().replace("n2 CPUs=8 Gres=gpu:1g.10gb:7", "n2 CPUs=8 Gres=gpu:1g.10gb:6"))
    assert world.apply(change("n1", SEVEN, HALVES)) == {"n1": "failed", "n2": "draining"}
    assert "n2 has Gres" in world.nodes["n1"].reason
    assert "reconfigure" not in world.logged()


def dynamic(folder: Path, **more: object) -> World:
    return World(folder, {"n1": SEVEN, "n2": SEVEN}, dynamic=frozenset({"n1"}), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_a_dynamic_node_is_deleted_and_registers_again_drained_until_it_is_verified(
    tmp_path: Path, release: str
) -> None:
    site = dynamic(tmp_path, release_text=release)
    assert site.apply(change("n1", SEVEN, HALVES)) == {"n1": "done"}
    node = site.nodes["n1"]
    assert (node.layout, node.gres) == (HALVES, "gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1")
    assert node.states == {"IDLE", "DYNAMIC_NORM"}
    assert site.logged() == [
        "drain", "apply", "write gres", "delete", "register", "drain", "settle", "verify", "resume", "done"
    ]  # fmt: skip
    assert node.conf.strip() == "Gres=gpu:3g.40gb:1,gpu:4g.40gb:1,gpu:a100:1", "a later start is not drained"


def test_slurmd_gets_other_gres_as_it_has_them_and_a_drained_state() -> None:
    one = NodeChange(
        "n1", "A100-80", SEVEN, HALVES, {}, {"a100": 1, "3g.40gb": 2}, 0, dynamic_gres="gpu:a100:8(S:0-1),nic:x:2(S:0)"
    )
    assert parameters(one) == "Gres=gpu:3g.40gb:2,gpu:a100:1,nic:x:2 State=DRAIN Reason=almanac-mig"
    assert parameters(one, is_drained=False) == "Gres=gpu:3g.40gb:2,gpu:a100:1,nic:x:2"


def test_a_dynamic_node_is_refused_without_a_command_and_with_a_reservation_at_any_time(tmp_path: Path) -> None:
    site = dynamic(tmp_path)
    assert site.apply(change("n1", SEVEN, HALVES), register_command=()) == {"n1": "refused"}
    in_a_month = int(site.now_s) + 30 * 86_400
    site.reserved = [Reservation(("n1", "n2"), in_a_month, in_a_month + 60)]
    assert site.apply(change("n1", SEVEN, HALVES)) == {"n1": "refused"}
    assert site.logged() == []
    assert site.apply(change("n2", SEVEN, HALVES)) == {"n2": "done"}, "a node of slurm.conf stays in its reservation"


def test_an_operator_is_told_what_to_do_at_every_stage_that_can_fail() -> None:
    assert set(_TODO) == set(get_args(Stage))


def test_a_node_that_comes_back_undrained_is_drained_at_once_and_has_failed(tmp_path: Path) -> None:
    site = dynamic(tmp_path, bad_conf=True)
    assert site.apply(change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    assert "DRAIN" in site.nodes["n1"].states
    assert site.nodes["n1"].reason.startswith("almanac mig failed: the node registered without State=DRAIN")


@pytest.mark.parametrize("to_old", [False, True])
@pytest.mark.parametrize("at", [2, 3])
def test_a_node_that_does_not_register_again_can_be_taken_up_or_taken_back(
    tmp_path: Path, at: int, to_old: bool
) -> None:
    """at: 2 while Slurm still lists the node, 3 when it is deleted."""
    site = dynamic(tmp_path, faults=[""] * at + ["refused"])
    assert site.apply(change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    assert site.nodes["n1"].is_listed == (at == 2)
    assert site.apply() == {"n1": "failed"}
    run = site.run()
    run.take_again("n1", to_old)
    run.drive()
    assert run.outcomes["n1"].what == "done"
    node = site.nodes["n1"]
    assert (node.layout, node.states) == (SEVEN if to_old else HALVES, {"IDLE", "DYNAMIC_NORM"})


@pytest.mark.parametrize(("stage", "what"), [("apply", "left"), ("gres", "left"), ("register", "failed")])
def test_a_node_that_comes_back_after_the_look_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage, what: str
) -> None:
    site = dynamic(tmp_path, faults=["", "", "", "refused"])
    assert site.apply(change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    node, run = site.nodes["n1"], site.run()
    run.take_again("n1", to_old=False)
    run.state = run.state.with_change(run.state.changes["n1"].at(stage, int(site.now_s)))
    look, open_conf, layout = run.slurm.view, f"Gres={node.gres}", node.layout

    def view(self: SlurmSide, now_s: int) -> SlurmView:
        seen = look(now_s)
        if not node.is_listed:
            node.conf, node.jobs = open_conf, 1
            site.start_slurmd("n1")
        return seen

    monkeypatch.setattr(SlurmSide, "view", view)
    run.drive()
    assert run.outcomes["n1"].what == what
    assert (node.conf, node.layout, node.jobs) == (open_conf, layout, 1)
    assert site.logged().count("dropped") == 1


@examples(1.2)
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(["", "", "", "half", "refused", "wrong"]), max_size=12),
    kills=st.lists(st.integers(1, 40), max_size=6),
    release=st.sampled_from(["22.05.8", "24.11.5"]),
    demand=st.frozensets(st.sampled_from(["1g.10gb", "3g.40gb", "a100"])),
    dynamic=st.sampled_from([frozenset[str](), frozenset({"n1", "n3", "n4"})]),
)
def test_no_promise_is_broken_by_any_sequence_of_failures_jobs_and_kills(
    seed: int, faults: list[str], kills: list[int], release: str, demand: frozenset[str], dynamic: frozenset[str]
) -> None:
    """The world raises if a node is resumed unverified, changed with a job, or not recorded before, and if it
    takes jobs with another layout than Slurm has. It reboots dynamic nodes.
    """
    with tempfile.TemporaryDirectory() as name:
        layouts = {"n1": SEVEN, "n2": SEVEN, "n3": HALVES, "n4": WHOLE}
        world = World(Path(name), layouts, release, list(faults), seed, demand, dynamic=dynamic)
        changes = [change("n1", SEVEN, HALVES), change("n3", HALVES, WHOLE), change("n4", WHOLE, SEVEN)]
        for kill in [*kills, None]:
            world.kill_at = None if kill is None else world.points + kill
            with contextlib.suppress(KilledError):
                world.apply(*changes, change("n2", SEVEN, WHOLE))
        for each in world.nodes.values():
            is_ended = each.reason.startswith("almanac mig failed:") or not each.is_listed
            assert is_ended or "DRAIN" not in each.states, "neither finished nor given up"


NOW_S = int(World.now_s)
BUSY = b"Job update not available right now, the DB index is being set, try again in a bit for job 7\n"
RECORD = {
    "job_id": 7, "submit_time": NOW_S - 60, "job_state": ["PENDING"], "state_reason": "BadConstraints", "priority": 0,
    "tres_per_job": "gres/gpu:1g.5gb:1", "tres_req_str": "gres/gpu=1", "time_limit": 10,
}  # fmt: skip
JOB = parse_job(RECORD)
ASKED = "scontrol release 7"


def released(tmp_path: Path, *said: bytes, reason: str = "BadConstraints") -> tuple[World, MigState, list[str]]:
    world = World(tmp_path, {"n1": SEVEN}, queue=[{**RECORD, "state_reason": reason}], refusals=list(said))
    run = world.run()
    before = MigState("lab", released_s={"5 1": NOW_S - AGAIN_S, "6 1": NOW_S - AGAIN_S + 1})
    state, complaints = release([JOB], run.slurm, run.engine, before)
    assert run.engine.folder.load("lab").released_s == state.released_s
    return world, state, complaints


def test_a_slurmctld_that_has_just_restarted_is_asked_again(tmp_path: Path) -> None:
    world, state, said = released(tmp_path, BUSY, BUSY)
    assert (world.said, world.now_s - NOW_S, said) == ([ASKED] * 3, 1 + 2, [])
    assert state.released_s == {"6 1": NOW_S - AGAIN_S + 1, f"7 {JOB.submit_s}": NOW_S}


def test_a_refused_job_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    _, state, said = released(tmp_path, *[b"slurm_suspend error: Access/permission denied\n"] * 9)
    assert said == ["slurm_suspend error: Access/permission denied"]
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + 60).release == (JOB,)


def test_a_job_that_its_owner_holds_meanwhile_stays_held(tmp_path: Path) -> None:
    world, state, said = released(tmp_path, reason="JobHeldUser")
    assert (world.said, said, world.logged()) == ([], [], ["release", "dropped"])
    assert f"7 {JOB.submit_s}" not in state.released_s


def test_a_released_job_is_left_alone_for_a_day(tmp_path: Path) -> None:
    _, state, _ = released(tmp_path)
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + AGAIN_S - 1).release == ()
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + AGAIN_S).release == (JOB,)


def test_only_stuck_jobs_of_types_in_service_are_released() -> None:
    others = [
        replace(JOB, reason="JobHeldUser"), replace(JOB, reason="JobHeldAdmin"), replace(JOB, priority=5),
        replace(JOB, states=frozenset({"RUNNING"})), replace(JOB, gpu_type="a100"),
    ]  # fmt: skip
    found = stuck_jobs([*others, JOB], {"1g.5gb"}, {"2g.10gb"}, MigState("c"), NOW_S)
    assert (found.release, found.wait) == ((), (JOB,))
