"""Requests of jobs as shapes on nodes, and the free GPUs on which they are placed.

Jobs with equal requests share one. A request gets as few nodes as possible (Hu et al., SC'21, 4.2.2). Sets of nodes are
bit masks in an int: bit n is node n. So are the GPUs of a node. A search looks at a handful of masks, whatever the
number of nodes.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from simulator.cluster import Cluster
from simulator.workload import Workload

Allocation = tuple[tuple[int, int], ...]
"""Pairs (node, mask of its GPUs)."""


@dataclass(frozen=True)
class Shape:
    """GPUs asked for, by node: `nodes` nodes with `gpus` each, then `rest_nodes` nodes with `rest` each, which is less.

    allowed: mask of the nodes that may be used.
    """

    allowed: int
    gpus: int
    nodes: int = 1
    rest: int = 0
    rest_nodes: int = 0

    @property
    def is_single(self) -> bool:
        return self.nodes == 1 and not self.rest_nodes


class FreeGpus:
    """Nodes start in service with all GPUs free.

    free: mask of free GPUs, by node. count: their number, by node. by_count: mask of the nodes in service with exactly
    so many free GPUs, by number.
    """

    __slots__ = ("by_count", "count", "free", "from_gpus", "in_service", "lowest", "most")

    def __init__(self, gpus_by_node: Sequence[int]) -> None:
        self.most = max(gpus_by_node)
        self.count = list(gpus_by_node)
        self.free = [(1 << gpus) - 1 for gpus in gpus_by_node]
        self.by_count = [0] * (self.most + 1)
        for node, gpus in enumerate(gpus_by_node):
            self.by_count[gpus] |= 1 << node
        self.in_service = (1 << len(gpus_by_node)) - 1
        # For the engine's short way: the numbers to try from each one on, and lowest_bits as a table for small nodes.
        self.from_gpus = [tuple(range(gpus, self.most + 1)) for gpus in range(self.most + 1)]
        self.lowest = [
            [lowest_bits(mask, min(gpus, mask.bit_count())) for mask in range(1 << min(self.most, 8))]
            for gpus in range(self.most + 1)
        ]

    def find_node(self, gpus: int, allowed: int) -> int:
        """The node with the fewest free GPUs that still holds the job, lowest number first; -1 if none does."""
        for nodes in self.by_count[gpus:]:
            if fitting := nodes & allowed:
                return (fitting & -fitting).bit_length() - 1
        return -1

    def take(self, node: int, gpus: int) -> int:
        """Take the node's lowest free GPUs; their mask."""
        free = self.free[node]
        mask = lowest_bits(free, gpus)
        self._set(node, free ^ mask)
        return mask

    def release(self, node: int, mask: int) -> None:
        self._set(node, self.free[node] | mask)

    def _set(self, node: int, free: int) -> None:
        bit, count = 1 << node, free.bit_count()
        if self.in_service & bit:
            self.by_count[self.count[node]] ^= bit
            self.by_count[count] |= bit
        self.free[node], self.count[node] = free, count

    def remove(self, node: int) -> None:
        """Put a node out of service: no search finds it. Its GPUs are still released."""
        bit = 1 << node
        if self.in_service & bit:
            self.in_service ^= bit
            self.by_count[self.count[node]] ^= bit

    def restore(self, node: int) -> None:
        bit = 1 << node
        if not self.in_service & bit:
            self.in_service |= bit
            self.by_count[self.count[node]] |= bit


def nodes_by_count(count: Sequence[int], nodes: int) -> list[int]:
    """Masks of these nodes with exactly so many free GPUs, by number."""
    by_count = [0] * (max(count) + 1)
    while nodes:
        bit = nodes & -nodes
        nodes ^= bit
        by_count[count[bit.bit_length() - 1]] |= bit
    return by_count


def find(by_count: Sequence[int], shapes: Sequence[Shape]) -> list[tuple[int, int]] | None:
    """Pairs (node, number of GPUs) for the first shape that fits; None if none does.

    by_count: as nodes_by_count. Each node is chosen as in FreeGpus.find_node.
    """
    for shape in shapes:
        if chosen := _choose(by_count, shape):
            return chosen
    return None


