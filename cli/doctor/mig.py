"""`almanac doctor` on MIG layouts: the include file, the commands that reach the nodes, rights, and failed changes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.errors import AlmanacError
from almanac.plain_file import read_plain
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from slurm_hooks.mig.folder import MigFolder
    from slurm_hooks.mig.node_side import NodeSide
    from slurm_hooks.mig.settings import MigSettings
    from slurm_hooks.mig.slurm_side import SlurmSide

NAME = "MIG layouts"
_SHOWN = 5


@dataclass(frozen=True)
class Seen:
    """The input of the checks. slurm_conf: path of slurm.conf as slurmctld has it."""

    settings: MigSettings
    slurm: SlurmSide
    node_side: NodeSide
    folder: MigFolder
    cluster: str
    slurm_conf: str


def check_mig(app: App) -> Iterator[Check]:
    """Yields nothing without mig.nodes, or with mig.mode = "off"."""
    if app.config.mig.mode == "off" or not app.config.mig.nodes:
        return
    from slurm_hooks.mig.folder import MigFolder
    from slurm_hooks.mig.node_side import NodeSide, run_bounded
    from slurm_hooks.mig.settings import mig_settings
    from slurm_hooks.mig.slurm_side import SlurmSide

    settings, backend = mig_settings(app.config.mig), app.backend
    conf = re.search(r"(?m)^SLURM_CONF\s*=\s*(\S+)", backend.configuration())
    seen = Seen(
        settings=settings,
        slurm=SlurmSide(backend, app.commands, 0),
        node_side=NodeSide(settings.config, run_bounded),
        folder=MigFolder(app.store_root / "mig"),
        cluster=app.cluster_store().cluster,
        slurm_conf=conf[1] if conf else "",
    )
    found = list(examine(seen))
    yield from found
    if not found:
        yield Check(NAME, "ok", f"{len(settings.names)} nodes can be changed; mig.mode is {settings.config.mode}")


def examine(seen: Seen) -> Iterator[Check]:
    """Yield each fault; nothing if there is none."""
    dynamic = dynamic_nodes(seen)
    if set(seen.settings.names) - dynamic:
        yield from _include(seen)
        yield from _lines(seen, dynamic)
        yield from _restart(seen)
    for probe in (_register, _nodes, _failed):
        yield from probe(seen)


def dynamic_nodes(seen: Seen) -> set[str]:
    """Managed nodes that registered by `slurmd -Z`: they have no line in a file."""
    from slurm_hooks.mig.slurm_side import DYNAMIC

    nodes = seen.slurm.backend.nodes()
    return {node.name for node in nodes if DYNAMIC in node.states and node.name in seen.settings.names}


def _register(seen: Seen) -> Iterator[Check]:
    found = sorted(dynamic_nodes(seen))
    if found and not seen.settings.config.register_command:
        yield _fail(
            f"{_some(found)}: dynamic, and mig.register_command is empty, so they are never changed",
            "name a command that restarts slurmd with a new Gres (docs/mig-layouts.md), or take them out of mig.nodes",
        )


def _include(seen: Seen) -> Iterator[Check]:
    path = Path(seen.settings.config.include_file)
    try:
        text = read_plain(seen.slurm_conf).decode("utf-8", "replace")
    except OSError:
        yield _warn(f"{seen.slurm_conf or 'slurm.conf'} cannot be read here", "run doctor on the controller")
        return
    included = re.findall(r"(?im)^\s*Include\s+(\S+)", text)
    if not {str(path), path.name} & {*included}:
        yield _fail(f"{seen.slurm_conf} does not include {path}", f"add a line `Include {path}` before the partitions")
    if path.exists() and not os.access(path.parent, os.W_OK):
        yield _warn(f"{path.parent} cannot be written by {os.geteuid()}", "run `almanac mig apply` as root")


def _lines(seen: Seen, dynamic: set[str]) -> Iterator[Check]:
    from slurm_hooks.mig.include import HOW, IncludeFile, gres_of_nodes
    from slurm_hooks.mig.layouts import gpu_types

    written = gres_of_nodes(IncludeFile(Path(seen.settings.config.include_file)).read())
    if without := [name for name in seen.settings.names if name not in written and name not in dynamic]:
        yield _fail(f"{_some(without)}: no NodeName line of their own in the include file", HOW)
    nodes = {node.name: node for node in seen.slurm.backend.nodes()}
    if strangers := [name for name in seen.settings.names if name not in nodes]:
        yield _fail(f"mig.nodes: Slurm does not list {_some(strangers)}", "correct mig.nodes")
    other = [name for name, gres in written.items() if name in nodes and gpu_types(gres) != gpu_types(nodes[name].gres)]
    if other:
        todo = "make them alike: `scontrol reconfigure` would change those nodes, and end their jobs"
        yield _fail(f"{_some(other)}: Gres in the include file and in Slurm differ", todo)


def _restart(seen: Seen) -> Iterator[Check]:
    from slurm_hooks.mig.slurm_side import RECONFIGURE_SINCE

    command = seen.settings.config.restart_command
    if seen.slurm.release_number() < RECONFIGURE_SINCE and (not command or shutil.which(command[0]) is None):
        yield _fail(
            f"mig.restart_command is {' '.join(command) or 'empty'}: this release of Slurm takes a new Gres only when "
            "slurmctld restarts",
            "name a command that restarts slurmctld",
        )


def _nodes(seen: Seen) -> Iterator[Check]:
    from slurm_hooks.mig.gate import is_in_service

    serving = {node.name: node.gres for node in seen.slurm.backend.nodes() if is_in_service(node)}
    up = [name for name in seen.settings.names if name in serving]
    for name in up[:_SHOWN]:
        try:
            seen.node_side.export(name, seen.settings.names[name].model, serving[name])
        except AlmanacError as error:
            yield _fail(f"{name}: {error}", error.hint)


def _failed(seen: Seen) -> Iterator[Check]:
    for name, change in seen.folder.load(seen.cluster).changes.items():
        if change.fault:
            yield _fail(
                f"the change of {name} failed, and it stays drained: {change.fault}", "see `almanac mig status`"
            )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fail(said: str, todo: str) -> Check:
    return Check(NAME, "fail", said, todo)


def _warn(said: str, todo: str) -> Check:
    return Check(NAME, "warn", said, todo)
