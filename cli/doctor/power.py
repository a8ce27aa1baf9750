"""`almanac doctor` on node power: slurm.conf, the node sets, and the file of the nodes' BMCs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.config import Config
from almanac.errors import ConfigError
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from slurm_hooks.power.settings import PowerSettings
    from telemetry.slurm.backend import Node

NAME = "power"
HOW = "see docs/power-programs.md"
PROGRAMS = ("SuspendProgram", "ResumeProgram")
OURS = ("almanac-power-off", "almanac-power-on")
_SHOWN = 5


@dataclass(frozen=True)
class Seen:
    """The input of the checks. values: settings of slurmctld. is_controller: doctor runs where slurmctld does."""

    config: Config
    values: Mapping[str, str]
    settings: PowerSettings
    nodes: Sequence[Node]
    is_controller: bool

    def sets(self) -> dict[str, tuple[str, ...]]:
        from telemetry.slurm.node_sets import members

        return {one.name: members(one, self.nodes) for one in self.config.node_sets}


def check_power(app: App) -> Iterator[Check]:
    """Yields nothing without node sets, or with power.mode = "off"."""
    if app.config.power.mode == "off" or not app.config.node_sets:
        return
    from slurm_hooks.power.settings import read_settings, values_of

    backend = app.backend
    values = values_of(backend.configuration())
    hosts = {re.split(r"[(:]", part)[0] for key, part in values.items() if key.startswith("SlurmctldHost")}
    seen = Seen(
        app.config, values, read_settings(backend), backend.nodes(), socket.gethostname().split(".")[0] in hosts
    )
    found = list(examine(seen))
    yield from found
    if not found:
        actuator = seen.settings.actuator(app.config.power.actuator)
        yield Check(NAME, "ok", f"slurm.conf and {len(app.config.node_sets)} node sets fit; actuator: {actuator}")


def examine(seen: Seen) -> Iterator[Check]:
    """Yield each fault; nothing if there is none."""
    probes: tuple[Callable[[Seen], Iterator[Check]], ...] = (_programs, _times, _exceptions, _sets, _bmc_file)
    for probe in probes:
        yield from probe(seen)


def _programs(seen: Seen) -> Iterator[Check]:
    if not seen.settings.has_programs:
        yield _fail("slurm.conf sets no SuspendProgram and ResumeProgram: Slurm cannot power nodes down or up", HOW)
        return
    for key in PROGRAMS:
        path = Path(seen.values[key].split()[0])
        if seen.is_controller and not (path.is_file() and os.access(path, os.X_OK)):
            yield _fail(f"{key}={path} is not a program on this host", f"install it, or correct {key} in slurm.conf")
    if not seen.values.get("ResumeFailProgram"):
        yield _warn(
            "slurm.conf sets no ResumeFailProgram: a node that hangs at boot stays on; waking it does not reboot it",
            f"set ResumeFailProgram={seen.values['SuspendProgram']} in slurm.conf",
        )
    try:
        seen.settings.actuator(seen.config.power.actuator)
    except ConfigError as error:
        yield _fail(str(error), error.hint)


def _times(seen: Seen) -> Iterator[Check]:
    settings, boot_s = seen.settings, seen.config.power.boot_min * 60
    if seen.settings.has_programs and not re.match(r"[0-9]", seen.values.get("SuspendTime", "")):
        yield _fail(
            f"SuspendTime={seen.values.get('SuspendTime', 'NONE')}: "
            "Slurm 22.05 and 24.11 then refuse to power nodes down",
            "set SuspendTime=31536000 in slurm.conf",
        )
    if settings.resume_timeout_s < boot_s:
        yield _fail(
            f"ResumeTimeout={settings.resume_timeout_s} is shorter than power.boot_min ({boot_s} s): "
            "Slurm marks slowly booting nodes DOWN",
            f"set ResumeTimeout={2 * boot_s} in slurm.conf",
        )
    if seen.values.get("ReturnToService", "").split()[:1] in (["0"], ["none"]):
        yield _warn(
            "ReturnToService=0: a node that comes up too late stays DOWN",
            "set ReturnToService=2 in slurm.conf, or run `scontrol update nodename=... state=resume` each time",
        )


def _exceptions(seen: Seen) -> Iterator[Check]:
    try:
        excluded = seen.settings.excluded(seen.nodes)
        is_counted = seen.settings.actuator(seen.config.power.actuator) == "count"
    except ConfigError as error:
        if seen.settings.has_programs and str(error).startswith("SuspendExc"):
            yield _fail(str(error), error.hint)
        return
    for name, members in seen.sets().items():
        if members and excluded.issuperset(members):
            yield _warn(
                f"node set {name}: SuspendExcNodes and SuspendExcParts keep all its nodes on",
                "remove its nodes from them in slurm.conf, or remove the node set",
            )
    if is_counted and "KeepPowerSaveSettings" not in seen.values.get("ReconfigFlags", ""):
        yield _warn(
            "ReconfigFlags lacks KeepPowerSaveSettings: each `scontrol reconfigure` can power nodes down until the "
            "next run",
            "set ReconfigFlags=KeepPowerSaveSettings in slurm.conf",
        )


def _sets(seen: Seen) -> Iterator[Check]:
    from telemetry.slurm.hostlist import expand

    known = {node.name for node in seen.nodes}
    owners: dict[str, list[str]] = {}
    for node_set in seen.config.node_sets:
        members = seen.sets()[node_set.name]
        for node in members:
            owners.setdefault(node, []).append(node_set.name)
        for key in ("nodes", "exclude"):
            try:
                strangers = sorted(set(expand(getattr(node_set, key))) - known)
            except ValueError as error:
                yield _fail(f"node set {node_set.name}: {key}: {error}", "write a hostlist such as gpu[001-064]")
                continue
            if strangers:
                yield _warn(
                    f"node set {node_set.name}: Slurm does not know {_some(strangers)}",
                    f"correct {key} in [[node_sets]]",
                )
        if not members:
            yield _fail(f"node set {node_set.name} has no nodes", "correct its nodes, feature, or partition")
        elif node_set.warm_minimum >= len(members):
            yield _warn(
                f"node set {node_set.name}: warm_minimum {node_set.warm_minimum} keeps all {len(members)} nodes on",
                "lower warm_minimum, or remove the node set",
            )
    if shared := {node: names for node, names in owners.items() if len(names) > 1}:
        node = min(shared)
        yield _fail(
            f"{len(shared)} nodes are in more than one node set, such as {node} in {' and '.join(shared[node])}",
            "put each node in one set",
        )


def _bmc_file(seen: Seen) -> Iterator[Check]:
    """Yields nothing unless the controller runs almanac's own programs and the caller is root or SlurmUser."""
    named = {Path(seen.values.get(key, "").split(" ")[0]).name for key in PROGRAMS}
    slurm_user = re.fullmatch(r"[^(]+\(([0-9]+)\)", seen.values.get("SlurmUser", ""))
    if not seen.is_controller or not named & set(OURS) or slurm_user is None:
        return
    from slurm_hooks.power.bmc_file import open_bmc_file, read_bmc_file

    path, owner = Path(seen.config.power.bmc_file), int(slurm_user[1])
    if os.geteuid() not in (0, owner):
        return
    try:
        with os.fdopen(open_bmc_file(path, owner, os.O_RDONLY)) as opened:
            file = read_bmc_file(path, opened.fileno())
    except ConfigError as error:
        yield _fail(str(error), error.hint)
        return
    wanted = {node for members in seen.sets().values() for node in members}
    if missing := sorted(wanted - set(file.by_node)):
        yield _fail(f"{path} has no BMC for {_some(missing)}", "add a [[bmc]] table for them")
    needed_s = file.soft_s + file.timeout_s
    if seen.settings.suspend_timeout_s < needed_s:
        yield _warn(
            f"SuspendTimeout={seen.settings.suspend_timeout_s} is shorter than soft_s + timeout_s of {path} "
            f"({needed_s:g} s): Slurm could wake a node that is still shutting down",
            f"set SuspendTimeout={needed_s:.0f} in slurm.conf, or lower soft_s",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fail(said: str, todo: str) -> Check:
    return Check(NAME, "fail", said, todo)


def _warn(said: str, todo: str) -> Check:
    return Check(NAME, "warn", said, todo)
