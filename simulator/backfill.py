"""Queues in which a job may start before its turn: whatever fits, or what delays no reserved start.

EASY (Lifka 1995) reserves for the first job that waits; conservative.py reserves for all. A reserved start holds as far
as expected run times do. A job that outruns its expected run time is expected to take twice as long, again and again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter

from simulator.policies.base import JOB_MASK
from simulator.requests import Shape, find, nodes_by_count
from simulator.simulation import Simulation

_NEVER_S = 1 << 62
_CHUNK = 256
_LAST = itemgetter(-1)


class WaitingJobs:
    """Waiting jobs with one request in order, which finds short ones fast.

    expected_s: expected run time by job number. Entries lie in sorted chunks. least_s: of each chunk, no more than the
    least expected run time.
    """

    __slots__ = ("_chunks", "_expected_s", "_least_s")

    def __init__(self, expected_s: Sequence[int]) -> None:
        self._expected_s = expected_s
        self._chunks: list[list[int]] = []
        self._least_s: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._chunks)

    @property
    def first(self) -> int:
        return self._chunks[0][0]

    def add(self, entry: int) -> None:
        expected_s = self._expected_s[entry & JOB_MASK]
        if not self._chunks:
            self._chunks, self._least_s = [[entry]], [expected_s]
            return
        number = min(bisect_left(self._chunks, entry, key=_LAST), len(self._chunks) - 1)
        chunk, least_s = self._chunks[number], min(self._least_s[number], expected_s)
        insort(chunk, entry)
        self._least_s[number] = least_s
        if len(chunk) > 2 * _CHUNK:
            self._chunks[number : number + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self._least_s.insert(number, least_s)

    def remove(self, entry: int) -> None:
        number = bisect_left(self._chunks, entry, key=_LAST)
        chunk = self._chunks[number]
        del chunk[bisect_left(chunk, entry)]
        if not chunk:
            del self._chunks[number], self._least_s[number]

    def first_within(self, most_s: int) -> int | None:
        """The first entry that is expected to run at most most_s seconds."""
        for number, least_s in enumerate(self._least_s):
            if least_s <= most_s:
                for entry in self._chunks[number]:
                    if self._expected_s[entry & JOB_MASK] <= most_s:
                        return entry
                self._least_s[number] = min(self._expected_s[entry & JOB_MASK] for entry in self._chunks[number])
        return None


@dataclass
class BackfillReservation:
    """The start of the first waiting job, in seconds. spare: GPUs that it leaves free then, by node that it takes."""

    start_s: int
    spare: dict[int, int]


@dataclass
class Pool:
    """Queues that share nodes. waiting: by number of the request, none of them empty.

    head: the first entry, which did not fit in the last pass. new: entries behind it since then.
    reservation: of the head; None until a job behind it fits.
    """

    nodes: int
    waiting: dict[int, WaitingJobs] = field(default_factory=dict)
    head: int | None = None
    new: list[int] = field(default_factory=list)
    reservation: BackfillReservation | None = None
    is_changed: bool = True

    def first(self) -> int:
        return min(jobs.first for jobs in self.waiting.values())


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


class Skip:
    """Whatever fits starts, in the order of the queue: a large job can wait for ever."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        requests = simulation.requests
        self._request, self._number = requests.distinct, requests.of_job
        self._pools, self._pool_of_queue = make_pools([requests.potential(name) for name in requests.queues])

    def __bool__(self) -> bool:
        return any(pool.waiting for pool in self._pools)

    def _pool(self, number: int) -> Pool:
        return self._pools[self._pool_of_queue[self._request[number].queue]]

    def add(self, job: int, entry: int) -> None:
        number = self._number[job]
        pool = self._pool(number)
        jobs = pool.waiting.get(number)
        if jobs is None:
            jobs = pool.waiting[number] = WaitingJobs(self._of.expected_s)
        jobs.add(entry)
        if pool.head is not None and entry > pool.head:
            pool.new.append(entry)
        else:
            pool.is_changed = True

    def _remove(self, pool: Pool, entry: int) -> None:
        number = self._number[entry & JOB_MASK]
        jobs = pool.waiting[number]
        jobs.remove(entry)
        if not jobs:
            del pool.waiting[number]

    def discard(self, job: int, entry: int) -> None:
        pool = self._pool(self._number[job])
        self._remove(pool, entry)
        pool.is_changed = True

    def waiting(self) -> list[int]:
        return sorted(entry for pool in self._pools for jobs in pool.waiting.values() for entry in jobs)

    def reorder(self) -> None:
        jobs = [entry & JOB_MASK for entry in self.waiting()]
        for pool in self._pools:
            pool.waiting, pool.is_changed = {}, True
        for job in jobs:
            self.add(job, self._of.entries[job])

    def resized(self) -> None:
        for pool in self._pools:
            pool.is_changed = True

    def start_jobs(self, freed: int) -> None:
        running = self._of.running
        is_overdue = bool(running) and self._of.renew_overdue()
        for pool in self._pools:
            if pool.waiting:
                if is_overdue or pool.is_changed or freed & pool.nodes:
                    pool.head = None if pool.is_changed else pool.head
                    pool.new, pool.reservation, pool.is_changed = [], None, False
                    self._pass(pool)
                elif pool.new:
                    self._try_new(pool)

    def _pass(self, pool: Pool) -> None:
        """Once a job does not fit, no other with its request does: GPUs are only taken."""
        ready = sorted((jobs.first, number) for number, jobs in pool.waiting.items())
        while ready:
            entry, number = heappop(ready)
            if self._of.try_start(entry & JOB_MASK):
                self._remove(pool, entry)
                if number in pool.waiting:
                    heappush(ready, (pool.waiting[number].first, number))
        if pool.waiting:
            self._of.changes.wake_for(pool.first() & JOB_MASK)

    def _try_new(self, pool: Pool) -> None:
        """Start what can of pool.new. Only these jobs can start: nothing else changed but the time."""


