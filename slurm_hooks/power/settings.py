"""The settings of power saving in slurm.conf, the actuator that fits them, and SuspendExcNodes.

There are two ways to power nodes down: by name, and by the count of nodes that Slurm's own power saving leaves on.
Waking is by name in both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from almanac.actions_config import ActuatorChoice, ActuatorName
from almanac.errors import CommandError, ConfigError
from slurm.backend import SlurmBackend
from slurm.hostlist import expand, fold
from slurm.nodes import SlurmNode
from slurm.releases import Release, release_of
from slurm_hooks.orders import must_still_hold
from slurm_hooks.power.nodes import Kept

NEVER_S = 30 * 86_400
"""A longer SuspendTime stands for never: INFINITE would switch power saving off as a whole (22.05 to 26.05)."""
_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_COUNTED = re.compile(r"(.*):([0-9]+)")


@dataclass(frozen=True)
class KeptOn:
    """One entry of SuspendExcNodes: nodes that stay on, or, with a count, how many of them."""

    hosts: str
    count: int | None = None

    def __str__(self) -> str:
        return self.hosts if self.count is None else f"{self.hosts}:{self.count}"

    def nodes(self) -> frozenset[str]:
        """Return the names of the host list. Raises ConfigError if it is not one."""
        try:
            return frozenset(expand(self.hosts))
        except ValueError as error:
            raise ConfigError(f"SuspendExcNodes of slurm.conf: {error}", "name nodes there") from error


@dataclass(frozen=True)
class PowerSettings:
    """Power settings of slurmctld.

    suspend_time_s: idle seconds after which Slurm itself powers a node down; None: never. exceptions: SuspendExcNodes
    as slurmctld has it now. excluded_partitions: SuspendExcParts.
    """

    release: Release
    suspend_time_s: int | None
    suspend_timeout_s: int
    resume_timeout_s: int
    has_programs: bool
    exceptions: tuple[KeptOn, ...]
    excluded_partitions: frozenset[str]

    def excluded(self, nodes: Sequence[SlurmNode]) -> frozenset[str]:
        """Nodes that slurm.conf keeps on. Raises ConfigError where SuspendExcNodes names what is no node."""
        return plainly_excluded(self.exceptions, nodes) | {
            node.name for node in nodes if self.excluded_partitions.intersection(node.partitions)
        }

    def actuator(self, wanted: ActuatorChoice) -> ActuatorName:
        """ "names" or "count" for power.actuator. Raises ConfigError where Slurm is not set up for it."""
        if not self.has_programs:
            raise ConfigError(
                "slurm.conf sets no SuspendProgram and ResumeProgram: Slurm cannot power nodes down or up",
                "see docs/power-programs.md",
            )
        is_own = self.suspend_time_s is not None
        if wanted == "auto":
            wanted = "count" if is_own else "names"
        if wanted == "names" and is_own:
            raise ConfigError(
                f"SuspendTime={self.suspend_time_s}: Slurm powers idle nodes down itself; almanac cannot keep any on",
                'set SuspendTime=31536000 in slurm.conf, or power.actuator = "count" (Slurm 24.11 and later)',
            )
        if wanted == "count" and not self.release.has_suspend_counts:
            raise ConfigError(
                f"Slurm {self.release} has no count of powered nodes in SuspendExcNodes",
                'set SuspendTime=31536000 in slurm.conf and power.actuator = "names"',
            )
        if wanted == "count" and not is_own:
            raise ConfigError(
                "SuspendTime is longer than 30 days: Slurm would never power a node down by count",
                'set power.actuator = "names", or a shorter SuspendTime in slurm.conf',
            )
        return wanted


def plainly_excluded(exceptions: Iterable[KeptOn], nodes: Sequence[SlurmNode]) -> frozenset[str]:
    """Nodes that entries without a count keep on. Raises ConfigError where one is of no known node."""
    known = {node.name for node in nodes}
    found: set[str] = set()
    for entry in exceptions:
        if entry.count is None:
            if strangers := entry.nodes() - known:
                raise ConfigError(
                    f"SuspendExcNodes of slurm.conf names {min(strangers)}, which is not a node",
                    "name nodes there, not NodeSets",
                )
            found |= entry.nodes()
    return frozenset(found)


def parse_exceptions(text: str) -> tuple[KeptOn, ...]:
    """The entries of "n1,n[2-4]:2"."""
    found = []
    for part in _ENTRY.findall(text):
        counted = _COUNTED.fullmatch(part.strip())
        if part.strip():
            found.append(KeptOn(counted[1], int(counted[2])) if counted else KeptOn(part.strip()))
    return tuple(found)


def others(exceptions: Iterable[KeptOn], names: Collection[str]) -> tuple[KeptOn, ...]:
    """The entries that are not almanac's to replace: without a count, or of none of these nodes."""
    own = frozenset(names)
    return tuple(entry for entry in exceptions if entry.count is None or not own & _hosts_or_none(entry))


