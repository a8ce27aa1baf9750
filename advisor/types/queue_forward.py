"""The wait of a job that is submitted now, by GPU type and number of GPUs, with an interval. Pure.

It is for the choice of a type alone: the waits as such are off (docs/predictors.md), and none is told to anybody.

Three schedules over one snapshot of the cluster: likely, low, and high run times. The high one also counts jobs that
wait for more than resources (a dependency, a limit), and once more what was submitted within the last RECENT_S: as much
may have been submitted since the snapshot, by users who were given the same advice.

Schedules are event-driven. At each end of a job, waiting jobs start in the order of priority. The first one of each
kind that does not fit reserves the nodes that are free for it first; a later job starts before it only if it does not
delay it, judged by time limits, as Slurm's backfill does. A probe stands behind all of them and holds nothing.
"""

from __future__ import annotations

import bisect
import heapq
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from advisor.events import EventLoop
from advisor.types.decide import TypeWait
from advisor.types.queue_view import PoolNode, QueueView, Span, WaitingJob

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
class _GpuNeed:
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
    need: _GpuNeed
    run_s: float
    limit_s: float


class Schedule(EventLoop):
    """One schedule, until all probes could have started. found: when each could. planned: by planned end."""

    def __init__(self, nodes: Sequence[PoolNode], probes: Collection[Probe]) -> None:
        super().__init__()
        self.nodes, self.free = nodes, [node.gpus for node in nodes]
        self.waiting: list[_Waiting] = []
        self.planned: list[tuple[float, int, Mapping[int, int]]] = []
        self.places: dict[Kind, list[int]] = {}
        self.number = 0
        self.found: dict[Probe, float] = {}
        self._probes = {probe: need for probe in probes if (need := _probe_need(nodes, probe))}
        self.at(0.0, lambda: None)

    def start(self, gpus: Mapping[int, int], run_s: float, limit_s: float) -> None:
        """A job that takes GPUs now."""
        for node, count in gpus.items():
            self.free[node] -= count
        self.number += 1
        planned = (self.now_s + max(limit_s, run_s), self.number, gpus)
        bisect.insort(self.planned, planned)
        self.at(self.now_s + run_s, partial(self._end, *planned))

    def _end(self, planned_s: float, number: int, gpus: Mapping[int, int]) -> None:
        del self.planned[bisect.bisect_left(self.planned, (planned_s, number))]
        for node, count in gpus.items():
            self.free[node] += count

    def settle(self) -> None:
        """Start what can start now, and look where each probe could."""
        if not self._probes or self.now_s > HORIZON_S:
            self.stop()
            return
        held = self.pass_over()
        for probe, need in list(self._probes.items()):
            if self.fit(need, probe.limit_s, held) is not None:
                self.found[probe] = self.now_s
                del self._probes[probe]

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

    def fit(self, need: _GpuNeed, limit_s: float, held: Sequence[_Reservation]) -> Mapping[int, int] | None:
        """GPUs by node for a need, the fullest nodes first and all of one type; None if it does not fit now."""
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
        """Return True if the node keeps enough for the reservations on it."""
        return all(
            self.now_s + limit_s <= each.at_s or each.free_then[index] - each.gpus.get(index, 0) >= gpus
            for each in held
        )

    def reserve(self, need: _GpuNeed) -> _Reservation | None:
        """Return when and where a need fits first by the planned ends of running jobs; None if it never does."""
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
        full: set[_GpuNeed] = set()
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
    state = Schedule(view.nodes, probes)
    for running in view.running:
        left_s = pick(running.left)
        state.start(running.gpus, left_s, running.limit_s if running.limit_s is not None else math.inf)
    for job in waiting:
        run_s = pick(job.run)
        need = _GpuNeed(-(-job.gpus // max(job.nodes, 1)), max(job.nodes, 1), (job.types, job.partitions))
        each = _Waiting(need, run_s, max(job.limit_s if job.limit_s is not None else math.inf, run_s))
        state.waiting.extend([each] * min(job.count, DEPTH))
    state.run()
    return state.found


def _probe_need(nodes: Sequence[PoolNode], probe: Probe) -> _GpuNeed | None:
    """The fewest nodes of the type that hold the GPUs; None where the type has too few."""
    own = [node.gpus for node in nodes if node.gpu_type == probe.gpu_type]
    if not own or sum(own) < probe.gpus:
        return None
    count = -(-probe.gpus // max(own))
    return _GpuNeed(-(-probe.gpus // count), count, (frozenset({probe.gpu_type}), frozenset()))


RECENT_S = 600.0
"""Advice of the last 10 minutes counts as queued work."""
DEFAULT_LIMIT_S = 86_400.0
"""Time limit of a probe if no job in the queue has one."""
MAX_SIZE = 4096


def estimate_waits(view: QueueView) -> dict[tuple[str, int], TypeWait]:
    """Waits by type and number of GPUs; sizes that a type cannot hold, or not within two weeks, are left out."""
    limit_s = _typical_limit(view.waiting)
    probes = [Probe(name, size, limit_s) for name in _types(view) for size in sizes(view, name)]
    ready = [job for job in view.waiting if job.is_ready]
    likely = first_starts(view, ready, probes, lambda span: span.likely_s)
    low = first_starts(view, ready, probes, lambda span: span.low_s)
    high = first_starts(
        view, [*view.waiting, *_again(view.waiting, RECENT_S)], probes, lambda span: span.high_s
    )  # fmt: skip
    found = {}
    for probe in probes:
        if probe in likely and probe in high:
            wait_s = likely[probe]
            low_s = min(low.get(probe, wait_s), wait_s)
            wait = TypeWait(probe.gpu_type, wait_s, low_s, max(high[probe], wait_s), view.as_of_s)
            found[probe.gpu_type, probe.gpus] = wait
    return found


def _again(jobs: Iterable[WaitingJob], within_s: float) -> list[WaitingJob]:
    return [replace(job, is_ready=True) for job in jobs if 0 <= job.submitted_s < within_s]


def _types(view: QueueView) -> list[str]:
    return sorted({node.gpu_type for node in view.nodes if node.gpus > 0})


def sizes(view: QueueView, gpu_type: str) -> list[int]:
    """1, 2, 4, ... GPUs up to what the type has in service, and all of it."""
    total = min(sum(node.gpus for node in view.nodes if node.gpu_type == gpu_type), MAX_SIZE)
    found = {1 << power for power in range(total.bit_length())} | {total}
    return sorted(size for size in found if 0 < size <= total)


def _typical_limit(waiting: Sequence[WaitingJob]) -> float:
    limits_s = [job.limit_s for job in waiting if job.limit_s is not None]
    return statistics.median(limits_s) if limits_s else DEFAULT_LIMIT_S
