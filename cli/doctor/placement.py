"""`almanac doctor` on jobs that accept any GPU type: partitions, types, nodes, and what a requeue needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from almanac.errors import AlmanacError
from almanac.units import listed
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from almanac.actions_config import Placement
    from telemetry.slurm.placement_queue import QueueNode

NAME = "placement"


def check_placement(app: App) -> Iterator[Check]:
    """Yields nothing without placement.partitions and placement.types, and where Slurm does not answer."""
    settings = app.config.placement
    if not settings.partitions and not settings.types:
        return
    from slurm_hooks.placement.run import require_placement
    from telemetry.slurm.command_backend import CommandBackend
    from telemetry.slurm.placement_queue import queue_nodes

    backend = CommandBackend(app.commands)
    try:
        release, nodes, configuration = backend.release(), queue_nodes(backend.nodes()), backend.configuration()
    except AlmanacError:
        return  # the check of Slurm reports it
    try:
        require_placement(settings, release)
    except AlmanacError as error:
        yield Check(NAME, "fail", str(error), error.hint)
        return
    faults = [*_partitions(settings, nodes), *_names(app, nodes), *_types(settings, nodes)]
    faults += _requeue(settings, configuration)
    yield from faults
    if not faults:
        yield Check(NAME, "ok", f"{listed(settings.types, 'type')}, by {settings.select_by}; mode {settings.mode}")


def _partitions(settings: Placement, nodes: Sequence[QueueNode]) -> Iterator[Check]:
    known = {name for each in nodes for name in each.node.partitions}
    unknown = [name for name in settings.partitions if name not in known]
    if unknown:
        yield Check(NAME, "fail", f"no node is in {listed(unknown, 'partition')}", "correct placement.partitions")


def _types(settings: Placement, nodes: Sequence[QueueNode]) -> Iterator[Check]:
    """Nodes that have none of the types, or several: at least one type must be right."""
    from slurm_hooks.placement.state import node_type
    from slurm_hooks.placement.type_names import names_of, nodes_of

    own = nodes_of(settings, nodes)
    if settings.select_by == "constraint":
        unclear = [each.node.name for each in own if not node_type(each, settings)]
    else:
        unclear = [each.node.name for each in own if not set(each.total) & set(settings.types)]
    if unclear and any(set(names_of(each, settings)) & set(settings.types) for each in own):
        what = "feature" if settings.select_by == "constraint" else "GRES type"
        said = f"{listed(unclear, 'node')} without exactly one of placement.types: almanac does not use their GPUs"
        yield Check(
            NAME, "warn", said, f"give each node one of the types as its {what}, or name its type", {"nodes": unclear}
        )


def _names(app: App, nodes: Sequence[QueueNode]) -> Iterator[Check]:
    """Slurm, [[gpu_types]], and the trained speeds must call the types by the same names."""
    from advisor.artefacts import load_speeds
    from slurm_hooks.placement.type_names import type_faults

    learned: Collection[str] | None = app.config.placement.types
    try:
        models_dir = app.cluster_store().models_dir
    except AlmanacError:
        models_dir = None  # the check of the store reports it
    try:
        if models_dir is not None:
            learned = None if (table := load_speeds(models_dir)) is None else table.names
    except AlmanacError as error:
        yield Check(NAME, "warn", f"the speeds of the GPU types cannot be read: {error}", error.hint)
    for fault in type_faults(app.config.placement, nodes, app.config.gpu_types, learned):
        yield Check(NAME, "fail" if fault.is_fatal else "warn", fault.said, fault.todo)


def _requeue(settings: Placement, configuration: str) -> Iterator[Check]:
    """A requeue needs the submit line, which only accounting has."""
    stored = re.search(r"(?m)^AccountingStorageType\s*=\s*(\S+)", configuration)
    if settings.requeue and stored and not stored[1].endswith("slurmdbd"):
        said = f"placement.requeue is on, and AccountingStorageType is {stored[1]}: no job will be requeued"
        yield Check(NAME, "warn", said, "use accounting_storage/slurmdbd, or set placement.requeue = false")
