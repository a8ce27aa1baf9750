"""Backfill: jobs start before their turn if that delays no reserved start, as far as expected run times hold.

EASY (Lifka 1995) reserves for the first job that waits, conservative backfill (Mu'alem and Feitelson 2001) for all. A
job that outruns its expected run time is expected to take twice as long, again and again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

import numpy as np
import numpy.typing as npt

from simulator.free_gpus import Shape, choose
from simulator.requests import Request
from simulator.simulation import Simulation
from simulator.waiting import JOB_MASK, WaitingJobs


@dataclass
class Reservation:
    """start_s: when the first waiting job can start. spare: GPUs that it leaves free then, by node that it takes.

    nodes: their mask. spare_now: masks of these nodes by the number of GPUs that a job may take until after start_s.
    """

    entry: int
    start_s: int
    spare: dict[int, int]
    nodes: int
    spare_now: list[int]


@dataclass
class Pool:
    """Queues that share nodes. waiting: by request number. new: entries since the last pass."""

    nodes: int
    waiting: dict[int, WaitingJobs] = field(default_factory=dict)
    reservation: Reservation | None = None
    is_changed: bool = True
    new: list[int] = field(default_factory=list)


def make_pools(queue_nodes: list[int]) -> tuple[list[Pool], list[int]]:
    """Pools, and the number of each queue's. Queues that share a node share a pool."""
    pools: list[int] = []
    for nodes in queue_nodes:
        overlapping = [mask for mask in pools if mask & nodes]
        pools = [mask for mask in pools if not mask & nodes]
        # Pools never overlap, so their sum is their union.
        pools.append(nodes | sum(overlapping))
    numbers = [next((number for number, mask in enumerate(pools) if mask & nodes), 0) for nodes in queue_nodes]
    return [Pool(mask) for mask in pools], numbers


