"""The cluster on which recorded jobs ran, found from their node lists."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from simulator.cluster import Cluster, NodeSet
from simulator.constraints import plain_features
from telemetry.slurm.hostlist import expand

COLUMNS = ("node_list", "node_count", "gpu_count", "gpu_type", "partition", "constraints")
_MOST_GPUS = 64


@dataclass
class _Node:
    gpus: int = 0
    models: Counter[str] = field(default_factory=Counter)
    features: set[str] = field(default_factory=set)
    partitions: set[str] = field(default_factory=set)


def recorded_cluster(rows: pa.Table) -> Cluster | None:
    """Nodes on which GPU jobs of the table ran; None if the table names no nodes.

    A node has as many GPUs as the largest share of a job on it. It has the features that jobs on it asked for, and
    belongs to their partitions.
    """
    nodes: defaultdict[str, _Node] = defaultdict(_Node)
    hosts_of: dict[str, tuple[str, ...]] = {}
    columns = (rows[name].to_pylist() for name in COLUMNS)
    for text, count, gpus, model, partition, constraint in zip(*columns, strict=True):
        if not text or not gpus:
            continue
        if text not in hosts_of:
            try:
                hosts_of[text] = expand(text)
            except ValueError:
                hosts_of[text] = ()
        hosts = hosts_of[text]
        for host in hosts:
            node = nodes[host]
            node.gpus = max(node.gpus, min(math.ceil(gpus / max(len(hosts), count or 1)), _MOST_GPUS))
            node.models[model or ""] += 1
            node.features.update(plain_features(constraint or ""))
            node.partitions.add(partition or "")
    return _grouped(nodes.values()) if nodes else None


def _grouped(nodes: Iterable[_Node]) -> Cluster:
    """Equal nodes as one set. Partitions count only if there are several."""
    nodes = list(nodes)
    every = set().union(*(node.partitions for node in nodes))
    sets: Counter[NodeSet] = Counter()
    for node in nodes:
        model = max(sorted(node.models), key=lambda name: node.models[name])
        partitions = tuple(sorted(node.partitions)) if len(every) > 1 else ()
        sets[NodeSet(1, node.gpus, model, features=frozenset(node.features), partitions=partitions)] += 1
    ordered = sorted(
        sets.items(), key=lambda each: (each[0].gpus, each[0].gpu_model, sorted(each[0].features), each[0].partitions)
    )
    return Cluster(tuple(dataclasses.replace(each, nodes=count) for each, count in ordered))
