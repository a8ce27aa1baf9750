"""`almanac waits`: reads Slurm's queue and nodes, estimates waits, and publishes the waits file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.waits.build import build_view, types_on
from advisor.waits.estimate import estimate_waits
from almanac.config import Config
from almanac.errors import ConfigError
from almanac.records import Duration, Request
from almanac.submit_config import SITE, GpuType
from slurm_hooks.advice.waits_file import NAME, WaitsFile, render_waits
from telemetry.slurm.backend import Node
from telemetry.slurm.commands import Runner
from telemetry.slurm.queue_snapshot import LiveQueue, live_queue
from telemetry.store.atomic import TEMPORARY, locked, make_folders, write_atomically
from telemetry.store.outgoing import FOLDER_MODE, Outgoing
from telemetry.store.user_files import explained

Durations = Callable[[Sequence[Request]], Sequence[Duration | None]]
"""Predicted run times of many submissions, as advisor.services.gpu_time.durations_of gives them."""


@dataclass(frozen=True)
class GatheredWaits:
    """running, waiting: numbers of GPU jobs. unreadable: of records left out. unpredicted: of jobs."""

    file: WaitsFile
    running: int
    waiting: int
    unreadable: int
    unpredicted: int


def read_live_queue(commands: Runner, cluster: str) -> LiveQueue:
    """The GPU jobs of a cluster now. Raises CommandError."""
    return live_queue(commands(["squeue", "-a", "--json"]), cluster)


def gather(queue: LiveQueue, nodes: Sequence[Node], durations: Durations, config: Config, now_s: int) -> GatheredWaits:
    """The waits file of a snapshot. Raises ConfigError where the nodes have no known GPU type."""
    types: tuple[GpuType, ...] = config.gpu_types or types_on(nodes)
    if not types:
        raise ConfigError(
            "no node has GPUs with a GRES type, and [[gpu_types]] is empty", "name the site's types under [[gpu_types]]"
        )
    predicted = durations([job.request for job in queue.jobs]) if queue.jobs else []
    view = build_view(nodes, queue.jobs, predicted, types, now_s)
    found = estimate_waits(view)
    waits = tuple((size, wait) for (_, size), wait in sorted(found.items()))
    return GatheredWaits(
        WaitsFile(now_s, types, waits),
        running=len(view.running),
        waiting=sum(job.count for job in view.waiting),
        unreadable=queue.unreadable,
        unpredicted=sum(duration is None for duration in predicted),
    )


def publish_waits(folder: Outgoing, file: WaitsFile) -> None:
    """Replace the waits file, whole or not at all. Raises StoreError.

    It has a lock of its own: `almanac publish` may take longer than waits are used.
    """
    path = folder.path(SITE, NAME)
    with explained(path, folder.root):
        make_folders(path.parent, FOLDER_MODE)
    with locked(folder.root / ".waits.lock", "publishes waits"), explained(path, folder.root):
        for stale in path.parent.glob(f"{TEMPORARY}*"):
            stale.unlink()
        write_atomically(path, render_waits(file))