class Easy:
    """The first job that does not fit gets a reservation: the earliest time at which it fits, and its nodes then.

    The reservation stands until a job ends or outruns its expected run time, a node changes, or a job arrives that goes
    before. A job behind it starts if it fits now and is expected to end by the reserved time, or leaves the reserved
    GPUs free at that time.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self._number = simulation.requests.of_job
        self._distinct = simulation.requests.distinct
        self._pools, self._pool_of_queue = make_pools(
            [simulation.requests.potential(name) for name in simulation.requests.queues]
        )

    def __bool__(self) -> bool:
        return any(jobs for pool in self._pools for jobs in pool.waiting.values())

    def _pool(self, job: int) -> Pool:
        return self._pools[self._pool_of_queue[self._of.request[job].queue]]

    def add(self, job: int, entry: int) -> None:
        pool, number = self._pool(job), self._number[job]
        if number not in pool.waiting:
            pool.waiting[number] = WaitingJobs()
        pool.waiting[number].add(entry, self._of.expected_s[job])
        pool.new.append(entry)

    def discard(self, job: int, entry: int) -> None:
        pool = self._pool(job)
        pool.waiting[self._number[job]].remove(entry)
        pool.is_changed = True

    def waiting(self) -> list[int]:
        return sorted(entry for pool in self._pools for jobs in pool.waiting.values() for entry in jobs)

    def reorder(self) -> None:
        jobs = [entry & JOB_MASK for entry in self.waiting()]
        for pool in self._pools:
            pool.waiting, pool.new, pool.is_changed = {}, [], True
        for job in jobs:
            self.add(job, self._of.entries[job])

    def resized(self) -> None:
        for pool in self._pools:
            pool.is_changed = True

    def start_jobs(self, freed: int) -> None:
        is_overdue = self._of.has_overdue()
        for pool in self._pools:
            if is_overdue or pool.is_changed or freed & pool.nodes:
                self._pass(pool)
            elif pool.new:
                self._try_new(pool)

    def _pass(self, pool: Pool) -> None:
        pool.is_changed = False
        pool.new = []
        pool.reservation = None
        first = self._start_in_order(pool)
        if first < 0:
            return
        pool.reservation = self._reserve(pool, first)
        self._of.power.wake_for(first & JOB_MASK)
        self._backfill(pool)

    def _start_in_order(self, pool: Pool) -> int:
        """Start jobs until one does not fit; its entry, or -1 where none waits."""
        while True:
            number, entry = -1, 0
            for each, jobs in pool.waiting.items():
                if jobs and (number < 0 or jobs.first < entry):
                    number, entry = each, jobs.first
            if number < 0:
                return -1
            if not self._of.try_start(entry & JOB_MASK):
                return entry
            pool.waiting[number].remove(entry)

    def _try_new(self, pool: Pool) -> None:
        """Only these jobs can start: nothing else changed but the time, which lets no other job start."""
        reservation, new = pool.reservation, sorted(pool.new)
        if reservation is None or new[0] < reservation.entry:
            self._pass(pool)
            return
        pool.new = []
        for entry in new:
            job = entry & JOB_MASK
            if self._try(reservation, job):
                pool.waiting[self._number[job]].remove(entry)

    def _reserve(self, pool: Pool, entry: int) -> Reservation | None:
        """The earliest time at which the job fits as running jobs end; None if it does not fit after the last."""
        simulation = self._of
        simulation.renew_overdue()
        free = simulation.free
        shapes = simulation.request[entry & JOB_MASK].shapes
        count, by_count = list(free.count), list(free.by_count)
        in_service, least = free.in_service, min((shape.rest or shape.gpus for shape in shapes), default=0)
        node_of, mask_of = simulation.node_of, simulation.mask_of
        last_s, is_near = -1, False
        for end in simulation.running or ():
            end_s, job = end >> 32, end & JOB_MASK
            if end_s != last_s:
                if is_near and (made := self._reserved(entry, last_s, shapes, count, by_count)):
                    return made
                last_s, is_near = end_s, False
            node = node_of[job]
            held = ((node, mask_of[job]),) if node >= 0 else mask_of[job]
            for each, mask in held:
                bit = 1 << each
                number = count[each] + mask.bit_count()
                if in_service & bit:
                    by_count[count[each]] ^= bit
                    by_count[number] |= bit
                    is_near = is_near or number >= least
                count[each] = number
        return self._reserved(entry, last_s, shapes, count, by_count)

    def _reserved(
        self, entry: int, start_s: int, shapes: tuple[Shape, ...], count: list[int], by_count: list[int]
    ) -> Reservation | None:
        for shape in shapes:
            if chosen := choose(by_count, shape):
                spare = {node: count[node] - gpus for node, gpus in chosen}
                made = Reservation(entry, start_s, spare, sum(1 << node for node in spare), [])
                self._count_spare(made)
                return made
        return None

    def _count_spare(self, reservation: Reservation) -> None:
        free = self._of.free
        reservation.spare_now = [0] * (free.most + 1)
        for node, spare in reservation.spare.items():
            if free.in_service >> node & 1:
                reservation.spare_now[min(spare, free.count[node])] |= 1 << node

    def _backfill(self, pool: Pool) -> None:
        """One look at the waiting jobs in order. What does not fit once does not fit later: GPUs are only taken."""
        reservation = pool.reservation
        ready = {number: jobs for number, jobs in pool.waiting.items() if jobs}
        candidates: dict[int, int] = {}
        while ready:
            for number in list(ready):
                if number not in candidates:
                    entry = self._next(reservation, self._distinct[number], ready[number])
                    if entry is None:
                        del ready[number]
                    else:
                        candidates[number] = entry
            if not candidates:
                return
            number = min(candidates, key=candidates.__getitem__)
            entry = candidates[number]
            if self._try(reservation, entry & JOB_MASK):
                ready[number].remove(entry)
                if not ready[number]:
                    del ready[number]
            # GPUs were taken: whether the others still fit is looked at again.
            candidates = {}

    def _next(self, reservation: Reservation | None, request: Request, jobs: WaitingJobs) -> int | None:
        """The first job with this request that may start now."""
        if not self._find(request, None):
            return None
        if reservation is None or self._find(request, reservation):
            return jobs.first
        return jobs.first_within(reservation.start_s - self._of.now_s)

    def _find(self, request: Request, reservation: Reservation | None) -> list[tuple[int, int]] | None:
        """Where the job fits now; with a reservation, where it may stay beyond the reserved time."""
        by_count = self._of.free.by_count
        if reservation is not None:
            by_count = [
                mask & ~reservation.nodes | spare for mask, spare in zip(by_count, reservation.spare_now, strict=True)
            ]
        for shape in request.shapes:
            if chosen := choose(by_count, shape):
                return chosen
        return None

    def _try(self, reservation: Reservation | None, job: int) -> bool:
        simulation = self._of
        is_short = reservation is None or simulation.now_s + simulation.expected_s[job] <= reservation.start_s
        chosen = self._find(simulation.request[job], None if is_short else reservation)
        if not chosen:
            return False
        simulation.start(job, chosen)
        if reservation is not None:
            if not is_short:
                for node, gpus in chosen:
                    if node in reservation.spare:
                        reservation.spare[node] -= gpus
            self._count_spare(reservation)
        return True


class Conservative(Easy):
    """Each waiting job in turn gets the earliest start at which it fits beside the jobs before it.

    All reservations are made again after each change, as Slurm's sched/backfill does. Only the first DEPTH jobs of each
    pool are looked at (bf_max_job_test in slurm.conf).
    """

    DEPTH = 500

    def _try_new(self, pool: Pool) -> None:
        self._pass(pool)

    def _pass(self, pool: Pool) -> None:
        pool.is_changed, pool.new = False, []
        simulation = self._of
        simulation.renew_overdue()
        profile = Profile(simulation)
        entries = merge(*(jobs for jobs in pool.waiting.values() if jobs))
        for place, entry in enumerate(list(islice(entries, self.DEPTH))):
            job = entry & JOB_MASK
            chosen = profile.reserve(simulation.request[job].shapes, simulation.expected_s[job])
            if chosen:
                simulation.start(job, chosen)
                pool.waiting[self._number[job]].remove(entry)
            elif place == 0:
                simulation.power.wake_for(job)


class Profile:
    """Free GPUs by node over the time to come: row i holds from times_s[i] on, until the next."""

    def __init__(self, simulation: Simulation) -> None:
        free, nodes = simulation.free, len(simulation.free.count)
        is_in_service = np.array([free.in_service >> node & 1 for node in range(nodes)], dtype="int64")
        self._times_s, rows = [simulation.now_s], [np.array(free.count, dtype="int64") * is_in_service]
        for end in simulation.running or ():
            if end >> 32 > self._times_s[-1]:
                self._times_s.append(end >> 32)
                rows.append(rows[-1].copy())
            for node, mask in simulation.allocation(end & JOB_MASK):
                rows[-1][node] += mask.bit_count() * is_in_service[node]
        self._rows = rows

    def reserve(self, shapes: tuple[Shape, ...], expected_s: int) -> list[tuple[int, int]] | None:
        """Take the GPUs from the earliest time at which they are free for so long; where, if that is now."""
        for first, start_s in enumerate(self._times_s):
            last = bisect_left(self._times_s, start_s + expected_s, first + 1)
            least = self._rows[first] if last == first + 1 else np.min(self._rows[first:last], axis=0)
            for shape in shapes:
                if chosen := _choose_least(least, shape):
                    self._take(first, last, start_s + expected_s, chosen)
                    return chosen if first == 0 else None
        return None

    def _take(self, first: int, last: int, end_s: int, chosen: list[tuple[int, int]]) -> None:
        if last == len(self._times_s) or self._times_s[last] > end_s:
            self._times_s.insert(last, end_s)
            self._rows.insert(last, self._rows[last - 1].copy())
        for row in self._rows[first:last]:
            for node, gpus in chosen:
                row[node] -= gpus


def _choose_least(count: npt.NDArray[np.int64], shape: Shape) -> list[tuple[int, int]] | None:
    if (count >= shape.gpus).sum() < shape.nodes:
        return None
    by_count = [0] * (int(count.max()) + 1)
    for node, gpus in enumerate(count.tolist()):
        by_count[gpus] |= 1 << node
    return choose(by_count, shape)
