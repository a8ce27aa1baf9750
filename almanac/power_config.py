"""The sections of the configuration for node power: [power] and [[node_sets]]."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.submit_config import key


@dataclass(frozen=True)
class NodeSet:
    """Nodes that are counted and powered together. Exactly one of nodes, feature and partition selects them."""

    name: str = key("", "what it is called; letters, digits, ., _ and -")
    nodes: str = key("", "hostlist, such as gpu[001-064]")
    feature: str = key("", "node feature, such as hbm80g")
    partition: str = key("", "partition")
    exclude: str = key("", "hostlist of nodes that always stay on")
    warm_minimum: int = key(1, "nodes that always stay on and idle, ready for a job", low=0)


@dataclass(frozen=True)
class Power:
    """Node power saving. Nodes that are in no [[node_sets]] table are never touched."""

    mode: str = key("observe", "off; observe: plans are logged, nothing is done; apply: nodes power down and up")
    wakeups_per_day: float = key(1.0, "budget: times a day that nodes of a set may have to be woken", low=0, high=1000)
    short_min_per_day: float = key(
        2.0, "budget: minutes a day in which a set may have fewer nodes on than jobs want", low=0, high=1440
    )
    actuator: str = key(
        "auto",
        "names: nodes are powered down by name; count: SuspendExcNodes=<set>:N, Slurm 24.11 and later; "
        "auto: names, unless SuspendTime in slurm.conf makes Slurm power down idle nodes itself",
    )
    cycles_per_day: int = key(2, "power-downs of one node within 24 hours, at most", low=0, high=100)
    cooldown_s: int = key(1800, "seconds for which a node stays on after a job or a change of power", low=0)
    boot_min: int = key(5, "minutes until a woken node takes jobs, for back-tests and savings", low=0, high=120)
    nodes_per_run: int = key(20, "nodes of a set that one run powers down, at most; waking has no limit", low=1)
    stale_s: int = key(1800, "with newer demand than this missing, nothing is powered down", low=60)
    wake_retries: int = key(
        1, "times that a node which did not come up is woken again before it is quarantined", low=0, high=10
    )
    holidays: str = key("", "country whose public holidays the forecast knows, such as US, DE or CN")
    idle_watts: float = key(800.0, "power of an idle node, W (a DGX-1; helios-qssf-ces, 4.3.3)", low=0)
    asleep_watts: float = key(0.0, "power of a node that is powered down, W", low=0)
    pue: float = key(1.5, "power usage effectiveness of the site", low=1, high=10)
    co2_kg_per_kwh: float = key(0.4, "kg of CO2 per kWh", low=0)
    bmc_file: str = key(
        "/etc/almanac/bmc.toml", "addresses and credentials of the nodes' BMCs, mode 0600, owner SlurmUser"
    )