def _hosts_or_none(entry: KeptOn) -> frozenset[str]:
    try:
        return entry.nodes()
    except ConfigError:
        return frozenset()


def joined(exceptions: Iterable[KeptOn]) -> str:
    return ",".join(dict.fromkeys(map(str, exceptions)))


def counted(names: Collection[str], count: int) -> KeptOn:
    """Slurm's documentation wants a count above 0."""
    return KeptOn(fold(sorted(names)), max(1, count))


def read_settings(backend: SlurmBackend) -> PowerSettings:
    """Read Slurm's settings for node power. Raises CommandError if slurmctld does not answer or lacks a setting."""
    values = backend.settings()
    if (release := release_of(values.get("SLURM_VERSION", ""))) is None:
        raise CommandError("`scontrol show config` shows no SLURM_VERSION", "check that slurmctld answers")
    time_s = _seconds(values, "SuspendTime")
    return PowerSettings(
        release=release,
        suspend_time_s=None if time_s is None or time_s >= NEVER_S else time_s,
        suspend_timeout_s=_seconds(values, "SuspendTimeout") or 0,
        resume_timeout_s=_seconds(values, "ResumeTimeout") or 0,
        has_programs=all(values.get(name) for name in ("SuspendProgram", "ResumeProgram")),
        exceptions=parse_exceptions(values.get("SuspendExcNodes", "")),
        excluded_partitions=frozenset(filter(None, values.get("SuspendExcParts", "").split(","))),
    )


def _seconds(values: dict[str, str], name: str) -> int | None:
    """ "30 sec" as 30; NONE, INFINITE and nothing as None."""
    found = re.match(r"[0-9]+", values.get(name, ""))
    return int(found[0]) if found else None


def exceptions_by_count(others: Sequence[KeptOn], kept: Iterable[Kept]) -> str:
    """SuspendExcNodes=<nodes>:N on Slurm 24.11 and later: Slurm powers idle nodes down by SuspendTime, but for N.

    N counts busy nodes. slurmctld forgets it when it reads slurm.conf again, so that each run tells it again. others:
    the site's own entries, which stay.
    """
    own = []
    for each in kept:
        if each.always:
            own.append(KeptOn(fold(sorted(each.always))))
        if each.counted:
            own.append(counted(each.counted, each.count))
    return joined((*others, *own))


def set_exceptions(backend: SlurmBackend, before: str, wanted: str) -> list[str]:
    """Replace SuspendExcNodes, unless somebody else did; what Slurm said against it."""
    key = "SuspendExcNodes"
    changed = must_still_hold({key: {key: before}}, lambda _: {key: {key: stands_now(backend)}})
    if changed:
        return [f"{key} {changed[key]}; the next run decides again"]
    said, stands = backend.set_suspend_exceptions(wanted), stands_now(backend)
    return said or ([] if stands == wanted else [f"{key} is {stands!r} after it was set to {wanted!r}"])


def stands_now(backend: SlurmBackend) -> str:
    return joined(parse_exceptions(backend.suspend_exceptions()))
