"""The simulated cluster as data: node sets, partitions with daily sizes, boot delays, and node failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from almanac.errors import RequestError


@dataclass(frozen=True)
class NodeSet:
    """Equal nodes. partitions: names of the partitions that hold them; () stands for all.

    features: what a constraint can ask for, such as hbm80g. memory_mib: of one GPU; None if unknown.
    """

    nodes: int
    gpus: int
    gpu_model: str = ""
    memory_mib: float | None = None
    features: frozenset[str] = frozenset()
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartitionSize:
    """From from_s on, the partition has this many nodes of those that it may hold."""

    from_s: int
    nodes: int


@dataclass(frozen=True)
class NodeFailure:
    """The node is out of service in [down_s, up_s). Its jobs stop and go back to the queue."""

    node: int
    down_s: int
    up_s: int


@dataclass(frozen=True)
class Cluster:
    """Nodes are numbered from 0 in the order of the node sets.

    sizes: partitions whose number of nodes changes, as virtual clusters do from day to day. No node is in two of them.
    boot_s: seconds until a woken node takes jobs. asleep: nodes that sleep at the start.
    """

    node_sets: tuple[NodeSet, ...]
    sizes: Mapping[str, Sequence[PartitionSize]] = field(default_factory=dict)
    failures: tuple[NodeFailure, ...] = ()
    boot_s: int = 300
    asleep: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.node_sets or any(each.nodes < 1 or each.gpus < 1 for each in self.node_sets):
            raise RequestError(
                "the cluster has a node set without nodes or GPUs", "give each node set 1 node and 1 GPU or more"
            )
        outside = [node for node in self.asleep if not 0 <= node < self.node_count]
        outside += [each.node for each in self.failures if not 0 <= each.node < self.node_count]
        if outside:
            raise RequestError(
                f"the cluster has {self.node_count} nodes, and no node {outside[0]}", "number nodes from 0"
            )

    @property
    def node_count(self) -> int:
        return sum(each.nodes for each in self.node_sets)

    @property
    def gpu_count(self) -> int:
        return sum(each.nodes * each.gpus for each in self.node_sets)

    def gpus_by_node(self) -> list[int]:
        return [each.gpus for each in self.node_sets for _ in range(each.nodes)]

    def set_by_node(self) -> list[int]:
        return [place for place, each in enumerate(self.node_sets) for _ in range(each.nodes)]


def uniform(nodes: int, gpus: int = 8) -> Cluster:
    """A cluster of equal nodes in which every job may use every node."""
    return Cluster((NodeSet(nodes, gpus),))
