"""`almanac mig` on a site with fake MIG GPUs: the command as a timer runs it, with a decision that the test makes."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mig_site import MigSite
from site_commands import SiteCommands

import advisor.mig.decide
import slurm_hooks.mig.sides
import slurm_hooks.mig.steps
from advisor.mig.decide import LayoutChange, LayoutPlan, MigNode, SliceJob
from almanac.errors import CommandError
from almanac.tres import gpu_types
from cli.app import App
from cli.mig import command
from slurm.backend import CommandBackend
from slurm.commands import Done
from slurm_hooks.mig.layouts import Layout
from slurm_hooks.mig.sides import SlurmSide
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.orders import JsonLines
from telemetry.store.store import Store

WHOLE: Layout = (("gpu",),) * 4
ONES: Layout = (("1g",) * 7, *WHOLE[1:])
HALVES: Layout = (("3g", "4g"), *WHOLE[1:])
GRES = {WHOLE: "gpu:a100:4", ONES: "gpu:1g.5gb:7,gpu:a100:3", HALVES: "gpu:3g.20gb:1,gpu:4g.20gb:1,gpu:a100:3"}
SLEEP = "#!/bin/sh\nsleep {}\n"
CONFIG = """
[mig]
mode = "apply"
nodes = ["n1=A100-40"]
drain_busy = true
restart_command = ["restart"]
register_command = ["register", "{node}"]
distribute_command = ["distribute", "{node}"]
apply_command = ["{node}", "apply", "-f", "-", "-c", "almanac"]
assert_command = ["{node}", "assert", "-f", "-", "-c", "almanac"]
export_command = ["{node}", "export", "-o", "json"]
"""


@dataclass
class MigApply:
    """Every call is one run, as the timer does it. wanted: the layouts that the decision asks for.

    is_draining: it asks for them on busy nodes, too.
    """

    mig: MigSite
    folder: Path
    capsys: pytest.CaptureFixture[str]
    wanted: dict[str, Layout] = field(default_factory=dict)
    is_draining: bool = False
    kill_at: int = 0
    points: list[str] = field(default_factory=list)
    restart: Callable[[], None] | None = None

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def decide(self, nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int) -> LayoutPlan:
        wanted = {
            node: LayoutChange(node.name, node.gpus, self.wanted[node.name], "the test says so")
            for node in nodes
            if node.target is None and self.wanted.get(node.name, node.gpus) != node.gpus
        }
        changes = tuple(each for node, each in wanted.items() if node.is_free or not self.is_draining)
        drains = tuple(each for node, each in wanted.items() if not node.is_free and self.is_draining)
        return LayoutPlan(changes, "" if changes else "the test says so", drains=drains)

    def app(self) -> App:
        commands = SiteCommands(self.mig.site)
        cluster = CommandBackend(commands).cluster()
        return App(str(self.folder / "almanac.toml"), str(self.store), cluster, run=commands)

    def __call__(self, *argv: str, code: int = 0) -> Any:
        """Return the command's JSON."""
        said = self.said(*argv, "--json", code=code)
        return json.loads(said)

    def said(self, *argv: str, code: int = 0) -> str:
        """Return the command's text for people."""
        self.capsys.readouterr()
        done = command.main(args=list(argv), standalone_mode=False, obj=self.app()) or 0
        said = self.capsys.readouterr()
        assert done == code, said
        return said.out

    def apply(self, code: int = 0) -> dict[str, str]:
        """Return the outcome of each node."""
        return {each["node"]: each["what"] for each in self("plan", "--apply", code=code)["outcomes"]}

    def forget_the_day(self) -> None:
        """A node may be changed once a day; tests change it more often."""
        path = self.store / "mig/state.json"
        if path.exists():
            content = json.loads(path.read_text())
            path.write_text(json.dumps({**content, "changed_s": {}}))

    def lines(self) -> list[dict[str, Any]]:
        texts = (path.read_text() for path in sorted((self.store / "mig").glob("*.jsonl")))
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def on_node(self, argv: Sequence[str], stdin: bytes, timeout_s: float) -> Done:
        """Stand-ins for the commands of [mig]."""
        if argv[0] == "restart":
            (self.restart or self._restart)()
        elif argv[0] == "distribute":
            if len(self.mig._hosts(argv[1])) > 1:
                self.mig.site.write(argv[1], self.mig.include, self.mig.site.read("ctl", self.mig.include))
        elif argv[0] == "register":
            done = self.mig.site.run_bytes(argv[1], "root", f"{self.mig.bin_dir(argv[1])}/register", stdin=stdin)
            self.point(f"after {argv[:2]}")
            return Done(done.returncode, done.stdout, done.stderr)
        else:
            host, *rest = argv
            program = ["timeout", "-s", "KILL", str(timeout_s), f"{self.mig.bin_dir(host)}/nvidia-mig-parted"]
            done = self.mig.site.run_bytes(host, "root", *program, *rest, stdin=stdin)
            if done.returncode in (124, 137, -9):
                raise CommandError(f"{rest[0]} timed out after {timeout_s:g} s")
            self.point(f"after {argv[:2]}")
            return Done(done.returncode, done.stdout, done.stderr)
        self.point(f"after {argv[:2]}")
        return Done(0, b"", b"")

    def _restart(self) -> None:
        self.mig.site.stop_server("slurmctld")
        self.mig.site.start_server("slurmctld")

    def point(self, what: str) -> None:
        """A place to be killed at, in a process of its own: after each effect, which is before the next one."""
        self.points.append(what)
        if self.kill_at and len(self.points) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed_apply(self, kill_at: int) -> bool:
        """A run that gets SIGKILL at its n-th point, in a process of its own; False if it ended before."""
        ask, do = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            self.points, self.kill_at = [], kill_at
            self.restart = lambda: (os.write(ask[1], b"r"), os.read(do[0], 1))  # type: ignore[assignment, return-value]
            try:
                command.main(args=["plan", "--apply", "--json"], standalone_mode=False, obj=self.app())
            finally:
                os._exit(0)
        try:
            while True:
                if select.select([ask[0]], [], [], 0.02)[0]:
                    os.read(ask[0], 1)
                    self._restart()
                    os.write(do[1], b"d")
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        finally:
            for end in (*ask, *do):
                os.close(end)

    def check(self) -> None:
        """A node that takes jobs has in Slurm what its GPUs are."""
        node = self.mig.node("n1")
        if node and "DRAIN" not in node["State"]:
            assert gpu_types(node["Gres"]) == gpu_types(self.mig.fake("n1", "gres")), node

    def kill_again_and_again(self, most: int, layouts: list[Layout], points: int) -> None:
        """Change n1 to these layouts by turns, with runs that are killed at one point after the other."""
        kills = at = 0
        while kills < most:
            self.forget_the_day()
            self.wanted = {"n1": layouts[0]}
            layouts.reverse()
            for _ in range(20):
                at = at % points + 1
                if not self.killed_apply(at):
                    break
                kills += 1
                self.check()
            self.kill_at = 0
            outcomes = self("plan", "--apply")["outcomes"]
            assert {each["what"] for each in outcomes} <= {"done"}, (outcomes, self.mig.node("n1"), self.lines()[-3:])
            assert self.mig.node("n1")["Gres"] == GRES[self.wanted["n1"]]
            self.check()


