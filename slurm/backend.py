"""Questions and orders to a running Slurm (SlurmBackend), and the backend that uses its commands for every release."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from almanac.errors import CommandError
from almanac.records import Counts
from almanac.units import printable
from slurm.commands import Done, Runner, Settings, slurm_settings
from slurm.hostlist import expand, fold
from slurm.nodes import SlurmNode, read_nodes
from slurm.queue import read_queue
from slurm.queued_job import QueuedJob


@dataclass(frozen=True)
class SiteFactor:
    """The site factor of a pending job in Slurm.

    is_explicit: somebody set the job's priority directly, and no factor counts until this is reset.
    """

    value: int
    is_explicit: bool = False


NodeState = Literal["power_down_asap", "power_up", "drain", "resume"]
"""Orders to a node. power_down_asap lets running jobs end; the states that end jobs are left out on purpose."""


@dataclass(frozen=True)
class Reservation:
    """A reservation of nodes for a span of time, unix seconds."""

    nodes: tuple[str, ...]
    start_s: int
    end_s: int
    name: str = ""


class SlurmBackend(Protocol):
    """Everything raises CommandError where Slurm does not answer."""

    def program(self) -> str:
        """Return the program that reaches slurmctld, and its release: scontrol 24.11.5."""

    def release(self) -> str:
        """slurmctld's release: 24.11.5."""

    def cluster(self) -> str:
        """ClusterName of slurm.conf."""

    def settings(self) -> Settings:
        """slurmctld's settings; at least those of the priority plugin."""

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[QueuedJob]:
        """Every pending record, or at least those of some jobs, oldest number first; one that cannot be read is counted
        and left out.
        """

    def site_factors(self) -> dict[int, SiteFactor]:
        """Return the site factors of the pending jobs that Slurm ranks now, by record number.

        Held jobs and jobs not yet eligible are not among them.
        """

    def set_site_factors(self, jobs: Sequence[QueuedJob]) -> list[str]:
        """Tell Slurm the site factors of jobs, one after another; what it said against any of them. A job that has
        started or is gone is no fault of the others.

        Raises CommandError as soon as slurmctld is out of reach, and after slurm.timeout_s: some may have been told.
        """

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        """Every node, or at least those of some names, by name."""

    def reservations(self) -> list[Reservation]:
        """Return the reservations that have not ended, with nodes."""

    def set_node_state(self, names: Sequence[str], state: NodeState, reason: str = "") -> list[str]:
        """Tell Slurm the state of nodes; what it said against it. Some nodes may have been told all the same.

        Slurm takes some orders without a word and drops them: look at the nodes afterwards. Raises CommandError as soon
        as slurmctld is out of reach, ValueError where a name is not a node's.
        """

    def suspend_exceptions(self) -> str:
        """SuspendExcNodes, the nodes that Slurm itself does not power down: "n1,n[2-4]:2"; "" for none."""

    def set_suspend_exceptions(self, value: str) -> list[str]:
        """Replace SuspendExcNodes; what Slurm said against it. From 24.11 on it can hold counts. It is lost when
        slurmctld reads slurm.conf again, and Slurm takes names of nodes that do not exist: read it back.
        """

    def require_accounting(self) -> None:
        """Check that slurmdbd answers. Raises CommandError if it does not."""


_FACTORS = "%i|%Y|%S|%A|%B|%F|%J|%P|%Q|%N|%T"
"""Number, priority, site factor, then every other part of the priority; %T is a list."""
_FACTOR_ROW = re.compile(r"\s*([0-9]+)\s*\|\s*([0-9]+)\s*\|\s*(-?[0-9]+)\s*\|(.*)")
_RESERVATION = re.compile(
    r"ReservationName=(.*?) StartTime=([0-9]+) EndTime=([0-9]+) Duration=\S+ Nodes=(\S*) NodeCnt=[0-9]+ .*"
)
NODES_PER_COMMAND = 500
"""Nodes that one command changes: slurmctld holds its locks meanwhile."""


class CommandRunner(Runner, Protocol):
    """A Runner that can also feed a command requests to slurmctld, as SlurmCommands does."""

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done: ...


