"""What jobs ask for, as shapes on the nodes that they may use; jobs with equal requests share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.cluster import Cluster
from simulator.free_gpus import FreeGpus, Shape
from simulator.policies.base import Policy
from simulator.workload import Workload


@dataclass
class Request:
    """queue: number of its queue. shapes: in the order in which they are tried; () if no node can hold the job.

    gpus: GPUs of a job on one node of one shape, else 0: the engine's short way. allowed: mask of that shape.
    slice: which part of each GPU, "" for whole GPUs.
    """

    queue: int
    asked: _Asked
    shapes: tuple[Shape, ...] = ()
    slice: str = ""
    gpus: int = 0
    allowed: int = 0

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        self.shapes = shapes
        # Slices are parts of the GPUs of one node; a job on several nodes gets whole GPUs.
        self.slice = self.asked.slice if all(shape.is_single for shape in shapes) else ""
        is_short = len(shapes) == 1 and shapes[0].is_single and not self.slice
        self.gpus, self.allowed = (shapes[0].gpus, shapes[0].allowed) if is_short else (0, 0)


@dataclass(frozen=True)
class _Asked:
    partition: str
    constraint: str
    gpus: int
    nodes: int
    is_exclusive: bool
    slice: str
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass
class Requests:
    """distinct: the distinct requests. of_job: number of each job's. queue_nodes: mask of each queue's nodes.

    A partition that the cluster names has a queue of its own; the other jobs share the first one.
    """

    cluster: Cluster
    distinct: list[Request] = field(default_factory=list)
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


def make_requests(workload: Workload, cluster: Cluster, policy: Policy) -> Requests:
    named = sorted({name for each in cluster.node_sets for name in each.partitions} | set(cluster.sizes))
    made = Requests(cluster, queues=["", *named])
    made.nodes_of = {name: _partition_nodes(cluster, name) for name in made.queues}
    numbers: dict[tuple[Any, ...], int] = {}
    has_groups = type(policy).node_sets is not Policy.node_sets
    columns = [workload.array(name).tolist() for name in _COLUMNS]
    if has_groups:
        columns.append([tuple(tuple(group) for group in policy.node_sets(job)) for job in range(len(workload))])
    for row in zip(*columns, strict=True):
        number = numbers.get(row)
        if number is None:
            number = numbers[row] = len(made.distinct)
            made.distinct.append(_request(made, _Asked(*row), policy))
        made.of_job.append(number)
    return made


def _request(made: Requests, asked: _Asked, policy: Policy) -> Request:
    if asked.slice not in policy.slices:
        # A slice that the policy does not know is a whole GPU.
        asked = dataclasses.replace(asked, slice="")
    queue = made.queues.index(asked.partition) if asked.partition in made.nodes_of else 0
    request = Request(queue, asked)
    request.set_shapes(_shapes(made.cluster, asked, made.nodes_of[made.queues[queue]]))
    return request


_COLUMNS = ("partition", "constraint", "gpu_count", "node_count", "is_exclusive", "slice")


def can_ever_fit(request: Request, cluster: Cluster) -> bool:
    """Whether the job fits in the cluster when nothing else runs, on the nodes that its partition may ever hold."""
    nodes = _reachable(cluster, request)
    empty = FreeGpus(cluster.gpus_by_node())
    return any(empty.find(shape) is not None for shape in _shapes(cluster, request.asked, nodes))


def _reachable(cluster: Cluster, request: Request) -> int:
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


def _shapes(cluster: Cluster, asked: _Asked, nodes: int) -> tuple[Shape, ...]:
    wanted = {name for name in asked.constraint.split("&") if name}
    shapes: list[Shape] = []
    for group in asked.groups or (tuple(range(len(cluster.node_sets))),):
        fitting = [place for place in group if wanted <= cluster.node_sets[place].features]
        shapes += [shape for shape in _on_sizes(cluster, asked, nodes, fitting) if shape not in shapes]
    return tuple(shapes)


def _on_sizes(cluster: Cluster, asked: _Asked, nodes: int, sets: Sequence[int]) -> list[Shape]:
    """Shapes on these node sets, the one with the fewest nodes first."""
    masks: dict[int, int] = {}
    first = 0
    for place, each in enumerate(cluster.node_sets):
        if place in sets:
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
    return sorted(found, key=lambda shape: shape.nodes + shape.rest_nodes)


def _shape(asked: _Asked, size: int, allowed: int) -> Shape | None:
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
