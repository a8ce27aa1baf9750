"""The two sides of a change of layouts: Slurm, and the node with its commands and Gres.

A job whose GPU type no node has gets BadConstraints and priority 0, and stays so when the type returns, until somebody
releases it. Jobs that a user or an operator holds have another reason, and are never released.

A node's side is mig-parted, run by the site's own commands, and the include file with the NodeName lines of slurm.conf.
Only `Gres=` of a node's own line is ever changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from almanac.actions_config import Mig
from almanac.atomic import replacing, writing
from almanac.bounded import Done, run
from almanac.errors import CommandError, ConfigError
from almanac.files import read_plain
from almanac.hardware import MigModel
from almanac.tres import gpu_types, with_gpus
from almanac.units import printable
from slurm.backend import CommandRunner, SlurmBackend
from slurm.nodes import SlurmNode, nodes_with_jobs
from slurm.queue import read_queue
from slurm.queued_job import QueuedJob
from slurm.releases import Release, release_of
from slurm.states import NODE_BUSY
from slurm_hooks.mig.layouts import Layout, parse_export, parted_config
from slurm_hooks.mig.steps import MigState, NodeSight
from slurm_hooks.nodes.engine import NodeEngine
from slurm_hooks.orders import Facts, job_facts, must_still_hold
from slurm_hooks.power.nodes import reserved_before

Run = Callable[[Sequence[str], bytes, float], Done]
"""Runs a command with an input and a time limit. Raises CommandError if it is missing or takes too long."""
MOST_BYTES = 16 << 20
MAX_BYTES = 8 << 20
_LINE = re.compile(r"(?i)\s*NodeName\s*=\s*(?P<names>[^\s#]+)(?P<rest>.*)")
_GRES = re.compile(r"(?i)(?P<key>\sGres\s*=\s*)(?P<value>[^\s#]*)")
HOW = "give each node that almanac may change a NodeName line of its own in this file (docs/mig.md)"
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
        """Read a node's layout. gres: the node's in Slurm. Raises SourceError if the output cannot be understood."""
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


@dataclass(frozen=True)
class IncludeFile:
    """A site's include file, on this host."""

    path: Path

    def read(self) -> str:
        """Read the file's text. Raises ConfigError if it cannot be read."""
        try:
            return read_plain(self.path, MAX_BYTES).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}", HOW) from error

    def write(self, text: str) -> None:
        """Replace the file, with its mode and owner; it is on disk when this returns. Raises StoreError."""
        with writing(self.path):
            target = self.path.resolve()
            known = target.stat()
            with replacing(target, stat.S_IMODE(known.st_mode)) as file:
                file.write(text.encode("utf-8", "surrogateescape"))
                if os.geteuid() == 0:
                    os.fchown(file.fileno(), known.st_uid, known.st_gid)


def gres_of_nodes(text: str) -> dict[str, str]:
    """Gres of each node that has a line of its own; nodes of a hostlist are left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) and re.fullmatch(r"[A-Za-z0-9_.-]+", match["names"]):
            gres = _GRES.search(match["rest"])
            found[match["names"]] = gres["value"] if gres else ""
    return found


def with_node_gres(text: str, node: str, gpus: Mapping[str, int]) -> str:
    """The file's text with other GPUs of one node. Raises ConfigError where the node has no line of its own."""
    lines = text.splitlines(keepends=True)
    own = [number for number, line in enumerate(lines) if (match := _LINE.match(line)) and match["names"] == node]
    if len(own) != 1 or _continues(lines, own[0]):
        raise ConfigError(f"{node} has {len(own)} NodeName lines in the include file, expected one", HOW)
    line = lines[own[0]]
    gres = _GRES.search(line)
    if gres is None:
        raise ConfigError(f"the NodeName line of {node} in the include file has no Gres", "add Gres= to it")
    new = with_gpus(gres["value"], gpus)
    lines[own[0]] = line[: gres.start("value")] + new + line[gres.end("value") :]
    return "".join(lines)


def _continues(lines: list[str], number: int) -> bool:
    """Return True if the line is a part of a longer one: a backslash ends the line before it, or it."""
    return any(lines[each].rstrip("\r\n").endswith("\\") for each in (number - 1, number) if each >= 0)


DYNAMIC = "DYNAMIC_NORM"
"""The state of nodes that registered by `slurmd -Z` and can be deleted."""
REASON = "BADCONSTRAINTS"
AGAIN_S = 86_400
"""A job that is stuck again within a day has another fault."""
_BUSY = NODE_BUSY | {"BLOCKED"}


@dataclass(frozen=True)
class SlurmView:
    """slurmctld's nodes at one moment. busy: with a job in any state. reserved: now or until the
    horizon; dynamic nodes: at any time."""

    nodes: Mapping[str, SlurmNode]
    busy: frozenset[str]
    reserved: frozenset[str]

    def sight(self, name: str, refusal: str = "") -> NodeSight | None:
        """Return what Slurm shows of a node; None if it does not list the node."""
        node = self.nodes.get(name)
        if node is None:
            return None
        return NodeSight(
            states=node.states,
            reason=node.reason,
            gres=node.gres,
            has_jobs=name in self.busy,
            is_reserved=name in self.reserved or bool(node.reservation),
            gres_used=node.gres_used,
            refusal=refusal,
        )


