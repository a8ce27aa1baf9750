"""Which GPUs a job may share: the topology rule of packing (Gimbal, section 5.1), and the choice among what it allows.

The rule, for a whole placement:
- a GPU holds at most two workers;
- a job is on the fewest nodes that could hold it if the cluster were empty;
- two jobs of one size share all of their GPUs or none;
- a job shares GPUs with at most one larger job, and then with no other job.

So the jobs that share GPUs form sets: stars around their largest job. A change in one set never reaches another one,
and no job links two larger ones (a cascade).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

Gpus = frozenset[int]
Placed = Mapping[int, Gpus]
"""A job's number to the numbers of its GPUs."""
Gain = Callable[[int], float | None]
"""What a job gains from sharing with this one, the more the better; None if the two must not share."""


@dataclass(frozen=True)
class PackingNodes:
    """node_of: the node of each GPU, by the GPU's number."""

    node_of: tuple[int, ...]

    @staticmethod
    def uniform(gpus: int, gpus_per_node: int) -> PackingNodes:
        """Nodes of equal size; the last one is smaller if the numbers do not divide."""
        return PackingNodes(tuple(gpu // gpus_per_node for gpu in range(gpus)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of each node, most first."""
        return tuple(sorted((self.node_of.count(node) for node in set(self.node_of)), reverse=True))

    def fewest(self, count: int) -> int | None:
        """The fewest nodes with this many GPUs; None if the cluster has fewer."""
        reached = 0
        for nodes, size in enumerate(self.sizes, 1):
            reached += size
            if reached >= count:
                return nodes
        return None


@dataclass(frozen=True)
class GpuChoice:
    """GPUs for a job, and the jobs it would share them with, none if it is alone."""

    gpus: Gpus
    shared_with: frozenset[int] = frozenset()


def find_refusal(gpus: Gpus, placed: Placed, nodes: PackingNodes) -> str | None:
    """Why a new job must not take these GPUs; None if it may. placed must follow the rule itself."""
    if not gpus or not all(0 <= gpu < len(nodes.node_of) for gpu in gpus):
        return "no such GPUs"
    if len({nodes.node_of[gpu] for gpu in gpus}) != nodes.fewest(len(gpus)):
        return "on more nodes than needed"
    view = _View(placed, nodes)
    if any(len(view.jobs_on[gpu]) > 1 for gpu in gpus):
        return "a GPU has two workers already"
    touched = {job for gpu in gpus for job in view.jobs_on[gpu]}
    return _find_cascade(gpus, touched, view)


def _find_cascade(gpus: Gpus, touched: set[int], view: _View) -> str | None:
    """See find_refusal, for the jobs that share some of the GPUs."""
    largest = max((len(view.placed[job]) for job in touched), default=0)
    if largest < len(gpus):
        linked = any(view.partners[job] for job in touched)
        return "a smaller job would share with two larger ones" if linked else None
    if len(touched) > 1:
        return "would link two jobs"
    (job,) = touched
    if largest == len(gpus):
        return None if view.placed[job] == gpus else "jobs of one size must share all GPUs"
    return None if view.is_host(job) else "would share with a job that shares with a larger one"


def choose_gpus(count: int, placed: Placed, nodes: PackingNodes, gain: Gain) -> GpuChoice | None:
    """GPUs for a new job: free ones where they suffice, else shared ones of the largest gain; None if none is allowed.

    Finds a choice whenever the rule and `gain` allow one. A job that shares with several counts the least of its gains.
    """
    needed = nodes.fewest(count) if count > 0 else None
    if needed is None:
        return None
    view = _View(placed, nodes)
    pick = _Pick(count, needed, nodes.node_of)
    if free := pick.best(dict.fromkeys(view.free, 0.0)):
        return GpuChoice(free)
    best: tuple[float, GpuChoice] | None = None
    for value, choice in _shared_choices(pick, view, gain):
        if best is None or value > best[0]:
            best = value, choice
    return best[1] if best else None


def _shared_choices(pick: _Pick, view: _View, gain: Gain) -> Iterator[tuple[float, GpuChoice]]:
    """Choices with their gains: the GPUs of an equal job, of one larger job, and of smaller jobs."""
    free = dict.fromkeys(view.free, float("inf"))
    under: dict[int, float] = {}
    for job, gpus in view.placed.items():
        partners = view.partners[job]
        if (partners and len(gpus) <= pick.count) or not view.is_host(job):
            continue
        value = gain(job)
        if value is None:
            continue
        if len(gpus) == pick.count:
            yield value, GpuChoice(gpus, frozenset((job,)))
        elif len(gpus) < pick.count:
            under.update(dict.fromkeys(gpus, value))
        else:
            own = {gpu: value for gpu in gpus if len(view.jobs_on[gpu]) == 1}
            if own and (found := pick.best(own) or pick.best({**free, **own})):
                yield value, view.choice(found)
    if under and (found := pick.best({**free, **under})):
        yield min(under.get(gpu, float("inf")) for gpu in found), view.choice(found)


@dataclass(frozen=True)
class _Pick:
    """A choice of `count` GPUs on exactly `nodes` nodes, the fewest possible."""

    count: int
    nodes: int
    node_of: Sequence[int]

    def best(self, values: Mapping[int, float]) -> Gpus | None:
        """GPUs whose least value is the largest, on nodes that have enough of them; None if there are too few.

        On one node: of equal ones, the fullest one, so that free nodes stay whole.
        """
        if len(values) < self.count:
            return None
        by_node: dict[int, list[int]] = {}
        for gpu in sorted(values, key=lambda gpu: (-values[gpu], gpu)):
            by_node.setdefault(self.node_of[gpu], []).append(gpu)
        if self.nodes > 1:
            return self._best_of_several(values, [by_node[node] for node in sorted(by_node)])
        fitting = [(node, gpus) for node, gpus in by_node.items() if len(gpus) >= self.count]
        if not fitting:
            return None
        _, found = min(fitting, key=lambda item: (-values[item[1][self.count - 1]], len(item[1]), item[0]))
        return frozenset(found[: self.count])

    def _best_of_several(self, values: Mapping[int, float], by_node: Sequence[Sequence[int]]) -> Gpus | None:
        """by_node: the GPUs of each node. Lowers the least value until the fullest nodes have enough of them."""
        for least in sorted(set(values.values()), reverse=True):
            good = [[gpu for gpu in gpus if values[gpu] >= least] for gpus in by_node]
            pool = list(chain(*sorted(good, key=len, reverse=True)[: self.nodes]))
            if len(pool) >= self.count:
                return frozenset(sorted(pool, key=lambda gpu: (-values[gpu], gpu))[: self.count])
        return None


class _View:
    """A placement by GPU: jobs_on each GPU, partners of each job, and free GPUs."""

    def __init__(self, placed: Placed, nodes: PackingNodes) -> None:
        self.placed = placed
        self.jobs_on: list[list[int]] = [[] for _ in nodes.node_of]
        for job, gpus in placed.items():
            for gpu in gpus:
                self.jobs_on[gpu].append(job)
        self.free = [gpu for gpu, jobs in enumerate(self.jobs_on) if not jobs]
        self.partners: dict[int, set[int]] = {job: set() for job in placed}
        for jobs in self.jobs_on:
            if len(jobs) == 2:
                self.partners[jobs[0]].add(jobs[1])
                self.partners[jobs[1]].add(jobs[0])

    def is_host(self, job: int) -> bool:
        """Whether all jobs that share with this one are smaller; true if none does."""
        size = len(self.placed[job])
        return all(len(self.placed[other]) < size for other in self.partners[job])

    def choice(self, gpus: Gpus) -> GpuChoice:
        """The GPUs with the jobs on them."""
        return GpuChoice(gpus, frozenset(job for gpu in gpus for job in self.jobs_on[gpu]))