def _choose(by_count: Sequence[int], shape: Shape) -> list[tuple[int, int]] | None:
    allowed = shape.allowed
    if shape.nodes == 1 and not shape.rest_nodes:  # most jobs
        for nodes in by_count[shape.gpus :]:
            if fitting := nodes & allowed:
                return [((fitting & -fitting).bit_length() - 1, shape.gpus)]
        return None
    chosen: list[tuple[int, int]] = []
    for gpus, needed in ((shape.gpus, shape.nodes), (shape.rest, shape.rest_nodes)):
        if not needed:
            break
        for nodes in by_count[gpus:]:
            fitting = nodes & allowed
            while fitting and needed:
                bit = fitting & -fitting
                fitting ^= bit
                allowed ^= bit
                needed -= 1
                chosen.append((bit.bit_length() - 1, gpus))
        if needed:
            return None
    return chosen


@lru_cache(maxsize=1 << 16)
def lowest_bits(mask: int, number: int) -> int:
    """The mask of its lowest set bits."""
    taken = 0
    for _ in range(number):
        bit = mask & -mask
        taken |= bit
        mask ^= bit
    return taken


_FEATURE = re.compile(r"[\w.:-]+")


@dataclass
class QueuedRequest:
    """A request that jobs share, and the nodes that can hold it.

    queue: number of its queue. shapes: in the order in which they are tried; () if no node can hold the job. gpus: GPUs
    of a job on one node of one shape, which the engine places by a shorter way; else 0. allowed: mask of that shape.
    """

    queue: int
    asked: _JobNeeds
    shapes: tuple[Shape, ...] = ()
    gpus: int = 0
    allowed: int = 0

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        self.shapes = shapes
        is_short = len(shapes) == 1 and shapes[0].is_single
        self.gpus, self.allowed = (shapes[0].gpus, shapes[0].allowed) if is_short else (0, 0)


@dataclass(frozen=True)
class _JobNeeds:
    partition: str
    constraint: str
    gpus: int
    nodes: int
    is_exclusive: bool


@dataclass
class Requests:
    """The distinct requests of all jobs. of_job: number of each job's request. queue_nodes: mask of each queue's nodes.

    A partition that the cluster names has a queue of its own; the other jobs share the first one.
    """

    cluster: Cluster
    distinct: list[QueuedRequest] = field(default_factory=list)
    of_job: list[int] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    nodes_of: dict[str, int] = field(default_factory=dict)

    @property
    def queue_nodes(self) -> list[int]:
        return [self.nodes_of[name] for name in self.queues]

    def potential(self, partition: str) -> int:
        """Mask of the nodes that the partition may ever have."""
        return _partition_nodes(self.cluster, partition)

    def resize(self, partition: str, nodes: int) -> None:
        """The partition has the nodes of this mask from now on."""
        self.nodes_of[partition] = nodes
        for request in self.distinct:
            if self.queues[request.queue] == partition:
                request.set_shapes(_shapes(self.cluster, request.asked, nodes))


def make_requests(workload: Workload, cluster: Cluster) -> Requests:
    named = sorted({name for each in cluster.node_sets for name in each.partitions} | set(cluster.sizes))
    made = Requests(cluster, queues=["", *named])
    made.nodes_of = {name: _partition_nodes(cluster, name) for name in made.queues}
    numbers: dict[tuple[Any, ...], int] = {}
    columns = [workload.array(name).tolist() for name in _COLUMNS]
    for row in zip(*columns, strict=True):
        number = numbers.get(row)
        if number is None:
            number = numbers[row] = len(made.distinct)
            made.distinct.append(_request(made, _JobNeeds(*row)))
        made.of_job.append(number)
    return made


def _request(made: Requests, asked: _JobNeeds) -> QueuedRequest:
    queue = made.queues.index(asked.partition) if asked.partition in made.nodes_of else 0
    request = QueuedRequest(queue, asked)
    request.set_shapes(_shapes(made.cluster, asked, made.nodes_of[made.queues[queue]]))
    return request


_COLUMNS = ("partition", "constraint", "gpu_count", "node_count", "is_exclusive")


