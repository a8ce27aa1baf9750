"""`almanac doctor` on nodes that almanac changes: their power (slurm.conf, node sets, BMCs) and their MIG layouts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.health.record import drain_command, site_health
from almanac.config import Config
from almanac.errors import AlmanacError, ConfigError
from almanac.files import read_plain
from almanac.tres import gpu_types
from almanac.units import counted
from cli.app import App
from cli.doctor import Check, first_few, found_or_ok
from slurm.commands import Settings
from slurm.hostlist import expand
from slurm.node_sets import members
from slurm.nodes import node_hosts
from slurm_hooks.mig.layouts import MigSettings, mig_settings
from slurm_hooks.mig.planning import is_in_service
from slurm_hooks.mig.sides import DYNAMIC, HOW, IncludeFile, NodeSide, SlurmSide, gres_of_nodes, run_bounded
from slurm_hooks.mig.steps import MigState
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.power.bmc_file import open_bmc_file, read_bmc_file
from slurm_hooks.power.settings import PowerSettings, read_settings

if TYPE_CHECKING:
    from slurm.nodes import SlurmNode

POWER, MIG, FAILING = "power", "MIG layouts", "failing nodes"
_fail_power, _warn_power = partial(Check, POWER, "fail"), partial(Check, POWER, "warn")
_fail_mig, _warn_mig = partial(Check, MIG, "fail"), partial(Check, MIG, "warn")
PROGRAMS = ("SuspendProgram", "ResumeProgram")
OURS = ("almanac-power-off", "almanac-power-on")


@dataclass(frozen=True)
class PowerCheckInput:
    """The input of the checks. values: settings of slurmctld. is_controller: doctor runs where slurmctld does."""

    config: Config
    values: Settings
    settings: PowerSettings
    nodes: Sequence[SlurmNode]
    is_controller: bool

    def sets(self) -> dict[str, tuple[str, ...]]:
        return {one.name: members(one, self.nodes) for one in self.config.node_sets}


def check_failing(app: App) -> Iterator[Check]:
    """Name each node that fails far more jobs than others and still takes jobs. Yields nothing without jobs."""
    found = site_health(app.store, app.now_s())
    out = set[str]()
    if found.lemons:
        with contextlib.suppress(AlmanacError):  # the check of Slurm reports it
            out = {node.name for node in node_hosts(app.commands) if not node.is_up}
    bad = [node for node in found.lemons if node.node not in out]
    for node in bad:
        yield Check(FAILING, "warn", f"{node.node}: {found.evidence(node)}", drain_command(node), vars(node))
    if found.nodes and not bad:
        said = f"of {counted(len(found.nodes), 'node')}, none in service fails over 5 times as many jobs as the others"
        yield Check(FAILING, "ok", said)


def check_power(app: App) -> Iterator[Check]:
    """Yields nothing without node sets, or with power.mode = "off"."""
    if app.config.power.mode == "off" or not app.config.node_sets:
        return
    backend = app.backend
    values = backend.settings()
    hosts = {re.split(r"[(:]", host)[0] for host in values.numbered("SlurmctldHost")}
    seen = PowerCheckInput(
        app.config, values, read_settings(backend), backend.nodes(), socket.gethostname().split(".")[0] in hosts
    )
    found = list(_power_faults(seen))
    yield from found
    if not found:
        actuator = seen.settings.actuator(app.config.power.actuator)
        yield Check(POWER, "ok", f"slurm.conf and {len(app.config.node_sets)} node sets fit; actuator: {actuator}")


def _power_faults(seen: PowerCheckInput) -> Iterator[Check]:
    """Yield each fault; nothing if there is none."""
    for probe in (_programs, _power_times, _exceptions, _node_sets, _bmc_file):
        yield from probe(seen)


def _programs(seen: PowerCheckInput) -> Iterator[Check]:
    if not seen.settings.has_programs:
        said = "slurm.conf sets no SuspendProgram and ResumeProgram: Slurm cannot power nodes down or up"
        yield _fail_power(said, "see docs/power-programs.md")
        return
    for key in PROGRAMS:
        path = Path(seen.values[key].split()[0])
        if seen.is_controller and not (path.is_file() and os.access(path, os.X_OK)):
            said = f"{key}={path} is not a program on this host"
            yield _fail_power(said, f"install it, or correct {key} in slurm.conf")
    if not seen.values.get("ResumeFailProgram"):
        said = "slurm.conf sets no ResumeFailProgram: a node that hangs at boot stays on; waking it does not reboot it"
        yield _warn_power(said, f"set ResumeFailProgram={seen.values['SuspendProgram']} in slurm.conf")
    try:
        seen.settings.actuator(seen.config.power.actuator)
    except ConfigError as error:
        yield _fail_power(str(error), error.hint)


def _power_times(seen: PowerCheckInput) -> Iterator[Check]:
    settings, boot_s = seen.settings, seen.config.power.boot_min * 60
    if seen.settings.has_programs and not re.match(r"[0-9]", seen.values.get("SuspendTime", "")):
        yield _fail_power(
            f"SuspendTime={seen.values.get('SuspendTime', 'NONE')}: "
            "Slurm 22.05 and 24.11 then refuse to power nodes down",
            "set SuspendTime=31536000 in slurm.conf",
        )
    if settings.resume_timeout_s < boot_s:
        yield _fail_power(
            f"ResumeTimeout={settings.resume_timeout_s} is shorter than power.boot_min ({boot_s} s): "
            "Slurm marks slowly booting nodes DOWN",
            f"set ResumeTimeout={2 * boot_s} in slurm.conf",
        )
    if seen.values.get("ReturnToService", "").split()[:1] in (["0"], ["none"]):
        todo = "set ReturnToService=2 in slurm.conf, or run `scontrol update nodename=... state=resume` each time"
        yield _warn_power("ReturnToService=0: a node that comes up too late stays DOWN", todo)


def _exceptions(seen: PowerCheckInput) -> Iterator[Check]:
    try:
        excluded = seen.settings.excluded(seen.nodes)
        is_counted = seen.settings.actuator(seen.config.power.actuator) == "count"
    except ConfigError as error:
        if seen.settings.has_programs and str(error).startswith("SuspendExc"):
            yield _fail_power(str(error), error.hint)
        return
    for name, nodes in seen.sets().items():
        if nodes and excluded.issuperset(nodes):
            said = f"node set {name}: SuspendExcNodes and SuspendExcParts keep all its nodes on"
            yield _warn_power(said, "remove its nodes from them in slurm.conf, or remove the node set")
    if is_counted and "KeepPowerSaveSettings" not in seen.values.get("ReconfigFlags", ""):
        yield _warn_power(
            "ReconfigFlags lacks KeepPowerSaveSettings: each `scontrol reconfigure` can power nodes down until the "
            "next run",
            "set ReconfigFlags=KeepPowerSaveSettings in slurm.conf",
        )


def _node_sets(seen: PowerCheckInput) -> Iterator[Check]:
    known = {node.name for node in seen.nodes}
    owners: dict[str, list[str]] = {}
    for node_set in seen.config.node_sets:
        own = seen.sets()[node_set.name]
        for node in own:
            owners.setdefault(node, []).append(node_set.name)
        for key in ("nodes", "exclude"):
            try:
                strangers = sorted(set(expand(getattr(node_set, key))) - known)
            except ValueError as error:
                yield _fail_power(f"node set {node_set.name}: {key}: {error}", "write a hostlist such as gpu[001-064]")
                continue
            if strangers:
                said = f"node set {node_set.name}: Slurm does not know {first_few(strangers)}"
                yield _warn_power(said, f"correct {key} in [[node_sets]]")
        if not own:
            yield _fail_power(f"node set {node_set.name} has no nodes", "correct its nodes, feature, or partition")
        elif node_set.warm_minimum >= len(own):
            said = f"node set {node_set.name}: warm_minimum {node_set.warm_minimum} keeps all {len(own)} nodes on"
            yield _warn_power(said, "lower warm_minimum, or remove the node set")
    if shared := {node: names for node, names in owners.items() if len(names) > 1}:
        node = min(shared)
        said = f"{len(shared)} nodes are in more than one node set, such as {node} in {' and '.join(shared[node])}"
        yield _fail_power(said, "put each node in one set")


def _bmc_file(seen: PowerCheckInput) -> Iterator[Check]:
    """Yields nothing unless the controller runs almanac's own programs and the caller is root or SlurmUser."""
    named = {Path(seen.values.get(key, "").split(" ")[0]).name for key in PROGRAMS}
    _, owner = seen.values.user
    if not seen.is_controller or not named & set(OURS) or owner is None:
        return
    path = Path(seen.config.power.bmc_file)
    if os.geteuid() not in (0, owner):
        return
    try:
        with os.fdopen(open_bmc_file(path, owner, os.O_RDONLY)) as opened:
            file = read_bmc_file(path, opened.fileno())
    except ConfigError as error:
        yield _fail_power(str(error), error.hint)
        return
    wanted = {node for own in seen.sets().values() for node in own}
    if missing := sorted(wanted - set(file.by_node)):
        yield _fail_power(f"{path} has no BMC for {first_few(missing)}", "add a [[bmc]] table for them")
    needed_s = file.soft_s + file.timeout_s
    if seen.settings.suspend_timeout_s < needed_s:
        yield _warn_power(
            f"SuspendTimeout={seen.settings.suspend_timeout_s} is shorter than soft_s + timeout_s of {path} "
            f"({needed_s:g} s): Slurm could wake a node that is still shutting down",
            f"set SuspendTimeout={needed_s:.0f} in slurm.conf, or lower soft_s",
        )


