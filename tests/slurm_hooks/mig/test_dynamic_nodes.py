"""`almanac mig apply` on dynamic nodes of a Slurm in memory, which ends the test where a promise is broken."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_world import HALVES, SEVEN, WHOLE, KilledError, World, change
from profiles import examples

from cli.mig_output import _TODO
from slurm_hooks.mig.dynamic import parameters
from slurm_hooks.mig.slurm_side import SlurmSide, SlurmView
from slurm_hooks.mig.steps import NodeChange, Stage
from telemetry.slurm.backend import Reservation


def world(folder: Path, **more: object) -> World:
    return World(folder, {"n1": SEVEN, "n2": SEVEN}, dynamic=frozenset({"n1"}), **more)  # type: ignore[arg-type]


def apply(world: World, *changes: object, **options: object) -> dict[str, str]:
    run = world.run(**options)
    run.drive()
    run.begin(changes)  # type: ignore[arg-type]
    run.drive()
    return {node: each.what for node, each in run.outcomes.items()}


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_a_dynamic_node_is_deleted_and_registers_again_drained_until_it_is_verified(
    tmp_path: Path, release: str
) -> None:
    site = world(tmp_path, release_text=release)
    assert apply(site, change("n1", SEVEN, HALVES)) == {"n1": "done"}
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
    site = world(tmp_path)
    assert apply(site, change("n1", SEVEN, HALVES), register_command=()) == {"n1": "refused"}
    in_a_month = int(site.now_s) + 30 * 86_400
    site.reserved = [Reservation(("n1", "n2"), in_a_month, in_a_month + 60)]
    assert apply(site, change("n1", SEVEN, HALVES)) == {"n1": "refused"}
    assert site.logged() == []
    assert apply(site, change("n2", SEVEN, HALVES)) == {"n2": "done"}, "a node of slurm.conf stays in its reservation"


def test_an_operator_is_told_what_to_do_at_every_stage_that_can_fail() -> None:
    assert set(_TODO) == set(get_args(Stage))


def test_a_node_that_comes_back_undrained_is_drained_at_once_and_has_failed(tmp_path: Path) -> None:
    site = world(tmp_path, bad_conf=True)
    assert apply(site, change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    assert "DRAIN" in site.nodes["n1"].states
    assert site.nodes["n1"].reason.startswith("almanac mig failed: the node registered without State=DRAIN")


@pytest.mark.parametrize("to_old", [False, True])
@pytest.mark.parametrize("at", [2, 3])
def test_a_node_that_does_not_register_again_can_be_taken_up_or_taken_back(
    tmp_path: Path, at: int, to_old: bool
) -> None:
    """at: 2 while Slurm still lists the node, 3 when it is deleted."""
    site = world(tmp_path, faults=[""] * at + ["refused"])
    assert apply(site, change("n1", SEVEN, HALVES)) == {"n1": "failed"}
    assert site.nodes["n1"].is_listed == (at == 2)
    assert apply(site) == {"n1": "failed"}
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
    site = world(tmp_path, faults=["", "", "", "refused"])
    assert apply(site, change("n1", SEVEN, HALVES)) == {"n1": "failed"}
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


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
def test_a_kill_at_every_point_of_a_dynamic_change_is_taken_up_by_the_next_run(tmp_path: Path, release: str) -> None:
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        site = world(folder, release_text=release, kill_at=number)
        try:
            apply(site, change("n1", SEVEN, HALVES))
            break
        except KilledError:
            site.kill_at = None
        site.start_slurmd("n1")  # the node reboots before the next run
        assert apply(site) in ({"n1": "done"}, {}), number
        assert site.nodes["n1"].states == {"IDLE", "DYNAMIC_NORM"}
    assert number > 30


@examples(0.8)
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(["", "", "", "half", "refused", "wrong"]), max_size=12),
    kills=st.lists(st.integers(1, 40), max_size=6),
    release=st.sampled_from(["22.05.8", "24.11.5"]),
)
def test_no_promise_is_broken_on_dynamic_nodes(seed: int, faults: list[str], kills: list[int], release: str) -> None:
    """The world also raises where a node takes jobs with another layout than Slurm has, and it reboots nodes."""
    with tempfile.TemporaryDirectory() as name:
        layouts = {"n1": SEVEN, "n2": SEVEN, "n3": HALVES, "n4": WHOLE}
        site = World(
            Path(name), layouts, release, faults=list(faults), seed=seed, dynamic=frozenset({"n1", "n3", "n4"})
        )
        changes = [change("n1", SEVEN, HALVES), change("n3", HALVES, WHOLE), change("n2", SEVEN, WHOLE)]
        for kill in [*kills, None]:
            site.kill_at = None if kill is None else site.effects + kill
            with contextlib.suppress(KilledError):
                apply(site, *changes)
        for each in site.nodes.values():
            ours = each.reason.startswith("almanac mig failed:")
            assert ours or not each.is_listed or "DRAIN" not in each.states, "neither finished nor given up"
