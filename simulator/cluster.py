"""The simulated cluster: node sets, daily partition sizes, boot delays, and failures; read from TOML."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from almanac.errors import ConfigError, RequestError
from almanac.units import DAY_S, printable


@dataclass(frozen=True)
class NodeGroup:
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
    """The number of nodes that a partition has from from_s on, of those that it may hold."""

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

    node_sets: tuple[NodeGroup, ...]
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


def uniform(nodes: int, gpus: int = 8) -> Cluster:
    """A cluster of equal nodes in which every job may use every node."""
    return Cluster((NodeGroup(nodes, gpus),))


_MOST = {"nodes": 100_000, "gpus": 64, "day": 36_500, "boot_s": DAY_S, "memory_gib": 10_000}
_EXAMPLE = "write, for example, [[node_sets]] with nodes = 64 and gpus = 8"
_TOP, _SET, _SIZE = (
    ("node_sets", "partition_sizes", "boot_s"),
    ("nodes", "gpus", "gpu_model", "memory_gib", "features", "partitions"),
    ("partition", "day", "nodes"),
)


def read_cluster(path: Path) -> Callable[[int], Cluster]:
    """The cluster of a file, once the time of the first submission is known: day 0 starts then.

    Raises ConfigError, which names the key, if the file cannot be read or has wrong values.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8").removeprefix("\ufeff"))
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {printable(said)}", "give a TOML file in UTF-8") from error
    _check_keys(data, _TOP, str(path))
    node_sets = tuple(_node_set(each, f"{path}: {where}") for where, each in _tables(data, "node_sets", path))
    if not node_sets:
        raise ConfigError(f"{path}: has no node set", _EXAMPLE)
    sizes = [_size(each, f"{path}: {where}") for where, each in _tables(data, "partition_sizes", path)]
    boot_s = int(_number(data, "boot_s", str(path), 300, low=0))

    def build(first_s: int) -> Cluster:
        by_partition: defaultdict[str, list[PartitionSize]] = defaultdict(list)
        for partition, day, nodes in sorted(sizes):
            by_partition[partition].append(PartitionSize(first_s + day * DAY_S, nodes))
        return Cluster(node_sets, dict(by_partition), boot_s=boot_s)

    return build


def _tables(data: Mapping[str, Any], key: str, path: Path) -> Sequence[tuple[str, dict[str, Any]]]:
    content = data.get(key, [])
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise ConfigError(f"{path}: {key} must be an array of tables", f"write each one under its own [[{key}]]")
    return [(f"[[{key}]] number {number}", each) for number, each in enumerate(content, 1)]


def _node_set(table: dict[str, Any], where: str) -> NodeGroup:
    _check_keys(table, _SET, where)
    memory_gib = _number(table, "memory_gib", where, 0.0, low=0)
    return NodeGroup(
        nodes=int(_number(table, "nodes", where)),
        gpus=int(_number(table, "gpus", where)),
        gpu_model=_text(table, "gpu_model", where),
        memory_mib=memory_gib * 1024 or None,
        features=frozenset(_texts(table, "features", where)),
        partitions=_texts(table, "partitions", where),
    )


def _size(table: dict[str, Any], where: str) -> tuple[str, int, int]:
    _check_keys(table, _SIZE, where)
    partition = _text(table, "partition", where)
    if not partition:
        raise ConfigError(f"{where}: partition is not set", "name the partition")
    return partition, int(_number(table, "day", where, 0, low=0)), int(_number(table, "nodes", where, low=0))


def _check_keys(table: Mapping[str, Any], valid: Sequence[str], where: str) -> None:
    for key in table:
        if key not in valid:
            raise ConfigError(f"{where}: unknown key {printable(key, 80)!r}", f"use: {', '.join(valid)}")


def _number(table: Mapping[str, Any], key: str, where: str, default: float | None = None, low: float = 1) -> float:
    """A number of the table; whole, but for memory. Raises ConfigError if it is absent or out of its limits."""
    value = table.get(key, default)
    kinds = (int, float) if key == "memory_gib" else (int,)
    if type(value) not in kinds or not low <= value <= _MOST[key]:
        what = "a number" if key == "memory_gib" else "a whole number"
        shown = "not set" if value is None else printable(repr(value), 80)
        raise ConfigError(f"{where}: {key} is {shown}", f"use {what} from {low:g} to {_MOST[key]}")
    return float(value)


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {printable(repr(value), 80)}", "write it as text in quotes")
    return value


def _texts(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{where}: {key} is {printable(repr(value), 80)}", 'write a list, such as ["a", "b"]')
    return tuple(value)
