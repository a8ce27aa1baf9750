"""Free GPUs of every node, and the consolidated choice of nodes (helios-qssf-ces, 4.2.2: as few nodes as possible).

Sets of nodes are bit masks in an int: bit n is node n. So are the GPUs of a node. A search looks at a handful of masks,
whatever the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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

    def find(self, shape: Shape) -> list[tuple[int, int]] | None:
        """Pairs (node, number of GPUs), or None where the job does not fit. Each node is chosen as in find_node."""
        return choose(self.by_count, shape)

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


def choose(by_count: Sequence[int], shape: Shape) -> list[tuple[int, int]] | None:
    """As FreeGpus.find, on masks of the nodes with exactly so many free GPUs, by number."""
    chosen: list[tuple[int, int]] = []
    taken = 0
    for gpus, needed in ((shape.gpus, shape.nodes), (shape.rest, shape.nodes + shape.rest_nodes)):
        for nodes in by_count[gpus:]:
            fitting = nodes & shape.allowed & ~taken
            while fitting and len(chosen) < needed:
                bit = fitting & -fitting
                fitting ^= bit
                taken |= bit
                chosen.append((bit.bit_length() - 1, gpus))
        if len(chosen) < needed:
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