@dataclass(frozen=True)
class MigCheckInput:
    """The input of the checks. slurm_conf: path of slurm.conf as slurmctld has it."""

    settings: MigSettings
    slurm: SlurmSide
    node_side: NodeSide
    folder: NodeFolder[MigState]
    cluster: str
    slurm_conf: str


def check_mig(app: App) -> Iterator[Check]:
    """Yields nothing without mig.nodes, or with mig.mode = "off"."""
    if app.config.mig.mode == "off" or not app.config.mig.nodes:
        return
    settings, backend, cluster = mig_settings(app.config.mig), app.backend, app.cluster
    seen = MigCheckInput(
        settings=settings,
        slurm=SlurmSide(backend, app.commands, 0, cluster),
        node_side=NodeSide(settings.config, run_bounded),
        folder=NodeFolder(app.store_root / "mig", MigState),
        cluster=cluster,
        slurm_conf=backend.settings().get("SLURM_CONF", ""),
    )
    said = f"{len(settings.names)} nodes can be changed; mig.mode is {settings.config.mode}"
    yield from found_or_ok(_mig_faults(seen), MIG, said)


def _mig_faults(seen: MigCheckInput) -> Iterator[Check]:
    """Yield each fault; nothing if there is none."""
    dynamic = dynamic_nodes(seen)
    if set(seen.settings.names) - dynamic:
        yield from _include(seen)
        yield from _lines(seen, dynamic)
        yield from _restart(seen)
    for probe in (_register, _exports, _failed):
        yield from probe(seen)


