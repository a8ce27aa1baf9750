"""What is asked of a node itself: mig-parted's apply, assert and export, through the site's own commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from almanac.actions_config import Mig
from almanac.bounded import Done, run
from almanac.errors import CommandError
from almanac.mig import MigModel
from almanac.units import printable
from slurm_hooks.mig.layouts import Layout, gpu_types, parse_export, parted_config

Run = Callable[[Sequence[str], bytes, float], Done]
"""Runs a command with an input and a time limit. Raises CommandError where it is missing or takes too long."""
MOST_BYTES = 16 << 20
COMMAND_S = 300
"""Seconds after which a command on a node has failed: mig-parted takes one minute."""
_LOGGED = re.compile(r'\bmsg="((?:[^"\\]|\\.)*)"')
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True)
class NodeSide:
    """Runs the commands of [mig] for one node. Everything raises CommandError with what the command said."""

    config: Mig
    run: Run

    def apply(self, node: str, model: MigModel, layout: Layout) -> None:
        self._tell(self.config.apply_command, node, parted_config(model, layout))

    def require(self, node: str, model: MigModel, layout: Layout) -> None:
        """Returns if the node has this layout."""
        self._tell(self.config.assert_command, node, parted_config(model, layout))

    def export(self, node: str, model: MigModel, gres: str) -> Layout:
        """gres: the node's in Slurm. Raises SourceError where the output cannot be understood."""
        return parse_export(model, self._tell(self.config.export_command, node), sum(gpu_types(gres).values()))

    def write_gres(self, node: str) -> None:
        if self.config.gres_command:
            self._tell(self.config.gres_command, node)

    def register(self, node: str, parameters: str) -> None:
        """Restart a dynamic node's slurmd with these parameters of `--conf`."""
        self._tell(self.config.register_command, node, f"{parameters}\n".encode())

    def distribute(self, node: str) -> None:
        if self.config.distribute_command:
            self._tell(self.config.distribute_command, node)

    def restart_controller(self) -> None:
        self._tell(self.config.restart_command, "")

    def _tell(self, command: Sequence[str], node: str, stdin: bytes = b"") -> bytes:
        argv = for_node(command, node)
        done = self.run(argv, stdin, COMMAND_S)
        if done.code:
            said = printable(last_message(done.stderr) or last_message(done.stdout) or "nothing", 300)
            raise CommandError(f"{argv[0]} ended with {done.code}: {said}", f"run it yourself: {' '.join(argv)}")
        return done.stdout


def for_node(command: Sequence[str], node: str) -> list[str]:
    """A command of the configuration with {node} filled in. Raises CommandError for what is no node's name."""
    if not command:
        raise CommandError("a command of [mig] is empty", "see docs/configuration.md for its default")
    if node and not _NODE.fullmatch(node):
        raise CommandError(f"{printable(node, 80)!r} is no name of a node", "correct mig.nodes")
    return [part.replace("{node}", node) for part in command]


def last_message(output: bytes) -> str:
    """The last line; of mig-parted's log, `time="..." level=fatal msg="..."`, only the message."""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines:
        return ""
    found = _LOGGED.search(lines[-1])
    return found[1].replace('\\"', '"') if found else lines[-1].strip()


def run_bounded(argv: Sequence[str], stdin: bytes, timeout_s: float) -> Done:
    """Run a command; it and what it started have ended when this returns. Raises CommandError."""
    try:
        return run(argv, stdin=stdin, timeout_s=timeout_s, most_bytes=MOST_BYTES)
    except TimeoutError as error:
        raise CommandError(f"{argv[0]} {error}", "look at the node") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{argv[0]}: {why}", "correct the commands of [mig]") from error
