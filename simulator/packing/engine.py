"""The simulated queue: first in, first out, and two workers a GPU where a policy allows it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from advisor.decisions.packing_sets import Gpus, PackingNodes, choose_gpus
from almanac.errors import RequestError
from simulator.packing.pairs import PairTable
from simulator.packing.policies import PackingPolicy
from simulator.packing.workload import PackingJob

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PackingRecord:
    """Per job: submission, start, and end, s; run time alone, s; and whether it ever shared a GPU."""

    submit_s: Floats
    start_s: Floats
    end_s: Floats
    duration_s: Floats
    shared: npt.NDArray[np.bool_]

    @property
    def jct_s(self) -> Floats:
        """Submission to end."""
        return self.end_s - self.submit_s

    @property
    def speed(self) -> Floats:
        """Mean speed of each job while it ran, relative to alone."""
        return self.duration_s / (self.end_s - self.start_s)


Observer = Callable[[float, Mapping[int, Gpus], Mapping[int, float]], None]
"""Called after each event with its time, and the GPUs and speed of each running job."""


def simulate_packing(
    jobs: Sequence[PackingJob],
    table: PairTable,
    policy: PackingPolicy,
    nodes: PackingNodes,
    observe: Observer = lambda now, placed, speeds: None,
    believed: PairTable | None = None,
) -> PackingRecord:
    """Run all jobs. The first job of the queue waits until it can start, alone or packed, and blocks those behind it.

    believed: what the policy knows of the pairs; by default the table, by which they run. Raises RequestError for a job
    that is larger than the cluster.
    """
    if too_large := next((job for job in jobs if nodes.fewest(job.gpus) is None), None):
        raise RequestError(
            f"a job of {too_large.gpus} GPUs does not fit {len(nodes.node_of)} GPUs", "simulate more GPUs"
        )
    run = _Run(jobs, table, policy, nodes, believed or table)
    arrivals = deque(sorted(range(len(jobs)), key=lambda number: jobs[number].submit_s))
    while arrivals or run.placed:
        next_end_s = run.next_end_s()
        if arrivals and jobs[arrivals[0]].submit_s < next_end_s:
            number = arrivals.popleft()
            run.now_s = jobs[number].submit_s
            run.queue.append(number)
            if len(run.queue) == 1:
                run.start_waiting()
        else:
            run.now_s = next_end_s
            run.end_due()
            run.start_waiting()
        observe(run.now_s, run.placed, run.speed)
    return run.record()


class _Run:
    """The state of a simulation. Ends lie in a heap; an entry of an older version of the job's speed is stale."""

    def __init__(
        self,
        jobs: Sequence[PackingJob],
        table: PairTable,
        policy: PackingPolicy,
        nodes: PackingNodes,
        believed: PairTable,
    ) -> None:
        self.jobs, self.table, self.policy, self.nodes, self.believed = jobs, table, policy, nodes, believed
        self.now_s = 0.0
        self.queue: deque[int] = deque()
        self.placed: dict[int, Gpus] = {}
        self.speed: dict[int, float] = {}
        self._jobs_on: list[list[int]] = [[] for _ in nodes.node_of]
        self._left = [job.duration_s for job in jobs]
        self._since_s = [0.0] * len(jobs)
        self._version = [0] * len(jobs)
        self._ends: list[tuple[float, int, int]] = []
        self._start_s, self._end_s = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
        self._shared = np.zeros(len(jobs), dtype=bool)

    def next_end_s(self) -> float:
        """Time of the next end; infinite if nothing runs."""
        while self._ends and self._ends[0][2] != self._version[self._ends[0][1]]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else float("inf")

    def end_due(self) -> None:
        """End all jobs that are due now; their partners speed up."""
        while self.next_end_s() <= self.now_s:
            number = heapq.heappop(self._ends)[1]
            self._end_s[number] = self.now_s
            self._version[number] += 1
            gpus = self.placed.pop(number)
            del self.speed[number]
            for gpu in gpus:
                self._jobs_on[gpu].remove(number)
            self._set_speeds({other for gpu in gpus for other in self._jobs_on[gpu]})

    def start_waiting(self) -> None:
        """Start jobs from the head of the queue while they may."""
        while self.queue:
            number = self.queue[0]
            gain = partial(self._gain, self.jobs[number])
            choice = choose_gpus(self.jobs[number].gpus, self.placed, self.nodes, gain)
            if choice is None:
                return
            self.queue.popleft()
            self._start(number, choice.gpus)

    def _gain(self, job: PackingJob, other: int) -> float | None:
        return self.policy.gain(self.believed, job, self.jobs[other])

    def _start(self, number: int, gpus: Gpus) -> None:
        self.placed[number] = gpus
        self._start_s[number] = self._since_s[number] = self.now_s
        self.speed[number] = 0.0
        for gpu in gpus:
            self._jobs_on[gpu].append(number)
        together = {other for gpu in gpus for other in self._jobs_on[gpu]}
        if len(together) > 1:
            self._shared[list(together)] = True
        self._set_speeds(together)

    def _set_speeds(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._left[number] -= (self.now_s - self._since_s[number]) * self.speed[number]
            self._since_s[number] = self.now_s
            speed = self.policy.job_speed([self._worker_speed(number, gpu) for gpu in self.placed[number]])
            self.speed[number] = speed
            self._version[number] += 1
            end_s = self.now_s + max(self._left[number], 0.0) / speed
            heapq.heappush(self._ends, (end_s, number, self._version[number]))

    def _worker_speed(self, number: int, gpu: int) -> float:
        for other in self._jobs_on[gpu]:
            if other != number:
                kinds = self.jobs[number].kind, self.jobs[other].kind
                speeds = self.policy.worker_speeds(self.table, *kinds)
                assert speeds is not None, "a pair that does not fit was placed"
                return speeds[0]
        return 1.0

    def record(self) -> PackingRecord:
        """The record, once all jobs ended."""
        return PackingRecord(
            submit_s=np.array([job.submit_s for job in self.jobs]),
            start_s=self._start_s,
            end_s=self._end_s,
            duration_s=np.array([job.duration_s for job in self.jobs]),
            shared=self._shared,
        )
