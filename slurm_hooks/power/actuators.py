"""Two ways to power nodes down: by name, and by the count of nodes that Slurm's own power saving leaves on.

Waking is by name in both. Every call tells Slurm, and returns what Slurm said against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from almanac.power_config import ActuatorName
from slurm_hooks.power.nodes import DID_NOT_WAKE, REASON
from slurm_hooks.power.plan import Kept
from slurm_hooks.power.settings import KeptOn, counted, joined
from telemetry.slurm.backend import SlurmBackend
from telemetry.slurm.hostlist import fold


class Actuator(Protocol):
    """How nodes are powered down. name: as in power.actuator."""

    @property
    def name(self) -> ActuatorName: ...

    def exceptions(self, kept: Mapping[str, Kept]) -> str | None:
        """The new SuspendExcNodes, for all node sets together; None if this actuator leaves it alone."""
        ...

    def power_down(self, names: Sequence[str]) -> list[str]:
        """Tell Slurm to power these nodes down."""
        ...


@dataclass(frozen=True)
class ByName:
    """power_down_asap: a job that started meanwhile runs to its end, and the node powers down after it.

    A sleeping node is not drained, so that Slurm itself wakes it for a job that needs it.
    """

    backend: SlurmBackend
    name: ActuatorName = "names"

    def exceptions(self, kept: Mapping[str, Kept]) -> str | None:
        return None

    def power_down(self, names: Sequence[str]) -> list[str]:
        return self.backend.set_node_state(names, "power_down_asap", REASON) if names else []


@dataclass(frozen=True)
class ByCount:
    """SuspendExcNodes=<nodes>:N on Slurm 24.11 and later: Slurm powers idle nodes down by SuspendTime, but for N.

    N counts busy nodes. slurmctld forgets it when it reads slurm.conf again, so that each run tells it again. others:
    the site's own entries, which stay.
    """

    backend: SlurmBackend
    others: Sequence[KeptOn]
    name: ActuatorName = "count"

    def exceptions(self, kept: Mapping[str, Kept]) -> str | None:
        own = []
        for each in kept.values():
            if each.always:
                own.append(KeptOn(fold(sorted(each.always))))
            if each.counted:
                own.append(counted(each.counted, each.count))
        return joined((*self.others, *own))

    def power_down(self, names: Sequence[str]) -> list[str]:
        """Slurm does it by the count."""
        return []


def wake(backend: SlurmBackend, names: Sequence[str]) -> list[str]:
    """Slurm drops the order without a word for a node that is still powering down: look again afterwards."""
    return backend.set_node_state(names, "power_up") if names else []


def resume(backend: SlurmBackend, names: Sequence[str]) -> list[str]:
    return backend.set_node_state(names, "resume") if names else []


def quarantine(backend: SlurmBackend, names: Sequence[str], retries: int) -> list[str]:
    why = f"{DID_NOT_WAKE} within ResumeTimeout ({retries + 1} tries)"
    return backend.set_node_state(names, "drain", why) if names else []
