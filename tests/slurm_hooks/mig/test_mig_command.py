"""`almanac mig` as the command line runs it, on a Slurm in memory and with the real decision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mig_world import HALVES, SEVEN, WHOLE, Backend, World, change

import advisor.mig.decide
import slurm_hooks.mig.sides
from advisor.mig.decide import LayoutPlan, MigNode
from almanac.errors import BusyError, ConfigError
from cli.app import App
from cli.doctor.nodes import check_mig
from cli.mig import command
from slurm_hooks.mig.steps import MigState
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.orders import JsonLines
from telemetry.store.store import Store

JOB = {"job_id": 7, "submit_time": 10, "job_state": "PENDING", "priority": 0, "tres_per_node": "gres:gpu:1g.10gb:1",
       "tres_req_str": "cpu=1,gres/gpu=1", "state_reason": "BadConstraints", "time_limit": 5}  # fmt: skip


class WorldApp(App):
    world: World

    @property
    def backend(self) -> Any:
        return Backend(self.world)

    @property
    def commands(self) -> Any:
        return self.world


class Command:
    """The command on a world of two nodes with slices and one without."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder, self.capsys, self.patch = folder, capsys, patch
        self.world = World(
            folder, {"n1": SEVEN, "n2": SEVEN, "n3": WHOLE}, record=JsonLines(folder / "store/mig", "actions-")
        )
        Store.create(folder / "store")
        patch.setattr(slurm_hooks.mig.sides, "run_bounded", self.world.on_node)
        patch.setattr("cli.doctor.nodes.run_bounded", self.world.on_node)
        self.configure("observe")

    def configure(self, mode: str, more: str = "") -> None:
        text = f'[mig]\nmode = "{mode}"\nnodes = ["n[1-3]=A100-80"]\ninclude_file = "{self.folder}/almanac-mig.conf"\n'
        (self.folder / "almanac.toml").write_text(text + more)

    def app(self) -> WorldApp:
        app = WorldApp(str(self.folder / "almanac.toml"), str(self.folder / "store"), "lab")
        app.world = self.world
        return app

    def __call__(self, *argv: str, code: int = 0) -> str:
        self.capsys.readouterr()
        assert (command.main(args=list(argv), standalone_mode=False, obj=self.app()) or 0) == code
        return self.capsys.readouterr().out

    def decide(self, *changes: Any) -> None:
        plan = LayoutPlan(changes, "" if changes else "nothing to do")
        self.patch.setattr(advisor.mig.decide, "decide_layout", lambda nodes, jobs, now_s: plan)


