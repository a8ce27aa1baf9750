"""An event-driven list schedule over a snapshot of the cluster: when could a job of a size start on each type.

At each end of a job, waiting jobs start in the order of priority. The first one of each kind that does not fit reserves
the nodes that are free for it first; a later job starts before it only where it does not delay it, judged by time
limits, as Slurm's backfill does. A probe stands behind all of them and holds nothing.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from advisor.waits.view import PoolNode, QueueView, Span, WaitingJob

DEPTH = 500
"""Waiting jobs that are looked at after each event: Slurm's default of bf_max_job_test."""
HORIZON_S = 14 * 86_400.0
"""A probe that cannot start within this time has no estimate."""
MAX_RESERVATIONS = 20

Pick = Callable[[Span], float]
Kind = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class Probe:
    """A job that is asked about. limit_s: its time limit."""

    gpu_type: str
    gpus: int
    limit_s: float


@dataclass(frozen=True)
class _Need:
    """GPUs on each of so many nodes, of a kind of nodes."""

    per_node: int
    nodes: int
    kind: Kind


@dataclass(frozen=True)
class _Reservation:
    at_s: float
    gpus: Mapping[int, int]
    free_then: Sequence[int]


@dataclass(frozen=True)
class _Waiting:
    need: _Need
    run_s: float
    limit_s: float


@dataclass
class Schedule:
    """The state of one schedule. ends: heap of (end, number, planned end, GPUs by node). planned: by planned end."""

    nodes: Sequence[PoolNode]
    free: list[int]
    waiting: list[_Waiting]
    ends: list[tuple[float, int, float, Mapping[int, int]]] = field(default_factory=list)
    planned: list[tuple[float, int, Mapping[int, int]]] = field(default_factory=list)
    now_s: float = 0.0
    number: int = 0
    places: dict[Kind, list[int]] = field(default_factory=dict)

    def start(self, gpus: Mapping[int, int], run_s: float, limit_s: float) -> None:
        """A job that takes GPUs now."""
        for node, count in gpus.items():
            self.free[node] -= count
        self.number += 1
        planned_s = self.now_s + max(limit_s, run_s)
        heapq.heappush(self.ends, (self.now_s + run_s, self.number, planned_s, gpus))
        bisect.insort(self.planned, (planned_s, self.number, gpus))

    def of_kind(self, kind: Kind) -> list[int]:
        """Indices of the nodes that a kind of job can use."""
        if kind not in self.places:
            types, partitions = kind
            self.places[kind] = [
                index
                for index, node in enumerate(self.nodes)
                if (not types or node.gpu_type in types) and (not partitions or node.partitions & partitions)
            ]
        return self.places[kind]

    def fit(self, need: _Need, limit_s: float, held: Sequence[_Reservation]) -> Mapping[int, int] | None:
        """GPUs by node for a need, the fullest nodes first and all of one type; None where it does not fit now."""
        by_type: dict[str, list[int]] = {}
        for index in self.of_kind(need.kind):
            if self.free[index] >= need.per_node and self._leaves(index, need.per_node, limit_s, held):
                by_type.setdefault(self.nodes[index].gpu_type, []).append(index)
        for found in by_type.values():
            if len(found) >= need.nodes:
                chosen = heapq.nsmallest(need.nodes, found, key=lambda index: self.free[index])
                return dict.fromkeys(chosen, need.per_node)
        return None

    def _leaves(self, index: int, gpus: int, limit_s: float, held: Sequence[_Reservation]) -> bool:
        """Whether the node keeps enough for the reservations on it."""
        return all(
            self.now_s + limit_s <= each.at_s or each.free_then[index] - each.gpus.get(index, 0) >= gpus
            for each in held
        )

    def reserve(self, need: _Need) -> _Reservation | None:
        """When and where a need fits first by the planned ends of what runs; None where it never does."""
        free, own = list(self.free), frozenset(self.of_kind(need.kind))
        by_type: dict[str, list[int]] = {}
        fitting = {index for index in own if free[index] >= need.per_node}
        for index in sorted(fitting):
            by_type.setdefault(self.nodes[index].gpu_type, []).append(index)
        for planned_s, _, released in [(self.now_s, 0, {}), *self.planned]:
            for node, count in released.items():
                free[node] += count
                if node in own and node not in fitting and free[node] >= need.per_node:
                    fitting.add(node)
                    by_type.setdefault(self.nodes[node].gpu_type, []).append(node)
            for found in by_type.values():
                if len(found) >= need.nodes:
                    return _Reservation(planned_s, dict.fromkeys(found[-need.nodes :], need.per_node), tuple(free))
        return None

    def pass_over(self) -> list[_Reservation]:
        """Start what can start now; the reservations of what cannot."""
        held: list[_Reservation] = []
        full: set[_Need] = set()
        left: list[_Waiting] = []
        for place, job in enumerate(self.waiting):
            if place >= DEPTH:
                left.extend(self.waiting[place:])
                break
            gpus = None if job.need in full else self.fit(job.need, job.limit_s, held)
            if gpus is not None:
                self.start(gpus, job.run_s, job.limit_s)
                held = [_taken(each, gpus, self.now_s + job.limit_s) for each in held]
                continue
            left.append(job)
            if job.need not in full and len(held) < MAX_RESERVATIONS:
                reservation = self.reserve(job.need)
                held += [reservation] if reservation else []
            full.add(job.need)
        self.waiting = left
        return held

    def advance(self) -> bool:
        """Go to the next end; False where nothing runs any more."""
        if not self.ends:
            return False
        self.now_s = self.ends[0][0]
        while self.ends and self.ends[0][0] <= self.now_s:
            _, number, planned_s, gpus = heapq.heappop(self.ends)
            del self.planned[bisect.bisect_left(self.planned, (planned_s, number))]
            for node, count in gpus.items():
                self.free[node] += count
        return True


