"""Match hosts of telemetry with Slurm's nodes.

Slurm and an exporter may write one host in two ways: nl2 and NL2, nid001 and nid001.cluster.example, n1 and n1:9400.
So names are compared without case, port, and domain. Hosts that differ only in their domain stay separate.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from telemetry.attribution.allocations import JobRun
from telemetry.attribution.seen_units import days_of

_PORT = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:]*))(?::[0-9]{1,5})?")


@dataclass(frozen=True)
class HostNames:
    """nodes: the Slurm node of each host with another name in telemetry. unclear: hosts that may be one of several."""

    nodes: Mapping[str, str]
    unclear: frozenset[str] = frozenset()


def match_hosts(hosts: Collection[str], nodes: Collection[str]) -> HostNames:
    """The Slurm nodes of telemetry's hosts. A host is matched only if no other host or node fits its name."""
    groups: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((hosts, nodes)):
        for name in sorted(set(names)):
            groups[name_parts(name)[0]][side].append(name)
    found, unclear = dict[str, str](), set[str]()
    for ours, theirs in groups.values():
        for host in ours if theirs and ours != theirs else ():
            node = _node_of(host, ours, theirs)
            if node is None:
                unclear.add(host)
            elif node != host:
                found[host] = node
    return HostNames(found, frozenset(unclear))


def match_days(hosts: Mapping[int, Collection[str]], jobs: Iterable[JobRun]) -> dict[int, HostNames]:
    """match_hosts for each day since 1970: the hosts seen on it, and the nodes of the jobs that ran on it.

    Each day is matched by itself, so that the result for a job does not depend on the other days of the run.
    """
    nodes: dict[int, set[str]] = defaultdict(set)
    for job in jobs:
        for day in days_of(job.start_s, job.end_s):
            if day in hosts:
                nodes[day].update(job.hosts)
    return {day: match_hosts(names, nodes[day]) for day, names in hosts.items() if day in nodes}


@functools.lru_cache(maxsize=1 << 17)
def name_parts(name: str) -> tuple[str, ...]:
    """The labels of a host name in lower case, without a port; an address is one label."""
    match = _PORT.fullmatch(name)
    host = name if match is None else match["v6"] or match["host"] or name
    host = host.lower().rstrip(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return tuple(host.split("."))
    return (host,)


def may_be_one(one: str, other: str) -> bool:
    """Whether two names can mean one host: the parts that both have are equal."""
    return all(a == b for a, b in zip(name_parts(one), name_parts(other), strict=False))


def _node_of(host: str, hosts: Collection[str], nodes: Collection[str]) -> str | None:
    """hosts, nodes: those that share their first part with the host."""
    if host in nodes:
        return host
    near = [node for node in nodes if name_parts(node) == name_parts(host)]
    near = near or [node for node in nodes if may_be_one(host, node)]
    if len(near) != 1:
        return None
    rivals = [other for other in hosts if may_be_one(other, host) or may_be_one(other, near[0])]
    return near[0] if all(may_be_one(a, b) for a, b in combinations([*rivals, near[0]], 2)) else None
