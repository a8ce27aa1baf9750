"""`almanac waits`: reads Slurm's queue and nodes, estimates waits, and publishes the waits file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.waits.build import build_view, types_on
from advisor.waits.estimate import estimate_waits
from almanac.config import Config
from almanac.errors import ConfigError
from almanac.gpu_type_config import GpuType
from almanac.records import Duration, Request
from slurm_hooks.advice.file import SITE
from slurm_hooks.advice.folder import AdviceDir
from slurm_hooks.advice.waits_file import NAME, WaitsFile, render_waits, waits_path
from telemetry.slurm.backend import Node
from telemetry.slurm.commands import Runner
from telemetry.slurm.queue_snapshot import LiveQueue, live_queue
from telemetry.store.atomic import locked
from telemetry.store.user_files import FOLDER_MODE, explained, make_folder, put, stage, taken_back

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
        WaitsFile(now_s, types, waits, config.gpu_advice.min_gain, config.gpu_advice.max_age_s),
        running=len(view.running),
        waiting=sum(job.count for job in view.waiting),
        unreadable=queue.unreadable,
        unpredicted=sum(duration is None for duration in predicted),
    )


def publish_waits(root: Path, owner_uid: int, file: WaitsFile) -> None:
    """Replace the waits file, whole or not at all. Raises ConfigError where others can write there, StoreError.

    It has a lock of its own: `almanac publish` may take longer than waits are used.
    """
    folder = AdviceDir(root, owner_uid)
    folder.require_safe()
    with explained(root, root):
        for path in (root, folder.user):
            make_folder(path, FOLDER_MODE)
    with locked(root / ".waits.lock", "publishes waits"), explained(waits_path(root), root):
        temporary, handle = stage(root, render_waits(file))
        try:
            os.fchmod(handle, 0o444)
            with taken_back(folder.user / SITE, owner_uid) as place:
                put(temporary, NAME, place)
        finally:
            os.close(handle)
            temporary.unlink(missing_ok=True)
