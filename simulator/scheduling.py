"""Queues that start jobs: in strict order, whatever fits, and (in backfill.py) with reservations."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from simulator.free_gpus import choose, lowest_bits
from simulator.requests import Request
from simulator.simulation import Simulation
from simulator.waiting import JOB_MASK, WaitingJobs


class _Queue:
    __slots__ = ("blocked", "heap", "nodes", "others")

    def __init__(self, nodes: int) -> None:
        self.heap: list[int] = []
        self.nodes = nodes
        self.blocked = False


class Strict:
    """The first job that does not fit blocks those behind it in its queue."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self._gone = simulation.canceled
        self._queues = [_Queue(nodes) for nodes in simulation.requests.queue_nodes]
        self._request = simulation.request

    def __bool__(self) -> bool:
        return any(queue.heap for queue in self._queues)

    def add(self, job: int, entry: int) -> None:
        queue = self._queues[self._request[job].queue]
        heappush(queue.heap, entry)
        if queue.heap[0] == entry:
            queue.blocked = False

    def discard(self, job: int, entry: int) -> None:
        # The entry stays in the heap until it is first; Simulation.canceled says that it is gone.
        self._queues[self._request[job].queue].blocked = False

    def waiting(self) -> list[int]:
        return sorted(entry for queue in self._queues for entry in queue.heap if entry & JOB_MASK not in self._gone)

    def reorder(self) -> None:
        entries = self._of.entries
        for queue in self._queues:
            queue.heap = [entries[entry & JOB_MASK] for entry in queue.heap]
            heapify(queue.heap)
            queue.blocked = False

    def resized(self) -> None:
        for queue, nodes in zip(self._queues, self._of.requests.queue_nodes, strict=True):
            queue.nodes, queue.blocked = nodes, False

    def start_jobs(self, freed: int) -> None:
        queues = self._queues
        if freed:
            for queue in queues:
                if queue.nodes & freed:
                    queue.blocked = False
        while ready := [queue for queue in queues if queue.heap and not queue.blocked]:
            self._start_first(min(ready, key=_first))

    def _start_first(self, queue: _Queue) -> None:
        """Start the queue's first job, or block the queue."""
        job = queue.heap[0] & JOB_MASK
        if (self._gone and job in self._gone) or self._of.try_start(job):
            heappop(queue.heap)
        elif not (self._of.policy.is_preemptive and self._preempt(job, queue)):
            queue.blocked = True
            self._of.power.wake_for(job)

    def _preempt(self, job: int, queue: _Queue) -> bool:
        """Free GPUs for the job by preempting the policy's victims; only those on the nodes that it takes."""
        simulation = self._of
        running = simulation.running or []
        for shape in self._request[job].shapes:
            trial, count = list(simulation.free.by_count), list(simulation.free.count)
            least, stopped = shape.rest or shape.gpus, []
            for victim in simulation.policy.victims(job, simulation.left_s[job], simulation.now_s, running):
                stopped.append(victim)
                is_near = False
                for node, mask in simulation.allocation(victim):
                    bit = 1 << node
                    if simulation.free.in_service & bit:
                        trial[count[node]] ^= bit
                        count[node] += mask.bit_count()
                        trial[count[node]] |= bit
                        is_near = is_near or count[node] >= least
                if is_near and (chosen := choose(trial, shape)):
                    heappop(queue.heap)
                    nodes = {node for node, _ in chosen}
                    for each in stopped:
                        if any(node in nodes for node, _ in simulation.allocation(each)):
                            left_s = simulation.work_left_s(each) + simulation.policy.restart_s
                            simulation.send_back(each, left_s, is_preempted=True)
                    simulation.start(job, chosen)
                    # Victims may hold GPUs on other nodes too.
                    for every in self._queues:
                        every.blocked = False
                    return True
        return False


def _first(queue: _Queue) -> int:
    return queue.heap[0]


class OneQueue(Strict):
    """Strict order in a cluster with one queue, and nothing that watches starts: the short way for large traces."""

    def start_jobs(self, freed: int) -> None:
        queue = self._queues[0]
        heap = queue.heap
        if (queue.blocked and not freed) or not heap:
            return
        simulation, request_of, gone = self._of, self._request, self._gone
        free, ends, now = simulation.free, simulation.ends, simulation.now_s
        by_count, from_gpus, lowest = free.by_count, free.from_gpus, free.lowest
        while heap:
            job = heap[0] & JOB_MASK
            request = request_of[job]
            gpus = request.gpus
            if not gpus or gone:
                # Several nodes, slices, canceled jobs: the long way.
                queue.blocked = False
                self._start_first(queue)
                if queue.blocked:
                    return
                continue
            allowed = request.allowed
            for number in from_gpus[gpus]:
                fitting = by_count[number] & allowed
                if fitting:
                    break
            else:
                queue.blocked = True
                simulation.power.wake_for(job)
                return
            heappop(heap)
            bit = fitting & -fitting
            node = bit.bit_length() - 1
            was = free.free[node]
            mask = was if number == gpus else lowest[gpus][was] if was < 256 else lowest_bits(was, gpus)
            free.free[node] = was ^ mask
            by_count[number] ^= bit
            by_count[number - gpus] |= bit
            free.count[node] = number - gpus
            simulation.node_of[job], simulation.mask_of[job] = node, mask
            simulation.first_s[job] = simulation.begun_s[job] = now
            end = simulation.end_s[job] = now + simulation.left_s[job]
            heappush(ends, end << 32 | job)
        queue.blocked = False


class Skip:
    """Whatever fits starts, in the order of the queue: a large job can wait for ever."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self._waiting: dict[int, WaitingJobs] = {}
        self._kinds: dict[int, Request] = {}
        self._is_changed = False

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, job: int, entry: int) -> None:
        request = self._of.request[job]
        self._kinds[id(request)] = request
        self._waiting.setdefault(id(request), WaitingJobs()).add(entry, 0)
        self._is_changed = True

    def discard(self, job: int, entry: int) -> None:
        self._waiting[id(self._of.request[job])].remove(entry)

    def waiting(self) -> list[int]:
        return sorted(entry for jobs in self._waiting.values() for entry in jobs)

    def reorder(self) -> None:
        jobs = [entry & JOB_MASK for entry in self.waiting()]
        self._waiting = {}
        for job in jobs:
            self.add(job, self._of.entries[job])

    def resized(self) -> None:
        self._is_changed = True

    def start_jobs(self, freed: int) -> None:
        if not freed and not self._is_changed:
            return
        self._is_changed = False
        simulation = self._of
        ready = {kind: jobs for kind, jobs in self._waiting.items() if jobs}
        while ready:
            kind, jobs = min(ready.items(), key=lambda each: each[1].first)
            entry = jobs.first
            if simulation.try_start(entry & JOB_MASK):
                jobs.remove(entry)
                if not jobs:
                    del ready[kind]
            else:
                del ready[kind]
        for jobs in self._waiting.values():
            if jobs:
                simulation.power.wake_for(jobs.first & JOB_MASK)
                break