@dataclass(frozen=True)
class CommandBackend:
    """A SlurmBackend of Slurm's commands."""

    commands: CommandRunner

    def settings(self) -> Settings:
        return slurm_settings(self.commands)

    def program(self) -> str:
        words = self.commands(["scontrol", "--version"]).decode("utf-8", "replace").split()
        return f"scontrol {words[-1] if words else 'of an unknown release'}"

    def release(self) -> str:
        return self._setting("SLURM_VERSION")

    def cluster(self) -> str:
        return self._setting("ClusterName")

    def _setting(self, name: str, *, may_be_empty: bool = False) -> str:
        found = self.settings().get(name)
        if found is None or not (found or may_be_empty):
            raise CommandError(f"`scontrol show config` shows no {name}", "check that slurmctld answers")
        return found

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[QueuedJob]:
        return read_queue(self.commands, self.cluster(), job_ids).waiting_jobs(counts)

    def site_factors(self) -> dict[int, SiteFactor]:
        """Return the site factors that sprio prints.

        sprio prints a job once for each of its partitions, with the same site factor.
        """
        factors = {}
        for line in self.commands(["sprio", "-h", "-o", _FACTORS]).decode("utf-8", "replace").splitlines():
            row = _FACTOR_ROW.fullmatch(line)
            if row is None:
                raise CommandError(
                    f"sprio printed {printable(line)!r}", "report this: almanac does not know the format"
                )
            job_id, priority, site_factor = map(int, row.groups()[:3])
            factors[job_id] = SiteFactor(site_factor, _is_explicit(priority, site_factor, row[4]))
        return factors

    def set_site_factors(self, jobs: Sequence[QueuedJob]) -> list[str]:
        """One scontrol reads all commands: it goes on after a refusal, and names the job in most of them.

        It would go on, too, when slurmctld is lost, and wait 10 s for each job.
        """
        if not jobs:
            return []
        lines = [f"update jobid={job.address} sitefactor={job.site_factor}\n" for job in jobs]
        done = self.commands.feed(["scontrol"], "".join(lines).encode())
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return said or ([f"scontrol ended with {done.code}"] if done.code else [])

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        return read_nodes(self.commands, names)

    def reservations(self) -> list[Reservation]:
        """Return the reservations that have nodes. Raises CommandError for a line in an unknown format.

        Only operators name reservations, so their text is trusted.
        """
        text = self.commands(["scontrol", "-o", "show", "reservation"]).decode("utf-8", "replace")
        found = []
        for line in text.splitlines():
            if not line.strip() or line.startswith("No reservations in the system"):
                continue
            row = _RESERVATION.fullmatch(line.strip())
            if row is None:
                raise CommandError(
                    f"scontrol printed the reservation {printable(line)!r}",
                    "report this: almanac does not know the format",
                )
            if row[4] and row[4] != "(null)":
                found.append(Reservation(_hosts(row[4]), int(row[2]), int(row[3]), row[1]))
        return found

    def set_node_state(self, names: Sequence[str], state: NodeState, reason: str = "") -> list[str]:
        said = []
        for first in range(0, len(names), NODES_PER_COMMAND):
            hosts = fold(names[first : first + NODES_PER_COMMAND])
            why = [f"reason={reason}"] if reason else []
            said += self._update(f"nodename={hosts}", f"state={state}", *why)
        return said

    def suspend_exceptions(self) -> str:
        return self._setting("SuspendExcNodes", may_be_empty=True)

    def set_suspend_exceptions(self, value: str) -> list[str]:
        return self._update(f"SuspendExcNodes={value}")

    def _update(self, *settings: str) -> list[str]:
        done = self.commands.feed(["scontrol", "update", *settings], b"")
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return [] if not done.code else said or [f"scontrol ended with {done.code}"]

    def require_accounting(self) -> None:
        """Raise CommandError if slurmdbd does not answer. sacctmgr exits 0 without rows if it lists no cluster."""
        self.commands(["sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"])


def _hosts(text: str) -> tuple[str, ...]:
    """Expand a host list. Raises CommandError for any other text."""
    try:
        return expand(text)
    except ValueError as error:
        raise CommandError(
            f"unreadable reservation: {error}", "report this: almanac does not know the format"
        ) from error


def _is_explicit(priority: int, site_factor: int, parts: str) -> bool:
    """Of a priority that somebody set sprio shows the sum and no part; without parts, a ranked job's sum is 1."""
    return priority > 1 and site_factor == 0 and not re.search("[1-9]", parts)