@dataclass(frozen=True)
class SlurmSide:
    """slurmctld, by backend and by commands. Everything raises CommandError without an answer."""

    backend: SlurmBackend
    commands: CommandRunner
    reserve_ahead_s: float
    cluster: str
    sleep: Callable[[float], None] = time.sleep

    def view(self, now_s: int) -> SlurmView:
        """Read nodes, jobs, and reservations.

        Jobs are read after the nodes: a node that is seen drained gets none in between.
        """
        nodes = {node.name: node for node in self.backend.nodes()}
        busy = nodes_with_jobs(self.commands) | {name for name, node in nodes.items() if node.states & _BUSY}
        reservations = self.backend.reservations()
        reserved = reserved_before(reservations, now_s, int(now_s + self.reserve_ahead_s))
        # Slurm deletes a dynamic node although a coming reservation has it; the reservation then loses it (22.05).
        coming = {name for each in reservations if each.end_s > now_s for name in each.nodes}
        lost = {name for name in coming & nodes.keys() if DYNAMIC in nodes[name].states}
        return SlurmView(nodes, frozenset(busy), reserved | lost)

    def queue(self, job_ids: Collection[int] = ()) -> list[QueuedJob]:
        """The jobs that wait for GPUs or hold some, or at least those of some numbers."""
        jobs = read_queue(self.commands, self.cluster, job_ids).jobs
        return [job for job in jobs if job.gpu_count and (job.is_waiting or job.holds_nodes)]

    def delete(self, node: str) -> list[str]:
        """Delete a dynamic node; what Slurm said against it. It refuses one with jobs."""
        said, code = self._said(for_node(["scontrol", "delete", "nodename={node}"], node))
        return said or ([f"scontrol delete ended with {code}"] if code else [])

    def release(self, address: str) -> list[str]:
        """Release a held job. Returns Slurm's objections."""
        return self._said(["scontrol", "release", address])[0]

    def _said(self, argv: Sequence[str]) -> tuple[list[str], int]:
        """Return Slurm's objections and the exit code of a command."""
        done = self.commands.feed(argv, b"")
        return [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()], done.code

    def reconfigure(self, node_side: NodeSide) -> None:
        """Make slurmctld and the nodes read the new Gres. Raises CommandError."""
        must_restart = not self.release_now().reconfigures_gres
        self.commands(["scontrol", "reconfigure"])
        if must_restart:
            node_side.restart_controller()
            with contextlib.suppress(CommandError):  # the nodes register at once; without it after up to 10 s
                self.commands(["scontrol", "reconfigure"])

    def release_now(self) -> Release:
        text = self.backend.release()
        if (found := release_of(text)) is None:
            raise CommandError(f"slurmctld's release is {text!r}", "check that slurmctld answers")
        return found


@dataclass(frozen=True)
class StuckJobs:
    """Jobs that were held for a GPU type that vanished.

    release: jobs whose type is in service again. wait: jobs whose type no node in service has.
    """

    release: tuple[QueuedJob, ...] = ()
    wait: tuple[QueuedJob, ...] = ()


def stuck_jobs(
    queue: Sequence[QueuedJob],
    slice_types: Collection[str],
    in_service: Collection[str],
    state: MigState,
    now_s: int,
) -> StuckJobs:
    """List the jobs held for a GPU type that vanished. slice_types: those that managed layouts can have."""
    own = [
        job
        for job in queue
        if job.is_pending and job.is_held and job.reason_key == REASON and job.gpu_type in slice_types
    ]
    return StuckJobs(
        release=tuple(
            job for job in own if job.gpu_type in in_service and now_s - state.released_s.get(_key(job), 0) >= AGAIN_S
        ),
        wait=tuple(job for job in own if job.gpu_type not in in_service),
    )


def release(
    jobs: Sequence[QueuedJob], slurm: SlurmSide, engine: NodeEngine[MigState], state: MigState
) -> tuple[MigState, list[str]]:
    """Log, remember, and release. Returns Slurm's objections too. The next run tries refused jobs again.

    Raises CommandError, StoreError.
    """
    if not jobs:
        return state, []
    now_s, said, left = engine.now_s(), list[str](), set[str]()
    kept = {key: time_s for key, time_s in state.released_s.items() if now_s - time_s < AGAIN_S}
    state = replace(state, released_s=kept | {_key(job): now_s for job in jobs})
    engine.record([engine.row("release", (), f"{job.gpu_type} is back", job=job.address) for job in jobs], state)
    for job in jobs:
        lines, why = _release(job, slurm)
        if why:
            engine.record([engine.row("dropped", (), why, job=job.address)])
        if lines or why:
            left.add(_key(job))
        said += lines
    if left:
        state = replace(state, released_s={key: s for key, s in state.released_s.items() if key not in left})
        engine.folder.save(state)
    return state, said


def _release(job: QueuedJob, slurm: SlurmSide) -> tuple[list[str], str]:
    """Release a job; try again if slurmctld has just restarted. Returns its objections, or why nothing was sent."""
    said: list[str] = []

    def read(keys: Collection[str]) -> dict[str, Facts]:
        number = int(re.match(r"[0-9]+", job.address)[0])  # type: ignore[index]
        return {_key(each): job_facts(each) for each in slurm.queue([number])}

    for wait_s in (1, 2, 4, 0):
        if why := must_still_hold({_key(job): job_facts(job)}, read).get(_key(job), ""):
            return [], why
        said = slurm.release(job.address)
        if not wait_s or not any("try again" in line for line in said):
            break
        slurm.sleep(wait_s)
    return said, ""


def _key(job: QueuedJob) -> str:
    """Job ids are used again after a reset; the time of submission tells them apart."""
    return f"{job.address} {job.submit_s}"
