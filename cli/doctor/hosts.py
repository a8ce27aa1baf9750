"""`almanac doctor` on names: hosts that only Prometheus knows, and GPU nodes that only Slurm knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from almanac.errors import AlmanacError
from almanac.units import counted, listed, printable
from cli.app import App
from cli.doctor.findings import Check

NAME = "host names"

_SHOWN = 4
"""Nodes that the text names; JSON has all."""
_OFF = ("~", "#", "%")
"""Marks of sinfo at the end of a state: the node is powered down, or is powering up or down."""


@dataclass(frozen=True)
class GpuNode:
    """NodeName and NodeHostName of a node with GPUs. is_up: it is neither down nor powered down."""

    name: str
    host: str
    is_up: bool


def check_hosts(app: App, hosts: Collection[str]) -> Iterator[Check]:
    """Compare the hosts of telemetry with Slurm's GPU nodes. Yields nothing if Slurm does not answer."""
    from telemetry.attribution.host_names import match_hosts

    try:
        nodes = gpu_nodes(app)
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes or not hosts:
        return
    names = match_hosts(hosts, [node.name for node in nodes])
    known = {names.nodes.get(host, host) for host in hosts}
    silent = [node for node in nodes if node.is_up and node.name not in known]
    strange = sorted(set(hosts) - names.nodes.keys() - names.unclear - {node.name for node in nodes})
    if names.unclear:
        said = f"{listed(sorted(names.unclear), 'host')} may be one of several nodes, so their counters have no job"
        todo = "set prometheus.host_suffix to the domain of this cluster's nodes"
        yield Check(NAME, "warn", said, todo, {"unclear": sorted(names.unclear)})
    if silent:
        yield _silent(silent, strange)
    if strange:
        said = f"{listed(strange, 'host')} with GPU counters {_is(strange)} no GPU node of Slurm"
        todo = "narrow prometheus.selector to this cluster, or correct the exporter's host label"
        yield Check(NAME, "warn", said, todo, {"hosts": strange})
    if not (names.unclear or silent or strange):
        yield Check(NAME, "ok", f"Prometheus and Slurm know the same {counted(len(known), 'GPU node')}")


def gpu_nodes(app: App) -> list[GpuNode]:
    """The nodes of Slurm that have GPUs. Raises CommandError."""
    lines = app.commands(["sinfo", "-h", "-N", "-o", "%N %n %G %T"]).decode("utf-8", "replace").splitlines()
    rows = {tuple(words) for line in lines if len(words := line.split()) == 4 and "gpu" in words[2]}
    return [
        GpuNode(name, host, not (state.endswith(_OFF) or state.startswith("down")))
        for name, host, _, state in sorted(rows)
    ]


def _silent(silent: Sequence[GpuNode], strange: Collection[str]) -> Check:
    """GPU nodes without counters, and whether Slurm names their hosts differently."""
    from telemetry.attribution.host_names import match_hosts

    names = [node.name for node in silent]
    said = f"no GPU counters from {listed(names, 'GPU node')} of Slurm"
    todo = "add the exporters of these nodes to Prometheus' scrape_configs"
    by_host = {node.host: node.name for node in silent if node.host != node.name}
    found = match_hosts(strange, by_host)
    meant = sorted({found.nodes.get(host, host) for host in strange} & by_host.keys())
    if meant:
        pairs = [f"{by_host[host]} has NodeHostName {host}" for host in meant]
        said += f"; {', '.join(printable(pair, 120) for pair in pairs[:_SHOWN])}"
        todo = "make the exporter's host label the NodeName, with relabel_configs in Prometheus"
    return Check(NAME, "warn", said, todo, {"nodes": names, "node_host_names": meant})


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