def dynamic_nodes(seen: MigCheckInput) -> set[str]:
    """Managed nodes that registered by `slurmd -Z`: they have no line in a file."""
    nodes = seen.slurm.backend.nodes()
    return {node.name for node in nodes if DYNAMIC in node.states and node.name in seen.settings.names}


def _register(seen: MigCheckInput) -> Iterator[Check]:
    found = sorted(dynamic_nodes(seen))
    if found and not seen.settings.config.register_command:
        yield _fail_mig(
            f"{first_few(found)}: dynamic, and mig.register_command is empty, so they are never changed",
            "name a command that restarts slurmd with a new Gres (docs/mig-layouts.md), or take them out of mig.nodes",
        )


def _include(seen: MigCheckInput) -> Iterator[Check]:
    path = Path(seen.settings.config.include_file)
    try:
        text = read_plain(seen.slurm_conf).decode("utf-8", "replace")
    except OSError:
        yield _warn_mig(f"{seen.slurm_conf or 'slurm.conf'} cannot be read here", "run doctor on the controller")
        return
    included = re.findall(r"(?im)^\s*Include\s+(\S+)", text)
    if not {str(path), path.name} & {*included}:
        said = f"{seen.slurm_conf} does not include {path}"
        yield _fail_mig(said, f"add a line `Include {path}` before the partitions")
    if path.exists() and not os.access(path.parent, os.W_OK):
        yield _warn_mig(f"{path.parent} cannot be written by {os.geteuid()}", "run `almanac mig plan --apply` as root")


def _lines(seen: MigCheckInput, dynamic: set[str]) -> Iterator[Check]:
    written = gres_of_nodes(IncludeFile(Path(seen.settings.config.include_file)).read())
    if without := [name for name in seen.settings.names if name not in written and name not in dynamic]:
        yield _fail_mig(f"{first_few(without)}: no NodeName line of their own in the include file", HOW)
    nodes = {node.name: node for node in seen.slurm.backend.nodes()}
    if strangers := [name for name in seen.settings.names if name not in nodes]:
        yield _fail_mig(f"mig.nodes: Slurm does not list {first_few(strangers)}", "correct mig.nodes")
    other = [name for name, gres in written.items() if name in nodes and gpu_types(gres) != gpu_types(nodes[name].gres)]
    if other:
        todo = "make them alike: `scontrol reconfigure` would change those nodes, and end their jobs"
        yield _fail_mig(f"{first_few(other)}: Gres in the include file and in Slurm differ", todo)


def _restart(seen: MigCheckInput) -> Iterator[Check]:
    command = seen.settings.config.restart_command
    if not seen.slurm.release_now().reconfigures_gres and (not command or shutil.which(command[0]) is None):
        yield _fail_mig(
            f"mig.restart_command is {' '.join(command) or 'empty'}: this release of Slurm takes a new Gres only when "
            "slurmctld restarts",
            "name a command that restarts slurmctld",
        )


def _exports(seen: MigCheckInput) -> Iterator[Check]:
    serving = {node.name: node.gres for node in seen.slurm.backend.nodes() if is_in_service(node)}
    up = [name for name in seen.settings.names if name in serving]
    for name in up[:5]:
        try:
            seen.node_side.export(name, seen.settings.names[name].model, serving[name])
        except AlmanacError as error:
            yield _fail_mig(f"{name}: {error}", error.hint)


def _failed(seen: MigCheckInput) -> Iterator[Check]:
    for name, change in seen.folder.load(seen.cluster).changes.items():
        if change.fault:
            said = f"the change of {name} failed, and it stays drained: {change.fault}"
            yield _fail_mig(said, "see `almanac mig status`")
