"""What the project asks of a running Slurm and tells it, whichever way it is reached: commands or pyslurm."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from almanac.names import rule_key
from almanac.records import Counts, Request


@dataclass(frozen=True)
class PendingJob:
    """One pending record of slurmctld: a job, a part of a heterogeneous job, an array task with a record of its own,
    or all tasks of an array that have none yet.

    job_id: the record's own number (sacct's JobIDRaw). address: what scontrol takes for this record and no other.
    array_job_id, het_job_id: None where it belongs to none; array_task_id: None for an array's common record.
    Counts are of the whole job, or of one array task. A held job has priority 0 until it is released. restarts: how
    often it was requeued; submit_s is then the time of the last one. reason: why Slurm does not start it, as Slurm
    spells it. gpus_per_node: 0 where the job did not fix it. shares: parts of GPUs, by the name of
    the GRES (shard, mps), of the whole job. is_exclusive: asked for whole nodes; 26.05 does not tell.
    task_count: tasks of the record that its array's limit lets run at once. script_key: "" where no script is known, as
    by pyslurm.
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
    reason: str = ""
    gpus_per_node: int = 0
    shares: tuple[tuple[str, int], ...] = ()
    is_exclusive: bool = False
    task_count: int = 1
    script_key: str = ""
    comment: str = ""

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
            script_key=self.script_key,
            rule=rule_key(self.comment.replace('"', "`")),
        )


@dataclass(frozen=True)
class SiteFactor:
    """The site factor of a pending job in Slurm.

    is_explicit: somebody set the job's priority directly, and no factor counts until this is reset.
    """

    value: int
    is_explicit: bool = False


@dataclass(frozen=True)
class FactorChange:
    """A site factor to be set."""

    job: PendingJob
    site_factor: int


NodeState = Literal["power_down_asap", "power_up", "drain", "resume"]
"""What a node can be told. power_down_asap lets running jobs end; the states that end jobs are left out on purpose."""


@dataclass(frozen=True)
class Node:
    """states: base state and flags, upper case without symbols: {"IDLE", "POWERED_DOWN"}, as node_states has them. gres
    as configured.

    cpu_count: 0 where it is not known.
    last_busy_s, boot_s: unix seconds, None where Slurm has none. last_busy_s of an idle node is when its last job ended
    or it came up; Slurm forgets it when the node powers down. reservation: the active one; 22.05 names none.
    gres_used: what jobs hold, with every type that the node registered, "gpu:a100:0(IDX:N/A)"; "" where not shown.
    """

    name: str
    states: frozenset[str]
    features: tuple[str, ...] = ()
    gres: str = ""
    partitions: tuple[str, ...] = ()
    reason: str = ""
    cpu_count: int = 0
    last_busy_s: int | None = None
    boot_s: int | None = None
    reservation: str = ""
    gres_used: str = ""


@dataclass(frozen=True)
class Reservation:
    """A reservation of nodes for a span of time, unix seconds."""

    nodes: tuple[str, ...]
    start_s: int
    end_s: int


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

    def pending(self, counts: Counts, job_ids: Collection[int] = ()) -> list[PendingJob]:
        """Every pending record, or at least those of some jobs, oldest number first; one that cannot be read is counted
        and left out.
        """

    def site_factors(self) -> dict[int, SiteFactor]:
        """By record number, of the pending jobs that Slurm ranks now; held ones and those not yet eligible are not
        among them.
        """

    def set_site_factors(self, changes: Sequence[FactorChange]) -> list[str]:
        """Tell Slurm the factors, one after another; what it said against any of them. A job that has started or is
        gone is no fault of the others.

        Raises CommandError as soon as slurmctld is out of reach, and after slurm.timeout_s: some may have been told.
        """

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Every node, or at least those of some names, by name."""

    def reservations(self) -> list[Reservation]:
        """Those that have not ended, with nodes."""

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
        """Raises CommandError where slurmdbd does not answer."""
