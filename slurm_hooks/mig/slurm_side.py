"""What the change of a layout asks of slurmctld and tells it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from almanac.errors import CommandError
from slurm_hooks.last_look import Facts, node_facts
from slurm_hooks.mig.node_side import NodeSide, for_node
from slurm_hooks.mig.steps import NodeSight
from slurm_hooks.power.nodes import reserved_before
from telemetry.slurm.backend import Node, SlurmBackend
from telemetry.slurm.command_backend import CommandRunner
from telemetry.slurm.gpu_queue import QueuedGpuJob, gpu_jobs
from telemetry.slurm.hostlist import expand
from telemetry.slurm.queue_json import queue_of

HOLDING = "RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STOPPED,RESIZING,SIGNALING,STAGE_OUT"
"""States of jobs that have nodes. A suspended job leaves its node idle, and keeps its GPUs."""
RECONFIGURE_SINCE = (24, 11)
"""Since this release `scontrol reconfigure` takes a node's new Gres; before, slurmctld must restart."""
DYNAMIC = "DYNAMIC_NORM"
"""The state of nodes that registered by `slurmd -Z` and can be deleted."""
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING", "BLOCKED"})


@dataclass(frozen=True)
class SlurmView:
    """slurmctld's nodes at one moment. busy: with a job in any state. reserved: now or until the
    horizon; dynamic nodes: at any time."""

    nodes: Mapping[str, Node]
    busy: frozenset[str]
    reserved: frozenset[str]

    def sight(self, name: str, refusal: str = "") -> NodeSight | None:
        """None where Slurm does not list the node."""
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
    """slurmctld, by backend and by commands. Everything raises CommandError where it does not answer."""

    backend: SlurmBackend
    commands: CommandRunner
    reserve_ahead_s: float
    sleep: Callable[[float], None] = time.sleep

    def view(self, now_s: int) -> SlurmView:
        """Jobs are read after the nodes: a node that is seen drained gets none in between."""
        nodes = {node.name: node for node in self.backend.nodes()}
        busy = self._nodes_with_jobs() | {name for name, node in nodes.items() if node.states & _BUSY}
        reservations = self.backend.reservations()
        reserved = reserved_before(reservations, now_s, int(now_s + self.reserve_ahead_s))
        # Slurm deletes a dynamic node although a coming reservation has it; the reservation then loses it (22.05).
        coming = {name for each in reservations if each.end_s > now_s for name in each.nodes}
        lost = {name for name in coming & nodes.keys() if DYNAMIC in nodes[name].states}
        return SlurmView(nodes, frozenset(busy), reserved | lost)

    def _nodes_with_jobs(self) -> set[str]:
        text = self.commands(["squeue", "-h", "-a", "-t", HOLDING, "-o", "%N"]).decode("utf-8", "replace")
        found: set[str] = set()
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                found.update(expand(line))
            except ValueError as error:
                raise CommandError(f"squeue printed a list of nodes that cannot be read: {error}") from error
        return found

    def node_facts(self, names: Collection[str]) -> dict[str, Facts]:
        """Some nodes now, for `must_still_hold`."""
        return {node.name: node_facts(node) for node in self.backend.nodes(names)}

    def queue(self, job_ids: Collection[int] = ()) -> list[QueuedGpuJob]:
        """All jobs, or at least those of some numbers."""
        return gpu_jobs(queue_of(self.commands, job_ids))

    def drain(self, node: str, reason: str) -> list[str]:
        return self.backend.set_node_state([node], "drain", reason)

    def resume(self, node: str) -> list[str]:
        return self.backend.set_node_state([node], "resume")

    def delete(self, node: str) -> list[str]:
        """Delete a dynamic node; what Slurm said against it. It refuses one with jobs."""
        done = self.commands.feed(for_node(["scontrol", "delete", "nodename={node}"], node), b"")
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return said or ([f"scontrol delete ended with {done.code}"] if done.code else [])

    def release(self, address: str) -> list[str]:
        """Release a held job. Returns Slurm's objections."""
        done = self.commands.feed(["scontrol", "release", address], b"")
        return [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]

    def reconfigure(self, node_side: NodeSide) -> None:
        """Make slurmctld and the nodes read the new Gres. Raises CommandError."""
        is_old = self.release_number() < RECONFIGURE_SINCE
        self.commands(["scontrol", "reconfigure"])
        if is_old:
            node_side.restart_controller()
            with contextlib.suppress(CommandError):  # the nodes register at once; without it after up to 10 s
                self.commands(["scontrol", "reconfigure"])

    def release_number(self) -> tuple[int, int]:
        """(24, 11) of 24.11.5."""
        text = self.backend.release()
        found = re.match(r"([0-9]+)\.([0-9]+)", text)
        if found is None:
            raise CommandError(f"slurmctld's release is {text!r}", "check that slurmctld answers")
        return int(found[1]), int(found[2])