def can_ever_fit(request: QueuedRequest, cluster: Cluster) -> bool:
    """Return True if the job fits in the empty cluster, on the nodes that its partition may ever hold."""
    nodes = _reachable(cluster, request)
    empty = nodes_by_count(cluster.gpus_by_node(), (1 << cluster.node_count) - 1)
    return find(empty, _shapes(cluster, request.asked, nodes)) is not None


def _reachable(cluster: Cluster, request: QueuedRequest) -> int:
    partition = request.asked.partition
    if partition not in cluster.sizes:
        return _partition_nodes(cluster, partition)
    most, nodes = max(each.nodes for each in cluster.sizes[partition]), _partition_nodes(cluster, partition)
    kept = 0
    while nodes and kept.bit_count() < most:
        kept |= nodes & -nodes
        nodes &= nodes - 1
    return kept


def _partition_nodes(cluster: Cluster, partition: str) -> int:
    """Mask of the nodes that may belong to the partition; "" is every partition that no node set names."""
    mask, first = 0, 0
    for each in cluster.node_sets:
        if not each.partitions or partition in each.partitions:
            mask |= ((1 << each.nodes) - 1) << first
        first += each.nodes
    return mask


def _shapes(cluster: Cluster, asked: _JobNeeds, nodes: int) -> tuple[Shape, ...]:
    """The one with the fewest nodes first."""
    wanted = {name for name in asked.constraint.split("&") if name}
    masks: dict[int, int] = {}
    first = 0
    for each in cluster.node_sets:
        if wanted <= each.features:
            masks[each.gpus] = masks.get(each.gpus, 0) | (((1 << each.nodes) - 1) << first) & nodes
        first += each.nodes
    found = []
    for gpus in sorted((size for size, mask in masks.items() if mask), reverse=True):
        larger = sum(mask for size, mask in masks.items() if size >= gpus)
        shape = _shape(asked, gpus, masks[gpus] if asked.is_exclusive else larger)
        # A job that fits on one node of this size also fits on one of the larger ones: one search covers them.
        if shape is not None and not asked.is_exclusive and shape.is_single:
            held = sum(mask for size, mask in masks.items() if size >= shape.gpus)
            shape = Shape(held, shape.gpus)
        if shape is not None and shape not in found:
            found.append(shape)
    return tuple(sorted(found, key=lambda shape: shape.nodes + shape.rest_nodes))


def _shape(asked: _JobNeeds, size: int, allowed: int) -> Shape | None:
    """On nodes with `size` GPUs; None where one node would have to give more."""
    if asked.nodes:
        each, left = divmod(asked.gpus, asked.nodes)
        most = each + bool(left)
        if most > size or (each == 0 and not asked.is_exclusive):
            return None
        if asked.is_exclusive:
            return Shape(allowed, size, asked.nodes)
        return Shape(allowed, most, left, each, asked.nodes - left) if left else Shape(allowed, each, asked.nodes)
    nodes, rest = divmod(asked.gpus, size)
    if asked.is_exclusive:
        return Shape(allowed, size, nodes + bool(rest))
    if not nodes:
        return Shape(allowed, asked.gpus)
    return Shape(allowed, size, nodes, rest, 1 if rest else 0)


def plain_features(constraint: str) -> tuple[str, ...]:
    """Features that every node of a job must have: those of "a&b". Alternatives, counts, and negations are left out."""
    parts = (part.strip() for part in constraint.split("&"))
    return tuple(part for part in parts if _FEATURE.fullmatch(part))


def keep_known_features(workload: Workload, cluster: Cluster) -> tuple[Workload, Mapping[str, int]]:
    """The workload without features that no node set has, and the number of jobs by dropped text.

    A trace can come from another cluster than the simulated one: an unknown feature would hold up a job forever.
    """
    known = frozenset[str]().union(*(each.features for each in cluster.node_sets))
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for text, count in workload.jobs["constraint"].value_counts().items():
        features = [name for name in plain_features(str(text)) if name in known]
        kept[str(text)] = "&".join(features)
        if len(features) < len([part for part in str(text).split("&") if part]):
            dropped[str(text)] += int(count)
    if not dropped:
        return workload, {}
    jobs = workload.jobs.assign(constraint=workload.jobs["constraint"].map(kept))
    return dataclasses.replace(workload, jobs=jobs), dropped