@contextmanager
def mig_apply_site(mig: MigSite, folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[MigApply]:
    """The parts of the command that reach a node, or a file of the controller, are the site's."""
    (folder / "almanac.toml").write_text(f'{CONFIG}include_file = "{mig.include}"\n')
    Store.create(folder / "store")
    made = MigApply(mig, folder, capsys)
    site = mig.site

    class SiteInclude(slurm_hooks.mig.sides.IncludeFile):
        def read(self) -> str:
            return site.read("ctl", str(self.path)).decode()

        def write(self, text: str) -> None:
            site.write("ctl", str(self.path), text.encode())
            made.point("after write")

    def pointed(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            made.point(f"after {name}")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm_hooks.mig.sides, "IncludeFile", SiteInclude)
        patch.setattr(slurm_hooks.mig.sides, "run_bounded", made.on_node)
        patch.setattr(slurm_hooks.mig.sides, "COMMAND_S", 4)
        patch.setattr(slurm_hooks.mig.steps, "JOB_WAIT_S", 4)
        patch.setattr(advisor.mig.decide, "decide_layout", made.decide)
        patch.setattr(NodeFolder, "save", pointed("save", NodeFolder.save))
        patch.setattr(JsonLines, "append", pointed("log", JsonLines.append))
        patch.setattr(SlurmSide, "delete", pointed("delete", SlurmSide.delete))
        patch.setattr(CommandBackend, "set_node_state", pointed("order", CommandBackend.set_node_state))
        yield made