@pytest.fixture
def mig(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def test_a_plan_with_the_real_decision_fits_80_columns_and_writes_nothing(mig: Command) -> None:
    mig.world.queue = [JOB]
    said = mig("plan")
    assert "n1 (A100-80): 7*1g, gpu" in said
    assert "nothing was changed (this is a plan)" in said
    assert max(map(len, said.splitlines())) <= 80
    assert json.loads(mig("plan", "--json"))["changes"] == []
    assert not (mig.folder / "store/mig").exists()


def test_observe_only_logs_and_off_does_not_even_that(mig: Command) -> None:
    mig.decide(change("n1", SEVEN, HALVES))
    assert "nothing was changed" in mig("plan", "--apply")
    assert [row["mode"] for row in mig.world.rows()] == ["observe"]
    mig.configure("off")
    mig("plan", "--apply")
    assert len(mig.world.rows()) == 1
    assert mig.world.said == []
    mig.configure("observe")
    with pytest.raises(ConfigError):
        mig("retry", "n1")


def test_apply_changes_the_layout_and_releases_what_waited_for_it_once(mig: Command) -> None:
    mig.configure("apply")
    with NodeFolder(mig.folder / "store/mig", MigState).lock(), pytest.raises(BusyError):
        mig("plan", "--apply")
    mig.world.queue = [JOB, JOB | {"job_id": 8, "state_reason": "JobHeldUser"}, JOB | {"job_id": 9, "priority": 5}]
    mig.decide(change("n3", WHOLE, SEVEN))
    said = mig("plan", "--apply")
    assert "n3: done" in said
    assert "released, because their GPU type is back: 7" in said
    assert mig.world.said[-1] == "scontrol release 7"
    mig.decide()
    mig("plan", "--apply")
    assert mig.world.said.count("scontrol release 7") == 1
    assert "n3  done" in mig("status")


def test_busy_nodes_are_drained_only_if_configured_and_given_back_when_no_change_pays(mig: Command) -> None:
    def decide(nodes: Sequence[MigNode], jobs: object, now_s: int) -> LayoutPlan:
        seen.append({node.name: node.target for node in nodes})
        drains = tuple(change("n1", SEVEN, HALVES) for node in nodes if node.name == "n1" and node.target is None)
        return LayoutPlan((), "not free", drains=drains if is_worth else ())

    seen: list[dict[str, object]] = []
    is_worth = True
    mig.patch.setattr(advisor.mig.decide, "decide_layout", decide)
    node = mig.world.nodes["n1"]
    node.jobs, node.states = 1, {"ALLOCATED"}
    mig.configure("apply")
    said = " ".join(mig("plan", "--apply").split())
    assert "change n1 when its jobs have ended: 7*1g, gpu -> 3g+4g, gpu" in said
    assert "not drained: mig.drain_busy is off" in said and mig.world.said == []
    mig.configure("apply", "drain_busy = true\n")
    assert "n1: draining" in mig("plan", "--apply")
    seen.clear()
    assert "n1: draining" in mig("plan", "--apply")
    # With its target, as the plan counts it, and without, as it would be had it not been drained.
    assert [each["n1"] for each in seen[:2]] == [HALVES, None]
    assert mig.world.said == ["drain n1"]
    assert "n1: 7*1g, gpu -> 3g+4g, gpu: at stage wait" in mig("status")
    is_worth = False
    said = mig("plan", "--apply")
    assert "give n1 back" in said and "n1: undone" in said
    assert (node.states, node.jobs, node.layout) == ({"ALLOCATED"}, 1, SEVEN)


def test_a_type_that_is_not_back_is_named(mig: Command) -> None:
    mig.configure("apply")
    mig.decide()
    mig.world.queue = [JOB | {"tres_per_node": "gres:gpu:4g.40gb:1"}]
    assert "job 7 waits for 4g.40gb, which no node in service has" in mig("plan", "--apply")


def test_a_failure_is_told_with_what_to_do_and_taken_back_by_retry(mig: Command) -> None:
    mig.configure("apply")
    mig.decide(change("n1", SEVEN, HALVES))
    mig.world.faults = ["refused"]
    said = mig("plan", "--apply", code=5)
    assert "n1: failed: apply: ssh ended with 1: In use by another client" in said
    assert "almanac mig retry n1" in said
    assert "it stays drained" in mig("status")
    assert "n1: done" in mig("retry", "n1", "--old")
    assert mig.world.nodes["n1"].layout == SEVEN


def test_doctor_names_what_is_missing_and_says_ok_where_nothing_is(mig: Command) -> None:
    conf = mig.folder / "slurm.conf"
    conf.write_text(f"Include {mig.folder}/almanac-mig.conf\n")
    mig.world.configuration_text = f"SLURM_CONF = {conf}\n"
    [found] = check_mig(mig.app())
    assert (found.status, found.said) == ("ok", "3 nodes can be changed; mig.mode is observe")
    conf.write_text("PartitionName=all\n")
    include = mig.folder / "almanac-mig.conf"
    include.write_text(
        include.read_text().replace("NodeName=n1 ", "NodeName=n[1-1] ").replace("gpu:a100:2", "gpu:a100:1")
    )
    said = "\n".join(check.said for check in check_mig(mig.app()))
    assert "does not include" in said
    assert "n1: no NodeName line of their own" in said
    assert "n3: Gres in the include file and in Slurm differ" in said
    mig.configure("off")
    assert list(check_mig(mig.app())) == []
