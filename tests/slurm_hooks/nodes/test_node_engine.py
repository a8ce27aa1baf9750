"""The promises of every run that orders nodes, whichever planner decides: power control, and MIG layouts.

The Slurms in memory end the test where an order is not on the record first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from fake_slurm import FakeSlurm, PowerSite, Wanted
from mig_world import HALVES, SEVEN, World, change
from watched import KilledError, Watched

from almanac.config import NodeSet
from almanac.errors import StoreError
from slurm.backend import Reservation
from slurm_hooks.mig.steps import MigState
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.orders import JsonLines
from slurm_hooks.power.nodes import PowerState
from slurm_hooks.power.run import PowerRun

NOW_S = 1_800_000_000
MIG_CHANGE = change("n1", SEVEN, HALVES)


class PowerBench(PowerSite):
    """Of four idle nodes two are to power down. blind: last looks before an order that cannot show a change."""

    blind: ClassVar[dict[str, int]] = {"excluded": 2, "soon reserved": 1}

    def __init__(self, path: Path) -> None:
        path.mkdir()
        super().__init__(FakeSlurm(("n1", "n2", "n3", "n4")), path / "power", Wanted(2))
        self.config = replace(self.config, node_sets=(NodeSet(name="gpu", nodes="n[1-4]"),))
        self.world: Watched = self.slurm

    def once(self) -> None:
        self.run(2)

    def observe(self) -> None:
        PowerRun(self.planner).observe(self.planner.plan())

    def heal(self) -> bool:
        for _ in range(4):
            self.slurm.pass_time(600)
            self.once()
        self.slurm.pass_time(600)
        return len(self.slurm.asleep()) == 2

    def operate(self, name: str) -> bool:
        """Do what an operator or a user does to n1. Returns False where there is nothing to be done."""
        slurm = self.slurm
        if name == "with a reason" and not self.folder.rows(1, NOW_S):
            return False  # an idle node may power down whatever its reason is
        changes: dict[str, Callable[[], object]] = {
            "drained": lambda: slurm.put("n1", "IDLE", "DRAIN", reason="bad fan"),
            "with a reason": lambda: slurm.put("n1", *slurm.states("n1"), reason="bad fan"),
            "reserved": lambda: slurm.put("n1", *slurm.states("n1"), "RESERVED", reservation="maintenance"),
            "soon reserved": lambda: slurm.reserved.append(Reservation(("n1",), slurm.now_s + 60, slurm.now_s + 900)),
            "excluded": lambda: setattr(slurm, "exceptions", "n1"),
            "busy": lambda: slurm.put("n1", "ALLOCATED"),
            "held": lambda: self.folder.hold("root", "a power cut", slurm.now_s),
        }
        changes[name]()
        return True


@dataclass
class MigBench:
    """The layout of n1, one of two nodes, is to change. is_busy: when its job ends; the next run gives it back."""

    path: Path
    release: str
    is_dynamic: bool = False
    is_busy: bool = False
    blind: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        self.path.mkdir()
        dynamic = frozenset({"n1"} if self.is_dynamic else ())
        self.world = World(self.path, {"n1": SEVEN, "n2": SEVEN}, self.release, dynamic=dynamic)
        self.folder = NodeFolder(self.path / "mig", MigState)
        self.node = self.world.nodes["n1"]
        if self.is_busy:
            self.node.jobs, self.node.states = 1, self.node.states - {"IDLE"} | {"ALLOCATED"}

    def once(self) -> None:
        self.world.apply(MIG_CHANGE, is_patient=self.is_busy)
        if self.is_busy:
            self.world.apply(give_back=["n1"])

    def observe(self) -> None:
        self.world.run().observe([MIG_CHANGE], "change")

    def heal(self) -> bool:
        self.world.start_slurmd("n1")  # the node reboots before the next run
        for back in ([], ["n1"]):
            self.world.apply(give_back=back if self.is_busy else ())
        return self.node.states - {"DYNAMIC_NORM"} == {"ALLOCATED" if self.is_busy else "IDLE"}

    def operate(self, name: str) -> bool:
        node, is_ours = self.node, self.node.reason.startswith("almanac mig:")
        if not node.is_listed or (name == "resumed" and not is_ours) or (name == "busy" and "DRAIN" in node.states):
            return False
        if name == "busy":
            node.jobs, node.states = 1, node.states - {"IDLE"} | {"ALLOCATED"}
        else:
            is_drained = name == "drained"
            node.states = node.states - {"DRAIN"} | ({"DRAIN"} if is_drained else set())
            node.reason = "bad fan" if is_drained else ""
        return True


Bench = PowerBench | MigBench
BENCHES: dict[str, Callable[[Path], Bench]] = {
    "power": PowerBench,
    "layout 22.05": partial(MigBench, release="22.05.8"),
    "layout 24.11": partial(MigBench, release="24.11.5"),
    "busy node 22.05": partial(MigBench, release="22.05.8", is_busy=True),
    "busy node 24.11": partial(MigBench, release="24.11.5", is_busy=True),
    "dynamic node 22.05": partial(MigBench, release="22.05.8", is_dynamic=True),
    "dynamic node 24.11": partial(MigBench, release="24.11.5", is_dynamic=True),
}
POWER_CHANGES = ("drained", "with a reason", "reserved", "soon reserved", "excluded", "busy", "held")
BROKEN = (
    b"", b"[]", b"{", b'{"version": 1}', b'{"version": 9}', b"[" * 100_000,
    b'{"version": 1, "cluster": "other"}', b'{"version": 1, "cluster": "lab", "changes": {"n1": null}}',
)  # fmt: skip
planners = pytest.mark.parametrize("make", [BENCHES["power"], BENCHES["layout 24.11"]], ids=["power", "layout"])


@pytest.mark.parametrize("kind", BENCHES)
def test_a_run_killed_anywhere_is_finished_or_undone_by_the_next(tmp_path: Path, kind: str) -> None:
    for number in itertools.count(1):
        bench = BENCHES[kind](tmp_path / str(number))
        bench.world.kill_at = number
        try:
            bench.once()
            break
        except KilledError:
            bench.world.kill_at = None
        assert bench.heal(), number
    assert number > 9


@pytest.mark.parametrize(
    ("kind", "name"),
    [("power", name) for name in POWER_CHANGES]
    + [(kind, name) for kind in BENCHES if kind.startswith(("layout", "dynamic")) for name in ("drained", "busy")]
    + [("layout 24.11", "resumed")],
)
def test_no_order_follows_an_operators_or_a_users_change(tmp_path: Path, kind: str, name: str) -> None:
    """Before whatever look it is made: Slurm and the node hear nothing more about the node."""
    for look in itertools.count(1):
        bench = BENCHES[kind](tmp_path / str(look))
        done: list[bool] = []
        bench.world.change_at, bench.world.change = (
            look,
            lambda bench=bench, done=done: done.append(bench.operate(name)),
        )
        bench.once()
        if bench.world.looks < look:
            break
        later = [looks - look for looks, node in bench.world.told if node in ("n1", "") and looks >= look]
        assert not any(done) or all(gap < bench.blind.get(name, 0) for gap in later), look
    assert look > 5


@planners
def test_observing_records_and_orders_nothing(tmp_path: Path, make: Callable[[Path], Bench]) -> None:
    bench = make(tmp_path / "site")
    bench.observe()
    assert {row["mode"] for row in bench.folder.rows(1, NOW_S)} == {"observe"}
    assert bench.world.told == []
    assert not (bench.folder.root / "state.json").exists()


@planners
def test_a_folder_that_cannot_be_written_orders_nothing(tmp_path: Path, make: Callable[[Path], Bench]) -> None:
    bench = make(tmp_path / "site")
    bench.folder.root.write_text("a file")
    with pytest.raises(StoreError):
        bench.once()
    assert bench.world.told == []


@planners
def test_a_state_that_is_not_believed_orders_nothing_and_stays(tmp_path: Path, make: Callable[[Path], Bench]) -> None:
    bench = make(tmp_path / "site")
    bench.folder.save(bench.folder.kind(cluster="lab"))
    path = bench.folder.root / "state.json"
    for content, mode in [*((each, 0o640) for each in BROKEN), (path.read_bytes(), 0o664)]:
        path.write_bytes(content)
        path.chmod(mode)
        with contextlib.suppress(StoreError):  # power control goes on, and holds
            bench.once()
        assert (bench.world.told, path.read_bytes()) == ([], content)
        with pytest.raises(StoreError):
            bench.folder.load("lab")
    bench.folder.save(bench.folder.kind(cluster="other"))
    with pytest.raises(StoreError, match="other"):
        bench.folder.load("lab")


@pytest.mark.parametrize("planted", ["fifo", "folder", "link", "garbage"])
def test_whatever_lies_where_the_hold_file_belongs_holds(tmp_path: Path, planted: str) -> None:
    path = tmp_path / "hold"
    {
        "fifo": lambda: os.mkfifo(path), "folder": path.mkdir, "link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "garbage": lambda: path.write_bytes(b"\xff{"),
    }[planted]()  # type: ignore[operator]  # fmt: skip
    assert NodeFolder(tmp_path, PowerState).hold_reason() == "hold"


def test_records_and_states_of_an_earlier_almanac_are_read(tmp_path: Path) -> None:
    JsonLines(tmp_path, "actions-").append([{"time_s": NOW_S, "what": "drain", "node": "n1", "why": "x"}], NOW_S)
    folder = NodeFolder(tmp_path, MigState)
    assert folder.rows(1, NOW_S) == [{"time_s": NOW_S, "what": "drain", "nodes": "n1", "reason": "x"}]
    layouts = {"old": [["1g"] * 7], "new": [["gpu"]], "old_gpus": {"1g.10gb": 7}, "new_gpus": {"a100": 1}}
    one = {"node": "n1", "model": "A100-80", **layouts, "begun_s": 5, "stage": "apply", "stage_s": 6,
           "is_undone": False, "fault": ""}  # fmt: skip
    whole = {"version": 1, "cluster": "lab", "changes": {"n1": one}, "changed_s": {"n1": 6}, "released_s": {}}
    (tmp_path / "state.json").write_text(json.dumps(whole))
    state = folder.load("lab")
    assert (state.changes["n1"].old, state.changes["n1"].is_patient) == ((("1g",) * 7,), False)
    folder.save(state)
    assert folder.load("lab") == state
    with pytest.raises(ValueError, match="another node"):
        replace(state, changes={"n2": state.changes["n1"]})
