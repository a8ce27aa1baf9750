"""The queue of each GPU type as a record has it, at any of its times, and the wait that a job would then expect.

The record does not have priorities, so each type serves its jobs in order of submission, without backfill. A job's run
time is what was predicted at its submission. A type has as many GPUs as the record ever shows in use at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

_OVERRUN = 0.1
"""A job past its prediction is taken to run on for this share of what it ran (own choice)."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One job of the record: its type, GPUs, and predicted run time in s."""

    gpu_type: str
    gpus: int
    run_s: float


@dataclass
class TypeQueues:
    """Jobs that wait and run now, by type. capacity: GPUs of each type."""

    capacity: dict[str, int]
    waiting: defaultdict[str, dict[int, QueuedJob]] = field(default_factory=lambda: defaultdict(dict))
    running: defaultdict[str, dict[int, tuple[QueuedJob, float]]] = field(default_factory=lambda: defaultdict(dict))

    def submit(self, row: int, job: QueuedJob) -> None:
        self.waiting[job.gpu_type][row] = job

    def start(self, row: int, gpu_type: str, now_s: float) -> None:
        job = self.waiting[gpu_type].pop(row, None)
        if job is not None:
            self.running[gpu_type][row] = (job, now_s)

    def end(self, row: int, gpu_type: str) -> None:
        self.running[gpu_type].pop(row, None)

    def wait_s(self, gpu_type: str, gpus: int, now_s: float) -> float | None:
        """Until a job submitted now would start; None if the type never had so many GPUs."""
        total = self.capacity.get(gpu_type, 0)
        if gpus > total:
            return None
        ends = [(_end_s(job, start_s, now_s), job.gpus) for job, start_s in self.running[gpu_type].values()]
        free, time_s = total - sum(held for _, held in ends), now_s
        heapq.heapify(ends)
        for job in self.waiting[gpu_type].values():
            time_s, free = _until_free(ends, min(job.gpus, total), free, time_s)
            heapq.heappush(ends, (time_s + job.run_s, min(job.gpus, total)))
            free -= min(job.gpus, total)
        return _until_free(ends, gpus, free, time_s)[0] - now_s


def _end_s(job: QueuedJob, start_s: float, now_s: float) -> float:
    expected_s = start_s + job.run_s
    return expected_s if expected_s > now_s else now_s + _OVERRUN * (now_s - start_s)


def _until_free(ends: list[tuple[float, int]], gpus: int, free: int, time_s: float) -> tuple[float, int]:
    """(the first time with so many free GPUs, the free GPUs then). ends: a heap, which loses what ended by then."""
    while free < gpus and ends:
        end_s, held = heapq.heappop(ends)
        time_s, free = max(time_s, end_s), free + held
    return time_s, free


def peak_use(jobs: Iterable[tuple[str, int, float, float]]) -> dict[str, int]:
    """By type, the most GPUs in use at once. jobs: (type, GPUs, start, end)."""
    changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for gpu_type, gpus, start_s, end_s in jobs:
        changes[gpu_type] += [(start_s, gpus), (end_s, -gpus)]
    found = {}
    for gpu_type, times in changes.items():
        used = most = 0
        for _, change in sorted(times):  # an end comes before a start of the same second
            used += change
            most = max(most, used)
        found[gpu_type] = most
    return found
