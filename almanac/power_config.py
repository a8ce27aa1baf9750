"""The sections of the configuration for node power: [power] and [[node_sets]]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from almanac.submit_config import key

PowerMode = Literal["off", "observe", "apply"]
ActuatorName = Literal["names", "count"]
ActuatorChoice = Literal["auto", "names", "count"]


@dataclass(frozen=True)
class NodeSet:
    """Nodes that almanac counts and powers together. Exactly one of nodes, feature, and partition selects them."""

    name: str = key("", "name; letters, digits, ., _ and -")
    nodes: str = key("", "hostlist of the nodes, such as gpu[001-064]")
    feature: str = key("", "node feature of the nodes, such as hbm80g")
    partition: str = key("", "partition of the nodes")
    exclude: str = key("", "hostlist of nodes that always stay on")
    warm_minimum: int = key(1, "nodes that always stay on and idle, ready for a job", low=0)


@dataclass(frozen=True)
class Power:
    """Node power saving. almanac never touches a node outside all [[node_sets]]."""

    mode: PowerMode = key("observe", "off; observe: only log plans; apply: power nodes down and up")
    wakeups_per_day: float = key(1.0, "budget: wake-ups of a node set for each day", low=0, high=1000)
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
    nodes_per_run: int = key(20, "most nodes of a set that one run powers down; power-ups have no limit", low=1)
    stale_s: int = key(1800, "age of demand data, in seconds, above which nothing powers down", low=60)
    wake_retries: int = key(
        1, "retries for a node that did not power up, before almanac quarantines it", low=0, high=10
    )
    holidays: str = key("", "country whose public holidays the forecast uses, such as US, DE, or CN")
    idle_watts: float = key(800.0, "power of an idle node, W (a DGX-1; helios-qssf-ces, 4.3.3)", low=0)
    asleep_watts: float = key(0.0, "power of a powered-down node, W", low=0)
    pue: float = key(1.5, "power usage effectiveness of the site", low=1, high=10)
    co2_kg_per_kwh: float = key(0.4, "kg of CO2 per kWh", low=0)
    bmc_file: str = key(
        "/etc/almanac/bmc.toml", "file with addresses and credentials of the nodes' BMCs; mode 0600, owner SlurmUser"
    )
