"""The state of a simulation: the clock, free GPUs, and what each job does. Jobs start and stop here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappush
from typing import Any, Protocol

import numpy as np

from simulator.cluster import Cluster
from simulator.free_gpus import Allocation, FreeGpus
from simulator.policies.base import Policy
from simulator.record import Segment
from simulator.requests import Request, make_requests
from simulator.waiting import JOB_MASK, orders_of
from simulator.workload import Workload


class Scheduler(Protocol):
    """The queues. Each job's entry is Simulation.entries[job]."""

    def add(self, job: int, entry: int) -> None: ...

    def discard(self, job: int, entry: int) -> None:
        """A waiting job is canceled."""

    def start_jobs(self, freed: int) -> None:
        """Start what may start. freed: mask of nodes on which GPUs became free since the last call."""

    def reorder(self) -> None:
        """Entries of waiting jobs changed."""

    def resized(self) -> None:
        """The nodes of queues changed."""

    def waiting(self) -> Sequence[int]:
        """Entries of all waiting jobs, ascending."""

    def __bool__(self) -> bool: ...


class Sharing(Protocol):
    """Slices of GPUs, and speeds (SharedGpus)."""

    def try_start(self, job: int, request: Request) -> bool: ...

    def began(self, job: int) -> int: ...

    def stopped(self, job: int) -> bool: ...

    def work_left_s(self, job: int) -> int: ...


class Holding(Protocol):
    """Jobs that wait for others (Eligibility)."""

    watches_ends: bool

    def ended(self, job: int) -> None: ...

    def cancel(self, job: int) -> None: ...


class Waking(Protocol):
    """Sleeping nodes (Changes)."""

    def wake_for(self, job: int) -> None: ...


class Simulation:
    """The state of one simulation. Lists are by job number; end_s is -1 while a job does not run.

    running: entries end << 32 | job of running jobs, ascending; None where no part of the policy looks at them. The end
    is the true one for a preemptive policy, and the expected one for a backfill. freed: mask of nodes on which GPUs
    became free since jobs were last started. is_plain: nothing but the queue looks at starts and ends.
    """

    def __init__(self, workload: Workload, cluster: Cluster, policy: Policy) -> None:
        self.workload, self.cluster, self.policy = workload, cluster, policy
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
        self.is_plain = not (
            policy.observes
            or policy.slices
            or policy.speeds is not None
            or self.running is not None
            or cluster.failures
        )
        self.shared: Sharing | None = None
        self.scheduler: Scheduler
        self.eligibility: Holding
        self.power: Waking

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

    def end(self, job: int) -> None:
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