def _taken(held: _Reservation, gpus: Mapping[int, int], until_s: float) -> _Reservation:
    """The reservation after another job has started that ends after it begins."""
    if until_s <= held.at_s:
        return held
    free = list(held.free_then)
    for node, count in gpus.items():
        free[node] -= count
    return _Reservation(held.at_s, held.gpus, tuple(free))


def first_starts(
    view: QueueView, waiting: Sequence[WaitingJob], probes: Collection[Probe], pick: Pick
) -> dict[Probe, float]:
    """Seconds until each probe could start; a probe that finds no place within HORIZON_S is left out.

    pick: the part of a Span that counts as the run time. Deterministic.
    """
    state = _initial(view, waiting, pick)
    open_probes = {probe: need for probe in probes if (need := _probe_need(view.nodes, probe))}
    found: dict[Probe, float] = {}
    while open_probes and state.now_s <= HORIZON_S:
        held = state.pass_over()
        for probe, need in list(open_probes.items()):
            if state.fit(need, probe.limit_s, held) is not None:
                found[probe] = state.now_s
                del open_probes[probe]
        if not state.advance():
            break
    return found


def _initial(view: QueueView, waiting: Sequence[WaitingJob], pick: Pick) -> Schedule:
    state = Schedule(view.nodes, [node.gpus for node in view.nodes], [])
    for running in view.running:
        left_s = pick(running.left)
        state.start(running.gpus, left_s, running.limit_s if running.limit_s is not None else math.inf)
    for job in waiting:
        run_s = pick(job.run)
        need = _Need(-(-job.gpus // max(job.nodes, 1)), max(job.nodes, 1), (job.types, job.partitions))
        each = _Waiting(need, run_s, max(job.limit_s if job.limit_s is not None else math.inf, run_s))
        state.waiting.extend([each] * min(job.count, DEPTH))
    return state


def _probe_need(nodes: Sequence[PoolNode], probe: Probe) -> _Need | None:
    """The fewest nodes of the type that hold the GPUs; None where the type has too few."""
    own = [node.gpus for node in nodes if node.gpu_type == probe.gpu_type]
    if not own or sum(own) < probe.gpus:
        return None
    count = -(-probe.gpus // max(own))
    return _Need(-(-probe.gpus // count), count, (frozenset({probe.gpu_type}), frozenset()))
