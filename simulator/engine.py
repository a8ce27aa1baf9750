"""The event-driven engine: it owns the clock and the cluster, and asks a policy for the order of the queue.

At each time, in this order: jobs end, nodes change, waiting jobs are canceled, jobs become eligible, the policy's tick
runs, and jobs start. The same input gives the same result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from simulator.changes import Changes
from simulator.cluster import Cluster
from simulator.eligibility import Eligibility
from simulator.free_gpus import Allocation, FreeGpus
from simulator.policies.base import Policy
from simulator.record import CANCELED, COMPLETED, TIMEOUT, UNFINISHED, Placements, Record, Segment
from simulator.requests import Request, can_ever_fit, make_requests
from simulator.scheduling import make_scheduler
from simulator.sharing import SharedGpus
from simulator.waiting import JOB_MASK, orders_of
from simulator.workload import Workload

FAR_S = 1 << 62
IDLE_TICKS = 100
"""Ticks after which jobs that still wait, while nothing runs, are left waiting."""
TOO_LARGE = "ask for more than the cluster has"
STUCK = "still wait at the end"
Progress = Callable[[int, int], None]


def simulate(workload: Workload, cluster: Cluster, policy: Policy, progress: Progress | None = None) -> Record:
    """Run the whole workload. progress: told of (jobs that have ended, all jobs) now and then."""
    return Simulation(workload, cluster, policy, progress or (lambda done, all_jobs: None)).run()


class Simulation:
    """The state of one simulation. Lists are by job number; end_s is -1 while a job does not run.

    running: entries end << 32 | job of running jobs, ascending; None where no part of the policy looks at them. The end
    is the true one for a preemptive policy, and the expected one for a backfill.
    """

    def __init__(self, workload: Workload, cluster: Cluster, policy: Policy, progress: Progress) -> None:
        self.workload, self.cluster, self.policy, self._progress = workload, cluster, policy, progress
        count = len(workload)
        self.now_s = 0
        self.free = FreeGpus(cluster.gpus_by_node())
        self.requests = make_requests(workload, cluster, policy)
        self.request: list[Request] = [self.requests.distinct[number] for number in self.requests.of_job]
        self.left_s: list[int] = workload.array("run_s").tolist()
        self.first_s, self.begun_s, self.end_s = [-1] * count, [-1] * count, [-1] * count
        self.node_of: list[int] = [-1] * count
        self.mask_of: list[Any] = [None] * count
        self.ends: list[int] = []
        self.freed = 0
        self.segments: list[Segment] = []
        self.preemptions: dict[int, int] = {}
        self.canceled: set[int] = set()
        is_true = policy.estimate == "true"
        self.expected_s: list[int] = (workload.array("run_s") if is_true else workload.requested_s()).tolist()
        ranking = policy.rank(workload, cluster)
        self.is_ranked = ranking is not None
        self.entries: list[int] = [0] * count
        if ranking is not None:
            self.entries = [order << 32 | job for job, order in enumerate(orders_of(ranking.keys))]
            if ranking.expected_s is not None and policy.estimate == "predicted":
                self.expected_s = np.maximum(ranking.expected_s, 1).astype("int64").tolist()
        self.expected_end_s: list[int] = [-1] * count if policy.backfill in ("easy", "conservative") else []
        self.running: list[int] | None = [] if policy.is_preemptive or self.expected_end_s else None
        self.shared = SharedGpus(self) if policy.slices or policy.speeds is not None else None
        self.is_plain = not (policy.observes or self.shared or self.running is not None or cluster.failures)
        self.scheduler = make_scheduler(self)
        self.changes = Changes(self)
        self.eligibility = Eligibility(self)

    def run(self) -> Record:
        submit_s = [*self.workload.array("submit_s").tolist(), FAR_S]
        too_large = self._too_large()
        ends, end_s, node_of, mask_of = self.ends, self.end_s, self.node_of, self.mask_of
        free, count, by_count, in_service = self.free.free, self.free.count, self.free.by_count, self.free
        changes, eligibility, scheduler, entries = self.changes, self.eligibility, self.scheduler, self.entries
        add, start_jobs = scheduler.add, scheduler.start_jobs
        is_plain_end = self.is_plain and not eligibility.watches_ends
        is_plain_arrival = self.is_ranked and not eligibility.is_needed and not too_large
        expected = self.running if self.expected_end_s else None
        job, step, idle_ticks, all_jobs = 0, 0, 0, len(end_s)
        while True:
            now = submit_s[job]
            if ends and ends[0] >> 32 < now:
                now = ends[0] >> 32
            if changes.next_s < now:
                now = changes.next_s
            if expected and expected[0] >> 32 < now and scheduler:
                # A job outruns its expected run time: reservations change.
                now = max(expected[0] >> 32, self.now_s)
            if now >= FAR_S:
                break
            self.now_s = now
            bound = (now + 1) << 32
            freed = 0
            while ends and ends[0] < bound:
                ended = heappop(ends) & JOB_MASK
                if end_s[ended] != now:
                    continue
                node = node_of[ended]
                if not is_plain_end or node < 0:
                    # A job that was preempted and resumed at once, or whose speed changed and back, has two entries.
                    while ends and ends[0] == now << 32 | ended:
                        heappop(ends)
                    self.freed = 0
                    self._end(ended)
                    freed |= self.freed
                    continue
                bit = 1 << node
                mask = free[node] | mask_of[ended]
                free[node] = mask
                freed |= bit
                number = mask.bit_count()
                if in_service.in_service & bit:
                    by_count[count[node]] ^= bit
                    by_count[number] |= bit
                count[node] = number
            self.freed = freed
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
            start_jobs(self.freed)
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
        fits = {id(each): can_ever_fit(each, self.cluster) for each in self.requests.distinct}
        if all(fits.values()):
            return set()
        return {job for job, request in enumerate(self.request) if not fits[id(request)]}

    def try_start(self, job: int) -> bool:
        """Start a waiting job where it fits, on as few nodes as possible."""
        request = self.request[job]
        if not request.gpus:
            return self._try_shapes(job, request)
        node = self.free.find_node(request.gpus, request.allowed)
        if node < 0:
            return False
        self.node_of[job], self.mask_of[job] = node, self.free.take(node, request.gpus)
        self.began(job)
        return True

    def _try_shapes(self, job: int, request: Request) -> bool:
        if request.slice and self.shared is not None:
            return self.shared.try_start(job, request)
        for shape in request.shapes:
            if nodes := self.free.find(shape):
                self.start(job, nodes)
                return True
        return False

    def start(self, job: int, nodes: Iterable[tuple[int, int]]) -> None:
        """Start a waiting job on pairs (node, GPUs), and take it from the queue."""
        allocation = tuple((node, self.free.take(node, gpus)) for node, gpus in nodes)
        if len(allocation) == 1:
            self.node_of[job], self.mask_of[job] = allocation[0]
        else:
            self.node_of[job], self.mask_of[job] = -1, allocation
        self.began(job)

    def began(self, job: int) -> None:
        """The job runs from now on, where node_of and mask_of say."""
        now = self.now_s
        if self.first_s[job] < 0:
            self.first_s[job] = now
        self.begun_s[job] = now
        end = now + self.left_s[job]
        if self.shared is not None:
            end = self.shared.began(job)
        self.end_s[job] = end
        heappush(self.ends, end << 32 | job)
        if self.running is not None:
            if self.expected_end_s:
                end = self.expected_end_s[job] = now + self.expected_s[job]
            insort(self.running, end << 32 | job)
        if self.policy.observes:
            self.policy.start(job, now)

    def allocation(self, job: int) -> Allocation:
        node = self.node_of[job]
        return ((node, self.mask_of[job]),) if node >= 0 else self.mask_of[job] or ()

    def stop(self, job: int) -> None:
        """Free what a running job holds."""
        if self.running is not None:
            end = self.expected_end_s[job] if self.expected_end_s else self.end_s[job]
            place = bisect_left(self.running, end << 32 | job)
            del self.running[place]
        if self.shared is not None and self.shared.stopped(job):
            return
        for node, mask in self.allocation(job):
            self.free.release(node, mask)
            self.freed |= 1 << node

    def moved(self, job: int, end_s: int) -> None:
        """A running job ends at another time."""
        if self.running is not None and not self.expected_end_s:
            del self.running[bisect_left(self.running, self.end_s[job] << 32 | job)]
            insort(self.running, end_s << 32 | job)
        self.end_s[job] = end_s
        heappush(self.ends, end_s << 32 | job)

    def _end(self, job: int) -> None:
        self.stop(job)
        if self.policy.observes:
            self.policy.end(job, self.now_s, self.workload.jobs["state"].iat[job] not in ("", "COMPLETED"))
        if self.eligibility.watches_ends:
            self.eligibility.ended(job)

    def has_overdue(self) -> bool:
        """Whether a running job has outrun its expected run time."""
        running = self.running
        return running is not None and len(running) > 0 and running[0] >> 32 <= self.now_s

    def renew_overdue(self) -> None:
        """Double the expected run time of jobs that outran it, until it lies ahead."""
        while self.running and self.running[0] >> 32 <= self.now_s:
            job = self.running.pop(0) & JOB_MASK
            begun_s, expected_s = self.begun_s[job], self.expected_end_s[job] - self.begun_s[job]
            while begun_s + expected_s <= self.now_s:
                expected_s *= 2
            self.expected_end_s[job] = begun_s + expected_s
            insort(self.running, self.expected_end_s[job] << 32 | job)

    def send_back(self, job: int, left_s: int, is_preempted: bool) -> None:
        """Stop a running job, which waits again and then runs for left_s at its own speed."""
        self.stop(job)
        self.segments.append(Segment(job, self.begun_s[job], self.now_s, self.allocation(job)))
        self.begun_s[job], self.end_s[job], self.left_s[job] = -1, -1, left_s
        self.node_of[job], self.mask_of[job] = -1, None
        self.preemptions[job] = self.preemptions.get(job, 0) + is_preempted
        self.entries[job] = self.policy.resume_order(job, left_s, self.entries[job] >> 32) << 32 | job
        self.scheduler.add(job, self.entries[job])

    def work_left_s(self, job: int) -> int:
        """Of a running job, at its own speed."""
        return self.shared.work_left_s(job) if self.shared is not None else self.end_s[job] - self.now_s

    def _record(self, too_large: set[int]) -> Record:
        start, end = np.array(self.first_s, dtype="int64"), np.array(self.end_s, dtype="int64")
        limits, runs = self.workload.array("time_limit_s"), self.workload.array("run_s")
        state = np.where(end < 0, UNFINISHED, np.where((limits > 0) & (runs >= limits), TIMEOUT, COMPLETED)).astype(
            "int8"
        )
        state[list(self.canceled)] = CANCELED
        preemptions = np.zeros(len(start), dtype="int32")
        preemptions[list(self.preemptions)] = list(self.preemptions.values())
        waiting = int((state == UNFINISHED).sum()) - len(too_large)
        return Record(
            policy=self.policy.label or self.policy.name,
            start_s=start,
            end_s=end,
            last_start_s=np.array(self.begun_s, dtype="int64"),
            state=state,
            preemptions=preemptions,
            allocations=Placements(self.node_of, self.mask_of),
            segments=tuple(self.segments),
            node_states=tuple(self.changes.states),
            unfinished={reason: number for reason, number in ((TOO_LARGE, len(too_large)), (STUCK, waiting)) if number},
        )
