"""The state of a simulation (clock, free GPUs, running jobs), and the record of what happened in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.policies.base import JOB_MASK, Policy, Ranking
from simulator.requests import Allocation, FreeGpus, QueuedRequest, find, make_requests
from simulator.workload import Workload


def orders_of(keys: npt.ArrayLike) -> list[int]:
    """Ints that order as the keys do; a NaN comes last. Whole numbers are their own order."""
    values = np.asarray(keys)
    if np.issubdtype(values.dtype, np.integer):
        return [int(key) for key in values.tolist()]
    values = values.astype("float64") + 0.0  # -0.0 is 0.0
    bits = values.view("int64")
    orders: list[int] = np.where(bits >= 0, bits, -(bits & np.int64((1 << 63) - 1))).tolist()
    for place in np.flatnonzero(np.isnan(values)).tolist():
        orders[place] = 1 << 63
    return orders


UNFINISHED, COMPLETED, TIMEOUT, CANCELED = 0, 1, 2, 3
"""States of a job at the end. UNFINISHED: it neither ended nor was canceled; Record.unfinished says why."""


@dataclass(frozen=True)
class Segment:
    """One uninterrupted run of a job, in [start_s, end_s)."""

    job: int
    start_s: int
    end_s: int
    allocation: Allocation


@dataclass(frozen=True)
class Record:
    """By job number. start_s: the first start, -1 where there is none; end_s: the last end, -1 likewise.

    last_start_s, allocations: of the last run. segments: the runs before it, of jobs that were preempted or lost a
    node. node_states: (time, node, state) in order of time, state one of asleep, booting, down, up. unfinished:
    reason to number of jobs.
    """

    policy: str
    start_s: npt.NDArray[np.int64]
    end_s: npt.NDArray[np.int64]
    last_start_s: npt.NDArray[np.int64]
    state: npt.NDArray[np.int8]
    preemptions: npt.NDArray[np.int32]
    allocations: Sequence[Allocation]
    segments: tuple[Segment, ...] = ()
    node_states: tuple[tuple[int, int, str], ...] = ()
    unfinished: Mapping[str, int] = field(default_factory=dict)

    def runs(self) -> list[Segment]:
        """All runs of all jobs, by job and then by time."""
        last = [
            Segment(job, int(start), int(end), self.allocations[job])
            for job, (start, end) in enumerate(zip(self.last_start_s, self.end_s, strict=True))
            if end >= 0
        ]
        return sorted([*self.segments, *last], key=lambda run: (run.job, run.start_s))


class Placements(Sequence[Allocation]):
    """Allocations by job, kept as two columns: one node and mask for most jobs."""

    def __init__(self, nodes: Sequence[int], masks: Sequence[Any]) -> None:
        self._nodes, self._masks = nodes, masks

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, job: Any) -> Any:
        if isinstance(job, slice):
            return [self[each] for each in range(*job.indices(len(self)))]
        node = self._nodes[job]
        return ((node, self._masks[job]),) if node >= 0 else self._masks[job] or ()


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


class Holding(Protocol):
    """Jobs that wait for others (Eligibility)."""

    watches_ends: bool

    def ended(self, job: int) -> None: ...

    def cancel(self, job: int) -> None: ...


class Waking(Protocol):
    """Sleeping nodes, and times to look at the queue (Changes)."""

    def wake_for(self, job: int) -> None: ...

    def look_at(self, time_s: int) -> None: ...


class Simulation:
    """The state of one simulation. Lists are by job number; end_s is -1 while a job does not run.

    running: entries end << 32 | job of running jobs, ascending; None if no part of the policy looks at them. The end
    is the true one for a preemptive policy, and the expected one for a backfill. freed: mask of nodes on which GPUs
    became free, or that left service, since jobs were last started. is_plain: nothing but the queue looks at starts
    and ends.
    """

    def __init__(self, workload: Workload, cluster: Cluster, policy: Policy) -> None:
        self.workload, self.cluster, self.policy = workload, cluster, policy
        count = len(workload)
        self.now_s = 0
        self.free = FreeGpus(cluster.gpus_by_node())
        self.requests = make_requests(workload, cluster)
        self.request: list[QueuedRequest] = [self.requests.distinct[number] for number in self.requests.of_job]
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
            self.rank(range(count), ranking)
        self.expected_end_s: list[int] = [-1] * count if policy.backfill in ("easy", "conservative") else []
        self.running: list[int] | None = [] if policy.is_preemptive or self.expected_end_s else None
        self.is_plain = not (policy.observes or policy.is_preemptive or cluster.failures)
        self.scheduler: Scheduler
        self.eligibility: Holding
        self.changes: Waking

    def rank(self, jobs: Sequence[int], ranking: Ranking) -> None:
        """Set the entries, and the expected run times, of jobs that do not run."""
        for job, order in zip(jobs, orders_of(ranking.keys), strict=True):
            self.entries[job] = order << 32 | job
        if ranking.expected_s is not None and self.policy.estimate == "predicted":
            expected_s = np.maximum(ranking.expected_s, 1).astype("int64").tolist()
            for job, each in zip(jobs, expected_s, strict=True):
                self.expected_s[job] = each

    def try_start(self, job: int) -> bool:
        """Start a waiting job if it fits, on as few nodes as possible."""
        request = self.request[job]
        if not request.gpus:
            return self._try_shapes(job, request)
        node = self.free.find_node(request.gpus, request.allowed)
        if node < 0:
            return False
        self.node_of[job], self.mask_of[job] = node, self.free.take(node, request.gpus)
        self.began(job)
        return True

    def _try_shapes(self, job: int, request: QueuedRequest) -> bool:
        nodes = find(self.free.by_count, request.shapes)
        if nodes:
            self.start(job, nodes)
        return bool(nodes)

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
        for node, mask in self.allocation(job):
            self.free.release(node, mask)
            self.freed |= 1 << node

    def end(self, job: int) -> None:
        self.stop(job)
        if self.policy.observes:
            self.policy.end(job, self.now_s, self.workload.jobs["state"].iat[job] not in ("", "COMPLETED"))
        if self.eligibility.watches_ends:
            self.eligibility.ended(job)

    def renew_overdue(self) -> bool:
        """Double the expected run time of jobs that outran it, until it lies ahead. True if there were any."""
        running, is_overdue = self.running, False
        while running and running[0] >> 32 <= self.now_s:
            is_overdue = True
            job = running.pop(0) & JOB_MASK
            begun_s, expected_s = self.begun_s[job], self.expected_end_s[job] - self.begun_s[job]
            while begun_s + expected_s <= self.now_s:
                expected_s *= 2
            self.expected_end_s[job] = begun_s + expected_s
            insort(running, self.expected_end_s[job] << 32 | job)
        return is_overdue

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
        """Return the seconds until a running job ends at its own speed."""
        return self.end_s[job] - self.now_s