class Easy(Skip):
    """The first job that does not fit gets a reservation: the earliest time at which it fits, and its nodes then.

    The reservation stands until a job ends or outruns its expected run time, a node changes, or a job arrives that goes
    before. A job behind it starts if it fits now and is expected to end by the reserved time, or leaves the reserved
    GPUs free at that time.
    """

    def _pass(self, pool: Pool) -> None:
        entry = pool.head
        while pool.waiting:
            entry = pool.first() if entry is None else entry
            if not self._of.try_start(entry & JOB_MASK):
                pool.head = entry
                self._of.changes.wake_for(entry & JOB_MASK)
                self._backfill(pool)
                return
            self._remove(pool, entry)
            entry = None
        pool.head = None

    def _backfill(self, pool: Pool) -> None:
        """One look at the waiting jobs in order. What does not fit once does not fit later: GPUs are only taken."""
        ready = sorted((jobs.first, number) for number, jobs in pool.waiting.items())
        is_short = set[int]()  # requests with which only short jobs can start
        while ready:
            entry, number = heappop(ready)
            chosen = find(self._of.free.by_count, self._request[number].shapes)
            if not chosen:
                continue
            reservation = self._reserved(pool)
            if not self._start(pool, reservation, entry, chosen):
                is_short.add(number)
            if (jobs := pool.waiting.get(number)) is not None:
                most_s = reservation.start_s - self._of.now_s
                following = jobs.first_within(most_s) if number in is_short else jobs.first
                if following is not None:
                    heappush(ready, (following, number))

    def _try_new(self, pool: Pool) -> None:
        new, pool.new = sorted(pool.new), []
        for entry in new:
            chosen = find(self._of.free.by_count, self._request[self._number[entry & JOB_MASK]].shapes)
            if chosen:
                self._start(pool, self._reserved(pool), entry, chosen)

    def _start(self, pool: Pool, reservation: BackfillReservation, entry: int, chosen: list[tuple[int, int]]) -> bool:
        """Start a job that fits now, unless it would delay the reserved start. chosen: its nodes if it is short."""
        job, spare = entry & JOB_MASK, reservation.spare
        if self._of.now_s + self._of.expected_s[job] > reservation.start_s:
            left = find(self._by_count_left(spare), self._of.request[job].shapes)
            if not left:
                return False
            chosen = left
            for node, gpus in left:
                if node in spare:
                    spare[node] -= gpus
        self._of.start(job, chosen)
        self._remove(pool, entry)
        return True

    def _by_count_left(self, spare: dict[int, int]) -> list[int]:
        """Nodes by the number of GPUs that a job may take now and keep beyond the reserved start."""
        free = self._of.free
        by_count = list(free.by_count)
        for node, gpus in spare.items():
            if free.in_service >> node & 1:
                by_count[free.count[node]] ^= 1 << node
                by_count[min(gpus, free.count[node])] |= 1 << node
        return by_count

    def _reserved(self, pool: Pool) -> BackfillReservation:
        if pool.reservation is None:
            pool.reservation = self._reserve(self._of.request[(pool.head or 0) & JOB_MASK].shapes)
        return pool.reservation

    def _reserve(self, shapes: tuple[Shape, ...]) -> BackfillReservation:
        """The earliest time at which the shapes fit as running jobs end, _NEVER_S if not even after the last."""
        simulation, free = self._of, self._of.free
        node_of, mask_of, count = simulation.node_of, simulation.mask_of, list(free.count)
        least = min((shape.rest or shape.gpus for shape in shapes), default=0)
        needed = min((shape.nodes + shape.rest_nodes for shape in shapes), default=0)
        able = sum(free.by_count[least:])

        def fitting() -> list[tuple[int, int]] | None:
            nodes = able & free.in_service
            return find(nodes_by_count(count, nodes), shapes) if nodes.bit_count() >= needed else None

        last, changed = 0, _NEVER_S << 32  # entries up to `changed` end when the last able node changed
        for end in simulation.running or ():
            if end > changed:
                if chosen := fitting():
                    return BackfillReservation(last >> 32, {node: count[node] - gpus for node, gpus in chosen})
                changed = _NEVER_S << 32
            last, job = end, end & JOB_MASK
            node = node_of[job]
            for each, mask in ((node, mask_of[job]),) if node >= 0 else mask_of[job]:
                number = count[each] = count[each] + mask.bit_count()
                if number >= least:
                    able |= 1 << each
                    changed = end | JOB_MASK
        if chosen := fitting():
            return BackfillReservation(last >> 32, {node: count[node] - gpus for node, gpus in chosen})
        return BackfillReservation(_NEVER_S, {})
