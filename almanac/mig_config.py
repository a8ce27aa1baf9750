"""The section of the configuration for layouts of MIG slices: [mig]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from almanac.submit_config import key

MigMode = Literal["off", "observe", "apply"]


@dataclass(frozen=True)
class Mig:
    """Layouts of MIG slices. almanac changes only the nodes named here, one at a time unless you allow more."""

    mode: MigMode = key("observe", "off; observe: only log plans; apply: drain free nodes and change their layout")
    nodes: tuple[str, ...] = key(
        (), 'nodes whose layout almanac may change, each "HOSTLIST=MODEL", such as "gpu[01-08]=A100-80"'
    )
    exclude: str = key("", "hostlist of nodes that almanac never changes")
    whole_types: tuple[str, ...] = key(
        (), 'GRES types of whole GPUs, each "MODEL=TYPE"; without one: the model\'s first part, such as a100'
    )
    slice_type: str = key("{profile}", "GRES type of a slice, where {profile} is NVIDIA's name, such as 1g.10gb")
    nodes_at_once: int = key(1, "most nodes under change at the same time", low=1, high=1000)
    drain_busy: bool = key(
        False, "also drain busy nodes whose change is worth the wait, and change them when their last job has ended"
    )
    hours_between: float = key(24.0, "hours between two changes of one node", low=1, high=8760)
    demand_days: float = key(7.0, "days of past jobs that the plan looks at", low=0.1, high=365)
    reservation_hours: float = key(
        2.0, "a node with a reservation that starts within these hours is not changed", low=0, high=8760
    )
    job_wait_s: int = key(
        300, "seconds to wait for a job that reached the node before the drain; then the node is resumed", low=0
    )
    command_timeout_s: int = key(300, "seconds after which a command on a node has failed", low=1, high=86400)
    verify_timeout_s: int = key(180, "seconds until Slurm must show the new layout", low=1, high=86400)
    run_s: int = key(900, "seconds after which a run stops waiting; the next run goes on", low=1, high=86400)
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
