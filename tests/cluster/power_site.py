"""A site whose nodes almanac powers: the command, a forecast that the test makes, and time compressed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from site_commands import SiteCommands
from sites import Site

import cli.power
from advisor.power.model import PowerDecision, Spent
from almanac.config import NodeSet
from cli.app import App
from cli.power import command
from slurm.backend import CommandBackend
from slurm.commands import Done
from slurm.node_sets import LiveDemand
from slurm.nodes import SlurmNode
from slurm.queued_job import QueuedJob
from telemetry.store.store import Store

QUICK = {"ResumeTimeout": "10", "SuspendTimeout": "3", "SlurmdTimeout": "45", "SuspendRate": "0", "ResumeRate": "0"}
CONFIG = """
[power]
mode = "apply"
cooldown_s = 0
cycles_per_day = 50
[[node_sets]]
name = "gpu"
nodes = "n[1-4]"
"""
OFF = {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP"}
READY = ({"IDLE"}, {"IDLE", "POWER_UP"})
"""A node that was told to power up while it booted keeps POWER_UP, and takes jobs."""


@contextmanager
def quick_slurm(site: Site, **more: str) -> Iterator[None]:
    """slurm.conf of the controller with short times, and as it was afterwards."""
    path = f"{site.etc_dir}/slurm.conf"
    before = site.read("ctl", path)
    text = before.decode()
    for name, value in {**QUICK, **more}.items():
        text = re.sub(rf"(?m)^{name}=.*\n", "", text) + f"{name}={value}\n"
    try:
        _configure(site, path, text.encode())
        yield
    finally:
        _configure(site, path, before)


def _configure(site: Site, path: str, content: bytes) -> None:
    site.write("ctl", path, content)
    site.run("ctl", "root", "scontrol", "reconfigure")
    wait_until("slurmctld to answer", lambda: site.run("ctl", "root", "scontrol", "ping", check=False).rc == 0)
    site.wait_for_nodes()


@dataclass
class Wanted:
    """A DemandSource that says what the test says."""

    target: int | None = None
    noted: list[LiveDemand] = field(default_factory=list)

    def run_times_s(self, pending: Sequence[QueuedJob], now_s: int) -> Mapping[int, float]:
        return {job.job_id: 3600.0 for job in pending}

    def note(self, node_set: NodeSet, demand: LiveDemand, now_s: int) -> None:
        self.noted.append(demand)

    def decide(self, node_set: NodeSet, names: Sequence[str], powered: int, spent: Spent, now_s: int) -> PowerDecision:
        return PowerDecision(self.target, "the test says so")


class KilledCommands(SiteCommands):
    """The process that uses them is killed when it first tells Slurm something."""

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done:
        if argv[:2] == ["scontrol", "update"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(argv, stdin)


@dataclass
class PowerSite:
    """The command on a site. Every call is one run, as the timer does it."""

    site: Site
    folder: Path
    capsys: pytest.CaptureFixture[str]
    source: Wanted = field(default_factory=Wanted)

    @property
    def backend(self) -> CommandBackend:
        return CommandBackend(SiteCommands(self.site))

    def app(self, commands: SiteCommands) -> App:
        places = str(self.folder / "almanac.toml"), str(self.folder / "store")
        return App(*places, self.backend.cluster(), run=commands)

    def __call__(self, *argv: str, user: str = "root", code: int = 0) -> Any:
        """Return the command's JSON."""
        app = self.app(SiteCommands(self.site, user))
        self.capsys.readouterr()
        assert (command.main(args=[*argv, "--json"], standalone_mode=False, obj=app) or 0) == code
        return json.loads(self.capsys.readouterr().out)

    def apply(self, target: int | None, **options: Any) -> dict[str, Any]:
        """Return the outcome of one run for the node set."""
        self.source.target = target
        [done] = self("plan", "--apply", **options)["node_sets"]
        result: dict[str, Any] = done
        return result

    def said(self, *argv: str) -> str:
        """Return the command's text for people."""
        self.capsys.readouterr()
        command.main(args=list(argv), standalone_mode=False, obj=self.app(SiteCommands(self.site)))
        return self.capsys.readouterr().out

    def killed_apply(self, target: int) -> None:
        """A run that gets SIGKILL when it first tells Slurm something, in a process of its own."""
        self.source.target = target
        app = self.app(KilledCommands(self.site))
        child = os.fork()
        if child == 0:
            try:
                command.main(args=["plan", "--apply", "--json"], standalone_mode=False, obj=app)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def lines(self) -> list[dict[str, Any]]:
        texts = (path.read_text() for path in sorted((self.folder / "store/power").glob("*.jsonl")))
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def nodes(self) -> dict[str, SlurmNode]:
        return {node.name: node for node in self.backend.nodes()}

    def wait_for(self, what: str, check: Callable[[dict[str, SlurmNode]], bool]) -> dict[str, SlurmNode]:
        """Waits until the nodes are as wanted. Raises LabError, with the states that they are in."""
        seen: dict[str, SlurmNode] = {}

        def is_so() -> bool:
            seen.update(self.nodes())
            return check(seen)

        try:
            wait_until(what, is_so)
        except RuntimeError as error:
            states = {name: (sorted(node.states), node.reason) for name, node in seen.items()}
            raise type(error)(f"{error}: {states}") from None
        return seen

    def wait_asleep(self, *names: str) -> None:
        self.wait_for(f"{names} asleep", lambda nodes: all("POWERED_DOWN" in nodes[name].states for name in names))

    def wait_up(self, *names: str) -> None:
        self.wait_for(f"{names} up", lambda nodes: all(is_up(nodes[name]) for name in names))

    def heal(self, target: int, name: str) -> None:
        """Runs as the timer does, until a node is up. A slurmctld that restarts can forget an order of the last seconds
        (22.05 to 26.05).
        """

        def is_well() -> bool:
            self.apply(target)
            return self.nodes()[name].states in READY

        try:
            wait_until(f"{name} to be up", is_well)
        except RuntimeError as error:
            node = self.nodes()[name]
            raise type(error)(f"{error}: {sorted(node.states)} {node.reason!r}") from None

    def restore(self) -> None:
        """Every node idle again, whatever a test left."""
        self.site.bmc("mended", "n1", "n2", "n3", "n4")
        stuck = [name for name, node in self.nodes().items() if {"DOWN", "POWERED_DOWN"} <= node.states]
        if stuck:
            self.site.bmc("off", *stuck)
        for node in self.nodes().values():
            if node.states & {"DRAIN", "DOWN"} and "POWER_DOWN" not in node.states:
                self.backend.set_node_state([node.name], "resume")
        off = [name for name, node in self.nodes().items() if node.states & OFF]
        if off:
            self("wake", ",".join(off))
        self.wait_up("n1", "n2", "n3", "n4")

    def wait_ready(self) -> None:
        """Until every node can take a job: after a restart, slurmctld takes nodes for UNKNOWN until they answer."""
        self.wait_for("every node ready", lambda nodes: all(node.states in READY for node in nodes.values()))


def is_up(node: SlurmNode) -> bool:
    return node.states in READY or not node.states & (OFF | {"DOWN", "DRAIN", "NOT_RESPONDING"})


@contextmanager
def power_site(site: Site, folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[PowerSite]:
    (folder / "almanac.toml").write_text(CONFIG)
    Store.create(folder / "store")
    made = PowerSite(site, folder, capsys)
    before = cli.power.source_of
    cli.power.source_of = lambda app, store: made.source
    made.wait_ready()
    try:
        yield made
    finally:
        made.restore()
        cli.power.source_of = before
