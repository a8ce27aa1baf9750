"""A Slurm and its nodes in memory, which ends the test where a promise of `almanac mig apply` is broken."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from watched import BrokenPromiseError, Watched

from advisor.mig.decide import LayoutChange
from almanac.actions_config import Mig
from almanac.tres import gpu_types, with_gpus
from slurm.backend import Reservation
from slurm.commands import Done, Settings, parse_settings
from slurm.nodes import SlurmNode
from slurm_hooks.mig.layouts import Layout, gres_names, mig_settings, parse_export
from slurm_hooks.mig.run import MigRun
from slurm_hooks.mig.sides import IncludeFile, NodeSide, SlurmSide, gres_of_nodes
from slurm_hooks.mig.steps import MigState
from slurm_hooks.nodes.engine import NodeEngine, NodeFolder
from slurm_hooks.orders import JsonLines

SEVEN: Layout = (("1g",) * 7, ("gpu",))
HALVES: Layout = (("3g", "4g"), ("gpu",))
WHOLE: Layout = (("gpu",), ("gpu",))
NAMES = gres_names("A100-80", (), "{profile}")


@dataclass
class FakeNode:
    layout: Layout
    gres: str
    states: set[str] = field(default_factory=lambda: {"IDLE"})
    reason: str = ""
    jobs: int = 0
    asserted: Layout | None = None
    conf: str = ""
    is_listed: bool = True


@dataclass
class World(Watched):
    """faults: what each command on a node does, taken in order; "" is to work. Each effect is a point to be killed at.
    refusals: answers to releases, in turn.

    dynamic: nodes that registered by `slurmd -Z`. bad_conf: their slurmd drops State=DRAIN.
    """

    folder: Path
    layouts: dict[str, Layout]
    release_text: str = "24.11.5"
    faults: list[str] = field(default_factory=list)
    seed: int | None = None
    demand: frozenset[str] = frozenset()
    now_s: float = 1_800_000_000.0
    queue: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[bytes] = field(default_factory=list)
    reserved: list[Reservation] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    configuration_text: str = ""
    dynamic: frozenset[str] = frozenset()
    bad_conf: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.nodes = {name: FakeNode(each, with_gpus("", NAMES.types(each))) for name, each in self.layouts.items()}
        for name in self.dynamic:
            self.nodes[name].states.add("DYNAMIC_NORM")
            self.nodes[name].conf = f"Gres={self.nodes[name].gres}"
        static = {name: node for name, node in self.nodes.items() if name not in self.dynamic}
        lines = (f"NodeName={name} CPUs=8 Gres={node.gres} State=UNKNOWN\n" for name, node in static.items())
        (self.folder / "almanac-mig.conf").write_text("# ours\n" + "".join(lines))
        self.record = self.record or JsonLines(self.folder / "mig", "actions-")

    # -- what the run is given --

    def run(self, **options: Any) -> MigRun:
        config = {"nodes": (f"{','.join(self.nodes)}=A100-80",), **options}
        if self.dynamic:
            config = {"register_command": ("ssh", "-oBatchMode=yes", "{node}", "register"), **config}
        settings = mig_settings(Mig(mode="apply", **config))
        run = MigRun(
            settings=settings,
            engine=NodeEngine(
                Folder(self.folder / "mig", MigState, self),
                Backend(self),
                "lab",
                lambda: self.now_s,  # type: ignore[arg-type]
            ),
            slurm=SlurmSide(Backend(self), self, 3600, "lab", self.sleep),  # type: ignore[arg-type]
            node_side=NodeSide(settings.config, self.on_node),
            include=Include(self.folder / "almanac-mig.conf", self),
            sleep=self.sleep,
            wanted=self.demand,
        )
        run.load()
        return run

    def apply(
        self, *changes: LayoutChange, give_back: Collection[str] = (), is_patient: bool = False, **options: Any
    ) -> dict[str, str]:
        """Run as `mig apply` does. Returns what became of each node. is_patient: as with mig.drain_busy."""
        run = self.run(**options)
        run.drive()
        run.give_back(give_back, "the test says so")
        run.begin(changes, is_patient)
        run.drive()
        self.why = [each.why for each in run.outcomes.values()]
        return {node: each.what for node, each in run.outcomes.items()}

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1)
        self.disturb()

    def disturb(self) -> None:
        """Other users: jobs begin and end."""
        if self.seed is None:
            return
        for name, node in self.nodes.items():
            if not node.is_listed and self.random.random() < 0.2:
                self.start_slurmd(name)  # the node reboots
            takes = node.is_listed and not node.states & {"DRAIN", "DOWN"}
            if takes and name in self.dynamic and gpu_types(node.gres) != NAMES.types(node.layout):
                raise BrokenPromiseError(f"{name} takes jobs with another layout than Slurm has: {node}")
            if takes and self.random.random() < 0.3:
                node.jobs += 1
            elif node.jobs and self.random.random() < 0.5:
                node.jobs -= 1
            node.states -= {"IDLE", "ALLOCATED"}
            node.states |= {"ALLOCATED"} if node.jobs else {"IDLE"}

    # -- Slurm --

    def nodes_now(self) -> list[SlurmNode]:
        self.look()
        self.disturb()
        return [
            SlurmNode(name, frozenset(each.states), gres=each.gres, reason=each.reason)
            for name, each in self.nodes.items()
            if each.is_listed
        ]

    def release(self) -> str:
        return self.release_text

    def cluster(self) -> str:
        return "lab"

    def settings(self) -> Settings:
        return parse_settings(self.configuration_text)

    def reservations(self) -> list[Reservation]:
        return self.reserved

    def set_node_state(self, names: Sequence[str], state: str, reason: str = "") -> list[str]:
        [name] = names
        node = self.nodes[name]
        if state == "drain":
            self.ordered([name], "drain", "fail")
            if "DRAIN" not in node.states:
                self.require_types(name)
            self.point()
            node.states.add("DRAIN")
            node.reason = reason
        else:
            self.ordered([name], "resume")
            self.require_verified(name)
            self.point()
            node.states.discard("DRAIN")
            node.reason = ""
        self.said.append(f"{state} {name}")
        self.point()
        return []

    def __call__(self, argv: Sequence[str]) -> bytes:
        if argv[:2] == ["squeue", "-h"]:
            return "\n".join(name for name, each in self.nodes.items() if each.jobs).encode()
        if argv[:2] == ["squeue", "-a"]:
            return json.dumps({"jobs": self.queue}).encode()
        assert argv == ["scontrol", "reconfigure"], argv
        self.ordered((), "reconfigure")
        self.point()
        for node in self.nodes.values():
            node.asserted = None  # what was verified before Slurm has read the new Gres does not count
        if self.release_text >= "24.11":
            self.read_conf()
        self.point()
        return b""

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        if argv[:2] == ["scontrol", "delete"]:
            return self.delete(argv[2].removeprefix("nodename="))
        assert argv[:2] == ["scontrol", "release"]
        self.ordered((), "release")
        self.said.append(" ".join(argv))
        said = self.refusals.pop(0) if self.refusals else b""
        return Done(int(bool(said)), b"", said)

    def delete(self, name: str) -> Done:
        node = self.nodes[name]
        self.ordered([name], "delete")
        assert name in self.dynamic
        if "State=DRAIN" not in node.conf or "DRAIN" not in node.states:
            raise BrokenPromiseError(f"{name} would come back undrained: {node}")
        if any(name in each.nodes for each in self.reserved):
            raise BrokenPromiseError(f"the reservation of {name} loses it")
        if node.jobs:
            return Done(1, b"", b"delete_node nodename=n1: Requested nodes are busy")
        self.point()
        node.is_listed, node.asserted = False, None
        self.point()
        return Done(0, b"", b"")

    def start_slurmd(self, name: str) -> None:
        """slurmctld takes the Gres and the state of a node only if it does not know the node."""
        node = self.nodes[name]
        if node.is_listed:
            return
        words = dict(word.split("=", 1) for word in node.conf.split())
        is_drained = words.get("State") == "DRAIN" and not self.bad_conf
        node.states = {"IDLE", "DYNAMIC_NORM"} | ({"DRAIN"} if is_drained else set())
        has_reason = is_drained and self.release_text >= "24.11"
        node.reason = words.get("Reason", "") if has_reason else ""
        node.gres, node.is_listed = words["Gres"], True

    def register(self, name: str, parameters: str) -> Done:
        self.ordered([name], "write gres", "register", "settle")
        fault = self.faults.pop(0) if self.faults else ""
        self.point()
        if fault == "refused":
            return Done(1, b"", b"Job for slurmd.service failed")
        self.nodes[name].conf = parameters
        self.point()
        if fault != "half":
            self.start_slurmd(name)
            if gpu_types(self.nodes[name].gres) != gpu_types(parameters.split()[0].removeprefix("Gres=")):
                self.nodes[name].states.add("INVALID_REG")
                self.nodes[name].gres = parameters.split()[0].removeprefix("Gres=")  # as 22.05 shows it
                if self.release_text >= "24.11":
                    self.nodes[name].reason = "gres/gpu count reported lower than configured (2 < 8)"
        self.point()
        return Done(0, b"", b"")

    def read_conf(self) -> None:
        for name, gres in gres_of_nodes((self.folder / "almanac-mig.conf").read_text()).items():
            node = self.nodes[name]
            if gres != node.gres and node.jobs:
                raise BrokenPromiseError(f"Gres of {name} changes under a job")
            node.gres = gres

    # -- the node --

    def on_node(self, argv: Sequence[str], stdin: bytes, timeout_s: float) -> Done:
        if argv[0] == "systemctl":
            self.read_conf()
            return Done(0, b"", b"")
        name = argv[2]
        if argv[-1] == "register":
            return self.register(name, stdin.decode())
        node, what = self.nodes[name], argv[argv.index("nvidia-mig-parted") + 1]
        if what == "export":
            return Done(0, parted(node.layout), b"")
        wanted = parse_export(NAMES.model, stdin)
        fault = self.faults.pop(0) if self.faults else ""
        if what == "assert":
            node.asserted = node.layout if node.layout == wanted and not fault else None
            return Done(0 if node.asserted else 1, b"", b"Assertion failure")
        self.ordered([name], "apply")
        is_ours = "DRAIN" in node.states and not node.jobs and node.reason.startswith("almanac mig:")
        if not is_ours and node.is_listed:
            raise BrokenPromiseError(f"{name} is changed while it is {node.states}, with {node.jobs} jobs")
        node.asserted = None
        self.point()
        if fault == "half":
            node.layout = (wanted[0], *node.layout[1:])
            return Done(1, b"", b"half applied")
        if fault == "refused":
            return Done(1, b"", b"In use by another client")
        if fault != "wrong":
            node.layout = wanted
        self.point()
        return Done(0, b"MIG configuration applied successfully", b"")

    # -- promises --

    def require_verified(self, name: str) -> None:
        node = self.nodes[name]
        if not node.reason.startswith("almanac mig:"):
            raise BrokenPromiseError(f"{name} is resumed from the drain {node.reason!r}")
        if node.asserted != node.layout or gpu_types(node.gres) != NAMES.types(node.layout):
            raise BrokenPromiseError(f"{name} is resumed unverified: {node}")

    def require_types(self, name: str) -> None:
        others = [
            each
            for other, each in self.nodes.items()
            if other != name and each.is_listed and not each.states & {"DRAIN", "DOWN"}
        ]
        left = {kind for each in others for kind in gpu_types(each.gres)}
        if gone := (gpu_types(self.nodes[name].gres).keys() & self.demand) - left:
            raise BrokenPromiseError(f"no node in service has {gone}")

    def rows(self) -> list[dict[str, Any]]:
        return list(self.record.read(0, 2**33)) if self.record else []

    def logged(self) -> list[str]:
        return [row["what"] for row in self.rows()]


@dataclass(frozen=True)
class Backend:
    """The world as a SlurmBackend, as far as it is used."""

    world: World

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        return self.world.nodes_now()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)


@dataclass(frozen=True)
class Folder(NodeFolder[MigState]):
    """Can be killed before and after a save."""

    world: World

    def save(self, state: MigState) -> None:
        self.world.point()
        super().save(state)
        self.world.point()


@dataclass(frozen=True)
class Include(IncludeFile):
    """Can be killed before and after the write."""

    world: World

    def write(self, text: str) -> None:
        self.world.point()
        super().write(text)
        self.world.point()


def parted(layout: Layout) -> bytes:
    entries = [
        {"devices": [number], "mig-enabled": False}
        if gpu == ("gpu",)
        else {
            "devices": [number],
            "mig-enabled": True,
            "mig-devices": Counter(NAMES.type_of(shape) for shape in gpu),
        }
        for number, gpu in enumerate(layout)
    ]
    if len(set(layout)) == 1:
        entries = [{**entries[0], "devices": "all"}]
    return json.dumps({"version": "v1", "mig-configs": {"current": entries}}).encode()


def change(node: str, old: Layout, new: Layout) -> LayoutChange:
    return LayoutChange(node, old, new, "the test says so")
