"""Slurm by its own commands, for every release: squeue, sprio, scontrol and sinfo.

Numbers of text output only: what users write (names, comments) is read from JSON.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from almanac.errors import CommandError
from almanac.records import Counts
from almanac.units import printable
from telemetry.slurm.backend import FactorChange, Node, NodeState, PendingJob, Reservation, SiteFactor
from telemetry.slurm.commands import Done, Runner, controller_config
from telemetry.slurm.hostlist import expand, fold
from telemetry.slurm.queue_json import nodes_of, pending_jobs, queue_of, records

_FACTORS = "%i|%Y|%S|%A|%B|%F|%J|%P|%Q|%N|%T"
"""Number, priority, site factor, then every other part of the priority; %T is a list."""
_FACTOR_ROW = re.compile(r"\s*([0-9]+)\s*\|\s*([0-9]+)\s*\|\s*(-?[0-9]+)\s*\|(.*)")
_CLUSTER = re.compile(r"(?m)^ClusterName\s*=\s*(\S+)")
_RELEASE = re.compile(r"(?m)^SLURM_VERSION\s*=\s*(\S+)")
_EXCEPTIONS = re.compile(r"(?m)^SuspendExcNodes\s*=\s*(.*?)\s*$")
_RESERVATION = re.compile(
    r"ReservationName=.*? StartTime=([0-9]+) EndTime=([0-9]+) Duration=\S+ Nodes=(\S*) NodeCnt=[0-9]+ .*"
)
NODES_PER_COMMAND = 500
"""Nodes that one command changes: slurmctld holds its locks meanwhile."""


class CommandRunner(Runner, Protocol):
    """What runs commands, and feeds one requests to slurmctld, as SlurmCommands does."""

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done: ...


@dataclass(frozen=True)
class CommandBackend:
    """A SlurmBackend of Slurm's commands."""

    commands: CommandRunner

    def configuration(self) -> str:
        return controller_config(self.commands)

    def program(self) -> str:
        words = self.commands(["scontrol", "--version"]).decode("utf-8", "replace").split()
        return f"scontrol {words[-1] if words else 'of an unknown release'}"

    def release(self) -> str:
        return self._setting(_RELEASE, "SLURM_VERSION")

    def cluster(self) -> str:
        return self._setting(_CLUSTER, "ClusterName")

    def _setting(self, pattern: re.Pattern[str], name: str) -> str:
        found = pattern.search(self.configuration())
        if not found:
            raise CommandError(f"`scontrol show config` shows no {name}", "check that slurmctld answers")
        return found[1]

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[PendingJob]:
        return pending_jobs(queue_of(self.commands, job_ids, "-t", "PENDING"), self.cluster(), counts)

    def site_factors(self) -> dict[int, SiteFactor]:
        """sprio prints a job once for each of its partitions; the site factor is the same in all of them."""
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

    def set_site_factors(self, changes: Sequence[FactorChange]) -> list[str]:
        """One scontrol reads all commands: it goes on after a refusal, and names the job in most of them.

        It would go on, too, when slurmctld is lost, and wait 10 s for each job.
        """
        if not changes:
            return []
        lines = [f"update jobid={change.job.address} sitefactor={change.site_factor}\n" for change in changes]
        done = self.commands.feed(["scontrol"], "".join(lines).encode())
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return said or ([f"scontrol ended with {done.code}"] if done.code else [])

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """sinfo of 22.05 lists nodes; that of later releases lists groups of them, but their scontrol has JSON."""
        if names:
            with contextlib.suppress(CommandError):  # 22.05 has no JSON there, and a name may be gone
                asked = self.commands(["scontrol", "show", "nodes", fold(list(names)), "--json"])
                if some := records(asked, "nodes"):
                    return nodes_of(some)
        found = records(self.commands(["sinfo", "--json"]), "nodes")
        if found is None:
            found = records(self.commands(["scontrol", "show", "nodes", "--json"]), "nodes")
        if found is None:
            raise CommandError("neither sinfo nor scontrol gave a list of nodes", "run `scontrol show nodes --json`")
        return nodes_of(found)

    def reservations(self) -> list[Reservation]:
        """Only operators name reservations, so that their text can be believed; a name with spaces cannot be read."""
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
            if row[3] and row[3] != "(null)":
                found.append(Reservation(_hosts(row[3]), int(row[1]), int(row[2])))
        return found

    def set_node_state(self, names: Sequence[str], state: NodeState, reason: str = "") -> list[str]:
        said = []
        for first in range(0, len(names), NODES_PER_COMMAND):
            hosts = fold(names[first : first + NODES_PER_COMMAND])
            why = [f"reason={reason}"] if reason else []
            said += self._update(f"nodename={hosts}", f"state={state}", *why)
        return said

    def suspend_exceptions(self) -> str:
        found = _EXCEPTIONS.search(self.configuration())
        if found is None:
            raise CommandError("`scontrol show config` shows no SuspendExcNodes", "check that slurmctld answers")
        return "" if found[1] == "(null)" else found[1]

    def set_suspend_exceptions(self, value: str) -> list[str]:
        return self._update(f"SuspendExcNodes={value}")

    def _update(self, *settings: str) -> list[str]:
        done = self.commands.feed(["scontrol", "update", *settings], b"")
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        return [] if not done.code else said or [f"scontrol ended with {done.code}"]

    def require_accounting(self) -> None:
        """sacctmgr says 0 rows and no error where slurmdbd lists no cluster; it ends with 1 where none answers."""
        self.commands(["sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"])


def _hosts(text: str) -> tuple[str, ...]:
    """Raises CommandError where it is no host list."""
    try:
        return expand(text)
    except ValueError as error:
        raise CommandError(
            f"unreadable reservation: {error}", "report this: almanac does not know the format"
        ) from error


def _is_explicit(priority: int, site_factor: int, parts: str) -> bool:
    """Of a priority that somebody set sprio shows the sum and no part; without parts, a ranked job's sum is 1."""
    return priority > 1 and site_factor == 0 and not re.search("[1-9]", parts)
