"""What the project asks of a running Slurm and tells it, whichever way it is reached: commands or pyslurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from almanac.records import Counts, Request


@dataclass(frozen=True)
class PendingJob:
    """One pending record of slurmctld: a job, a part of a heterogeneous job, an array task with a record of its own,
    or all tasks of an array that have none yet.

    job_id: the record's own number (sacct's JobIDRaw). address: what scontrol takes for this record and no other.
    array_job_id, het_job_id: None where it belongs to none; array_task_id: None for an array's common record.
    Counts are of the whole job, or of one array task. A held job has priority 0 until it is released. restarts: how
    often it was requeued; submit_s is then the time of the last one.
    """

    job_id: int
    address: str
    submit_s: int
    user: str
    name: str
    account: str = ""
    partition: str = ""
    qos: str = ""
    constraints: str = ""
    gpu_count: int = 0
    gpu_type: str = ""
    cpu_count: int = 1
    node_count: int = 1
    time_limit_s: int | None = None
    is_held: bool = False
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_job_id: int | None = None
    het_offset: int | None = None
    restarts: int = 0

    def request(self) -> Request:
        """The submission as the history records it: slurmdbd stores a double quote in a name as a backtick."""
        return Request(
            user=self.user,
            job_name=self.name.replace('"', "`"),
            account=self.account,
            partition=self.partition,
            qos=self.qos,
            constraints=self.constraints,
            gpu_count=self.gpu_count,
            gpu_type=self.gpu_type,
            node_count=self.node_count,
            cpu_count=self.cpu_count,
            time_limit_s=self.time_limit_s,
            is_array=self.array_job_id is not None,
            submit_s=self.submit_s,
        )


@dataclass(frozen=True)
class SiteFactor:
    """What the multifactor plugin counts for a pending job, points; is_explicit: somebody set the job's priority
    itself, and no factor counts until it is reset.
    """

    points: int
    is_explicit: bool = False


@dataclass(frozen=True)
class FactorChange:
    """A site factor to be set."""

    job: PendingJob
    points: int


@dataclass(frozen=True)
class Node:
    """states: base state and flags, upper case without symbols: {"IDLE", "POWERED_DOWN"}. gres as configured."""

    name: str
    states: frozenset[str]
    features: tuple[str, ...] = ()
    gres: str = ""
    partitions: tuple[str, ...] = ()
    reason: str = ""


class SlurmBackend(Protocol):
    """Everything raises CommandError where Slurm does not answer."""

    def program(self) -> str:
        """What slurmctld is reached by, and its release: scontrol 24.11.5."""

    def release(self) -> str:
        """slurmctld's release: 24.11.5."""

    def cluster(self) -> str:
        """ClusterName of slurm.conf."""

    def configuration(self) -> str:
        """slurmctld's settings, one `Key = value` a line; at least those of the priority plugin."""

    def pending(self, counts: Counts) -> list[PendingJob]:
        """Every pending record, oldest number first; one that cannot be read is counted and left out."""

    def site_factors(self) -> dict[int, SiteFactor]:
        """By record number, of the pending jobs that Slurm ranks now; held ones and those not yet eligible are not
        among them.
        """

    def set_site_factors(self, changes: Sequence[FactorChange]) -> list[str]:
        """Tell Slurm the factors, one after another; what it said against any of them. A job that has started or is
        gone is no fault of the others.

        Raises CommandError as soon as slurmctld is out of reach, and after slurm.timeout_s: some may have been told.
        """

    def nodes(self) -> list[Node]:
        """Every node, by name."""
