"""The event-driven engine and its queues: it owns the clock and the cluster, and asks a policy for the queue's order.

At each time, in this order: jobs end, nodes change, waiting jobs are canceled, jobs become eligible, the policy's tick
runs, and jobs start. The same input gives the same result. The queues here start jobs in strict order; those of
backfill.py let some go before.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np

from almanac.errors import RequestError
from simulator.backfill import Easy, Skip
from simulator.changes import Changes, Eligibility
from simulator.cluster import Cluster
from simulator.conservative import Conservative
from simulator.policies.base import JOB_MASK, Policy
from simulator.requests import can_ever_fit, find, lowest_bits
from simulator.simulation import CANCELED, COMPLETED, TIMEOUT, UNFINISHED, Placements, Record, Simulation
from simulator.workload import Workload


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
            self._of.changes.wake_for(job)

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
                if is_near and (chosen := find(trial, (shape,))):
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
                simulation.changes.wake_for(job)
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


def make_scheduler(simulation: Simulation) -> Strict | Skip:
    kind = simulation.policy.backfill
    if simulation.policy.is_preemptive and kind != "none":
        raise RequestError(f"{kind} backfill does not preempt jobs", "use backfill none")
    if kind == "none":
        is_short_way = simulation.is_plain and len(simulation.requests.queues) == 1
        return OneQueue(simulation) if is_short_way else Strict(simulation)
    return {"skip": Skip, "easy": Easy, "conservative": Conservative}[kind](simulation)


FAR_S = 1 << 62
IDLE_TICKS = 100
"""Ticks after which jobs that still wait, while nothing runs, are left waiting."""
TOO_LARGE = "ask for more than the cluster has"
STUCK = "still wait at the end"
Progress = Callable[[int, int], None]


def simulate(workload: Workload, cluster: Cluster, policy: Policy, progress: Progress | None = None) -> Record:
    """Run the whole workload. progress: called now and then with (jobs that have ended, all jobs)."""
    state = Simulation(workload, cluster, policy)
    engine, was_collecting = _Engine(state, progress or (lambda done, all_jobs: None)), gc.isenabled()
    if state.is_ranked:
        gc.disable()  # no cycles arise, and a collection would look at all placements so far: a tenth of the time
    try:
        return engine.run()
    finally:
        if was_collecting:
            gc.enable()


class _Engine:
    """The loop over the times at which something happens."""

    def __init__(self, state: Simulation, progress: Progress) -> None:
        self._state, self._progress = state, progress
        state.scheduler = make_scheduler(state)
        state.changes = self._changes = Changes(state)
        state.eligibility = self._eligibility = Eligibility(state)

    def run(self) -> Record:
        """One long loop: a call for each step would cost a tenth of the speed."""
        state = self._state
        submit_s = [*state.workload.array("submit_s").tolist(), FAR_S]
        too_large = self._too_large()
        ends, end_s, node_of, mask_of = state.ends, state.end_s, state.node_of, state.mask_of
        free, count, by_count, in_service = state.free.free, state.free.count, state.free.by_count, state.free
        changes, eligibility, scheduler, entries = self._changes, self._eligibility, state.scheduler, state.entries
        add, start_jobs = scheduler.add, scheduler.start_jobs
        is_plain_end = state.is_plain and not eligibility.watches_ends
        is_plain_arrival = state.is_ranked and not eligibility.is_needed and not too_large
        expected, expected_end_s = state.running if state.expected_end_s else None, state.expected_end_s
        job, step, idle_ticks, all_jobs = 0, 0, 0, len(end_s)
        while True:
            now = submit_s[job]
            if ends and ends[0] >> 32 < now:
                now = ends[0] >> 32
            if changes.next_s < now:
                now = changes.next_s
            if expected and expected[0] >> 32 < now and scheduler:
                # A job outruns its expected run time: reservations change.
                now = max(expected[0] >> 32, state.now_s)
            if now >= FAR_S:
                break
            state.now_s = now
            bound = (now + 1) << 32
            freed = 0
            while ends and ends[0] < bound:
                ended = heappop(ends) & JOB_MASK
                if end_s[ended] != now:
                    continue
                node = node_of[ended]
                if not is_plain_end or node < 0:
                    # A job that was preempted and resumed at once has two entries.
                    while ends and ends[0] == now << 32 | ended:
                        heappop(ends)
                    state.freed = 0
                    state.end(ended)
                    freed |= state.freed
                    continue
                if expected:
                    del expected[bisect_left(expected, expected_end_s[ended] << 32 | ended)]
                bit = 1 << node
                mask = free[node] | mask_of[ended]
                free[node] = mask
                freed |= bit
                number = mask.bit_count()
                if in_service.in_service & bit:
                    by_count[count[node]] ^= bit
                    by_count[number] |= bit
                count[node] = number
            state.freed = freed
            if changes.next_s <= now:
                changes.apply()
            if is_plain_arrival:
                while submit_s[job] == now:
                    add(job, entries[job])
                    job += 1
            else:
                first = job
                while submit_s[job] == now:
                    job += 1
                eligibility.submit([each for each in range(first, job) if each not in too_large])
            if changes.next_tick_s <= now:
                changes.tick()
            start_jobs(state.freed)
            step += 1
            if not step & 0x3FFF:
                self._progress(job, all_jobs)
            if job == all_jobs and not ends and changes.next_s < FAR_S:
                # Only planned changes, or ticks, can let a waiting job start now.
                idle_ticks = 0 if changes.is_pending() else idle_ticks + 1
                if idle_ticks > IDLE_TICKS or not (scheduler or eligibility.is_holding()):
                    break
        self._progress(len(end_s), len(end_s))
        return self._record(too_large)

    def _too_large(self) -> set[int]:
        fits = {id(each): can_ever_fit(each, self._state.cluster) for each in self._state.requests.distinct}
        if all(fits.values()):
            return set()
        return {job for job, request in enumerate(self._state.request) if not fits[id(request)]}

    def _record(self, too_large: set[int]) -> Record:
        state = self._state
        start, end = np.array(state.first_s, dtype="int64"), np.array(state.end_s, dtype="int64")
        limits, runs = state.workload.array("time_limit_s"), state.workload.array("run_s")
        outcome = np.where(end < 0, UNFINISHED, np.where((limits > 0) & (runs >= limits), TIMEOUT, COMPLETED)).astype(
            "int8"
        )
        outcome[list(state.canceled)] = CANCELED
        preemptions = np.zeros(len(start), dtype="int32")
        preemptions[list(state.preemptions)] = list(state.preemptions.values())
        waiting = int((outcome == UNFINISHED).sum()) - len(too_large)
        return Record(
            policy=state.policy.label or state.policy.name,
            start_s=start,
            end_s=end,
            last_start_s=np.array(state.begun_s, dtype="int64"),
            state=outcome,
            preemptions=preemptions,
            allocations=Placements(state.node_of, state.mask_of),
            segments=tuple(state.segments),
            node_states=tuple(self._changes.states),
            unfinished={reason: number for reason, number in ((TOO_LARGE, len(too_large)), (STUCK, waiting)) if number},
        )
