"""What slurm.conf says of power saving, and which actuator fits it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from almanac.actions_config import ActuatorChoice, ActuatorName
from almanac.errors import CommandError, ConfigError
from telemetry.slurm.backend import Node, SlurmBackend
from telemetry.slurm.hostlist import expand, fold

NEVER_S = 30 * 86_400
"""A longer SuspendTime stands for never: INFINITE would switch power saving off as a whole (22.05 to 26.05)."""
COUNT_SINCE = (24, 5)
"""From here on the count of SuspendExcNodes is of powered nodes, busy ones included, and can be changed at run time."""
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
        """Raises ConfigError where it is no host list."""
        try:
            return frozenset(expand(self.hosts))
        except ValueError as error:
            raise ConfigError(f"SuspendExcNodes of slurm.conf: {error}", "name nodes there") from error


@dataclass(frozen=True)
class PowerSettings:
    """suspend_time_s: idle seconds after which Slurm itself powers a node down; None: never.

    exceptions: SuspendExcNodes as slurmctld has it now. excluded_partitions: SuspendExcParts.
    """

    release: tuple[int, int]
    suspend_time_s: int | None
    suspend_timeout_s: int
    resume_timeout_s: int
    has_programs: bool
    exceptions: tuple[KeptOn, ...]
    excluded_partitions: frozenset[str]

    def excluded(self, nodes: Sequence[Node]) -> frozenset[str]:
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
        if wanted == "count" and self.release < COUNT_SINCE:
            raise ConfigError(
                f"Slurm {self.release[0]}.{self.release[1]:02d} has no count of powered nodes in SuspendExcNodes",
                'set SuspendTime=31536000 in slurm.conf and power.actuator = "names"',
            )
        if wanted == "count" and not is_own:
            raise ConfigError(
                "SuspendTime is longer than 30 days: Slurm would never power a node down by count",
                'set power.actuator = "names", or a shorter SuspendTime in slurm.conf',
            )
        return wanted


def plainly_excluded(exceptions: Iterable[KeptOn], nodes: Sequence[Node]) -> frozenset[str]:
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
    """Raises CommandError where slurmctld does not answer, or lacks a setting."""
    values = values_of(backend.configuration())
    version = re.match(r"([0-9]+)\.([0-9]+)", values.get("SLURM_VERSION", ""))
    if version is None:
        raise CommandError("`scontrol show config` shows no SLURM_VERSION", "check that slurmctld answers")
    time_s = _seconds(values, "SuspendTime")
    return PowerSettings(
        release=(int(version[1]), int(version[2])),
        suspend_time_s=None if time_s is None or time_s >= NEVER_S else time_s,
        suspend_timeout_s=_seconds(values, "SuspendTimeout") or 0,
        resume_timeout_s=_seconds(values, "ResumeTimeout") or 0,
        has_programs=all(values.get(name) for name in ("SuspendProgram", "ResumeProgram")),
        exceptions=parse_exceptions(values.get("SuspendExcNodes", "")),
        excluded_partitions=frozenset(filter(None, values.get("SuspendExcParts", "").split(","))),
    )


def values_of(configuration: str) -> dict[str, str]:
    """The settings of `scontrol show config`; "" for those that are not set."""
    pairs = (line.partition("=") for line in configuration.splitlines())
    return {name.strip(): value.strip().replace("(null)", "") for name, equals, value in pairs if equals}


def _seconds(values: dict[str, str], name: str) -> int | None:
    """ "30 sec" as 30; NONE, INFINITE and nothing as None."""
    found = re.match(r"[0-9]+", values.get(name, ""))
    return int(found[0]) if found else None
