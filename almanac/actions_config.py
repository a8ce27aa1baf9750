"""The sections of the configuration for what almanac changes: node power, MIG layouts, and pending jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from almanac.submit_config import fixed, key

PowerMode = Literal["off", "observe", "apply"]
ActuatorName = Literal["names", "count"]
ActuatorChoice = Literal["auto", "names", "count"]
MigMode = Literal["off", "observe", "apply"]
MigRaiseMode = Literal["off", "apply"]
PlacementMode = Literal["observe", "apply"]
TypeSelector = Literal["constraint", "gres"]
"""Form in which a job asks for a GPU type at this site."""
FindingKind = Literal[
    "idle", "unused_gpus", "hang", "memory_full", "throttled", "power_brake", "ecc", "row_remap", "xid", "host_memory",
    "limit",
]  # fmt: skip
"""Things that the watch finds in running jobs."""
CancelKind = Literal["idle", "hang"]
"""Findings of jobs that do no work at all."""


@dataclass(frozen=True)
class NodeSet:
    """Nodes that almanac counts and powers together. Exactly one of nodes, feature, and partition selects them."""

    name: str = key("", "name; letters, digits, ., _ and -")
    nodes: str = key("", "hostlist of the nodes, such as gpu[001-064]")
    feature: str = key("", "node feature of the nodes, such as hbm80g")
    partition: str = key("", "partition of the nodes; several, separated by commas, are one pool of nodes")
    exclude: str = key("", "hostlist of nodes that always stay on")
    warm_minimum: int = key(1, "nodes that always stay on and idle, ready for a job", low=0)

    @property
    def partitions(self) -> frozenset[str]:
        """Partitions whose nodes the set pools; empty if other keys select its nodes."""
        return frozenset(name.strip() for name in self.partition.split(",")) - {""}


@dataclass(frozen=True)
class Power:
    """Node power saving. almanac never touches a node outside all [[node_sets]]."""

    mode: PowerMode = key("observe", "off; observe: only log plans; apply: power nodes down and up")
    boots_per_node: float = key(
        0.1, "budget: boots of a node for each day, on average over its node set", low=0, high=24
    )
    wakes_per_day: float = key(
        -1.0, "budget: wake-ups of a node set for each day; below 0: no limit", low=-1, high=1000
    )
    short_min_per_day: float = key(
        2.0, "budget: minutes for each day in which a node set may have fewer nodes on than jobs want", low=0, high=1440
    )
    actuator: ActuatorChoice = key(
        "auto",
        "names: power down nodes by name; count: SuspendExcNodes=<set>:N, Slurm 24.11 and later; "
        "auto: count if SuspendTime makes Slurm power down idle nodes itself, otherwise names",
    )
    cycles_per_day: int = key(2, "most power-downs of one node within 24 hours", low=0, high=100)
    cooldown_s: int = key(1800, "seconds that a node stays on after a job or a change of power", low=0)
    boot_min: int = key(
        5, "minutes until a node that powers up takes jobs, for back-tests and savings", low=0, high=120
    )
    nodes_per_run: int = fixed(20, "most nodes of a set that one run powers down: a wrong forecast costs no more")
    holidays: str = key("", "country whose public holidays the forecast uses, such as US, DE, or CN")
    idle_watts: float = key(800.0, "power of an idle node, W (a DGX-1; Hu et al., SC'21, 4.3.3)", low=0)
    asleep_watts: float = key(0.0, "power of a powered-down node, W", low=0)
    pue: float = key(1.5, "power usage effectiveness of the site", low=1, high=10)
    co2_kg_per_kwh: float = key(0.4, "kg of CO2 per kWh", low=0)
    bmc_file: str = key(
        "/etc/almanac/bmc.toml", "file with addresses and credentials of the nodes' BMCs; mode 0600, owner SlurmUser"
    )


@dataclass(frozen=True)
class Mig:
    """Layouts of MIG slices. almanac changes only the nodes named here, one at a time."""

    mode: MigMode = key("observe", "off; observe: only log plans; apply: drain free nodes and change their layout")
    nodes: tuple[str, ...] = key(
        (), 'nodes whose layout almanac may change, each "HOSTLIST=MODEL", such as "gpu[01-08]=A100-80"'
    )
    exclude: str = key("", "hostlist of nodes that almanac never changes")
    whole_types: tuple[str, ...] = key(
        (), 'GRES types of whole GPUs, each "MODEL=TYPE"; without one: the model\'s first part, such as a100'
    )
    slice_type: str = key("{profile}", "GRES type of a slice, where {profile} is NVIDIA's name, such as 1g.10gb")
    drain_busy: bool = key(
        False, "also drain busy nodes whose change is worth the wait, and change them when their last job has ended"
    )
    include_file: str = key(
        "/etc/slurm/almanac-mig.conf",
        "file that slurm.conf includes, with one NodeName line for each node; almanac changes only Gres= in it",
    )
    distribute_command: tuple[str, ...] = key(
        (), "program that copies include_file to the other hosts, with the node as {node}; empty: shared or configless"
    )
    apply_command: tuple[str, ...] = key(
        ("ssh", "-oBatchMode=yes", "{node}", "nvidia-mig-parted", "apply", "-f", "-", "-c", "almanac"),
        "applies the layout that it reads from standard input, on {node}",
    )
    assert_command: tuple[str, ...] = key(
        ("ssh", "-oBatchMode=yes", "{node}", "nvidia-mig-parted", "assert", "-f", "-", "-c", "almanac"),
        "succeeds if {node} has the layout that it reads from standard input",
    )
    export_command: tuple[str, ...] = key(
        ("ssh", "-oBatchMode=yes", "{node}", "nvidia-mig-parted", "export", "-o", "json"),
        "prints the layout of {node} as JSON",
    )
    gres_command: tuple[str, ...] = key(
        (), "writes gres.conf on {node} after a change; empty: gres.conf has AutoDetect=nvml"
    )
    register_command: tuple[str, ...] = key(
        (),
        "restarts slurmd on a dynamic {node}, with the parameters that it reads from standard input added to `slurmd "
        "--conf`; empty: dynamic nodes are not changed",
    )
    restart_command: tuple[str, ...] = key(
        ("systemctl", "restart", "slurmctld"), "restarts slurmctld, which releases before 24.11 need"
    )


@dataclass(frozen=True)
class MigRaise:
    """Pending jobs of one MIG slice that get an idle larger one, on Slurm 24.11 and later."""

    mode: MigRaiseMode = key("off", "off: only show what could be raised; apply: raise jobs")
    partitions: tuple[str, ...] = key(
        (), "partitions whose jobs may be raised without almanac:larger in their --comment"
    )
    types: tuple[str, ...] = key(
        (), "GRES types from the smallest up, each able to run every job of the ones before; empty: by profile names"
    )


@dataclass(frozen=True)
class PlacementSection:
    """GPU types of pending jobs whose owner accepts any type. Nothing is planned without partitions and types."""

    mode: PlacementMode = key("observe", "observe: only show and log plans; apply: change jobs in Slurm")
    partitions: tuple[str, ...] = key(
        (), "partitions that take part; a job that may start in any other partition is left alone"
    )
    types: tuple[str, ...] = key((), "GPU types to choose from: node features, or GRES types")
    select_by: TypeSelector = key(
        "constraint", "constraint: --constraint names the type; gres: --gres or --gpus does (Slurm 24.11 and later)"
    )
    requeue: bool = key(False, "also requeue running jobs of almanac:movable, one a run, when they end sooner")


@dataclass(frozen=True)
class WatchSection:
    """Actions on running jobs by what the watch finds. Each list is empty by default, so that nothing acts."""

    message: tuple[FindingKind, ...] = key(
        (), "findings that a job's owner is mailed about, once and then at most hourly"
    )
    operators: tuple[FindingKind, ...] = key((), "findings that watch.operators_mail gets, at most hourly for each job")
    operators_mail: str = key("", "address of the operators, for watch.operators")
    cancel: tuple[CancelKind, ...] = key(
        (), "findings for which jobs of watch.partitions are cancelled, after two mails that warn the owner: idle, hang"
    )
    partitions: tuple[str, ...] = key((), "partitions whose jobs may be cancelled")
    interactive_partitions: tuple[str, ...] = key(
        (), "of these, the partitions whose interactive jobs (salloc, srun, Open OnDemand) may be cancelled, too"
    )
    cancel_min: int = key(
        150,
        "minutes that a job idles or hangs before it is cancelled: time for two mails, and to answer; "
        "on generated sites 1 in 200 such jobs would have worked again, after 120 minutes 1 in 80",
        low=90,
        high=1440,
    )


@dataclass(frozen=True)
class TrialRules:
    """Rules for the verdicts of `almanac trial`."""

    worse_users: float = key(
        0.25, "most users that a change may leave worse off, as a share: any order that helps some delays others",
        low=0, high=1,
    )  # fmt: skip
    least_weeks: int = fixed(3, "whole weeks to judge: two say nothing of how much weeks differ")
    train_days: int = fixed(14, "days before them to learn from: the least that holds each weekday twice")
    week_days: int = fixed(4, "days with data that a week needs to count: most of it, since missing is not zero")
    confidence: float = fixed(
        0.95, "of the interval over weeks: at most 1 in 40 subjects that gain nothing is switched on"
    )
