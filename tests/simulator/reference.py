"""A plain simulator, one second a tick and no cleverness: what the engine must agree with, job by job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Chosen = list[tuple[int, int]]
"""Pairs (node, GPUs)."""


@dataclass
class ReferenceJob:
    number: int
    submit_s: int
    run_s: int
    gpus: int
    key: float
    expected_s: int
    left_s: int = 0
    held: dict[int, set[int]] = field(default_factory=dict)
    started_s: int = -1
    end_s: int = -1
    runs: list[tuple[int, int, tuple[tuple[int, tuple[int, ...]], ...]]] = field(default_factory=list)

    @property
    def order(self) -> tuple[float, int]:
        return (self.key, self.number)


def fits(count: Sequence[int], gpus: int, size: int) -> Chosen | None:
    """Whole nodes, then the rest on one more: each the node with the fewest free GPUs that holds it, lowest first."""
    parts = [gpus] if gpus <= size else [size] * (gpus // size) + ([gpus % size] if gpus % size else [])
    chosen: Chosen = []
    for part in parts:
        taken = {node for node, _ in chosen}
        able = [(free, node) for node, free in enumerate(count) if free >= part and node not in taken]
        if not able:
            return None
        chosen.append((min(able)[1], part))
    return chosen


class Reference:
    """policy: fifo, sjf, srtf, or easy (which goes by the keys). expected_s counts for easy alone."""

    def __init__(self, jobs: Sequence[ReferenceJob], nodes: int, size: int, policy: str) -> None:
        self.jobs, self.size, self.policy = list(jobs), size, policy
        self.free = [set(range(size)) for _ in range(nodes)]
        self.waiting: list[ReferenceJob] = []
        self.running: list[ReferenceJob] = []
        self.expected_end_s: dict[int, int] = {}
        self.reserved: tuple[int, int, list[int]] | None = None
        self.now = 0

    def run(self) -> list[ReferenceJob]:
        for job in self.jobs:
            job.left_s = job.run_s
        left = sorted(self.jobs, key=lambda job: (job.submit_s, job.number))
        self.now = left[0].submit_s
        while left or self.waiting or self.running:
            for job in [job for job in self.running if job.end_s == self.now]:
                self._stop(job)
                self.reserved = None
            while left and left[0].submit_s == self.now:
                self.waiting.append(left.pop(0))
                if self.reserved and self.waiting[-1].order < self.jobs[self.reserved[0]].order:
                    self.reserved = None
            self.waiting.sort(key=lambda job: job.order)
            step: Callable[[], None] = {"easy": self._easy, "srtf": self._srtf}.get(self.policy, self._strict)
            step()
            self.now += 1
        return self.jobs

    def count(self) -> list[int]:
        return [len(free) for free in self.free]

    def _start(self, job: ReferenceJob, chosen: Chosen) -> None:
        for node, gpus in chosen:
            taken = set(sorted(self.free[node])[:gpus])
            self.free[node] -= taken
            job.held[node] = taken
        job.started_s, job.end_s = self.now, self.now + job.left_s
        self.expected_end_s[job.number] = self.now + job.expected_s
        self.waiting.remove(job)
        self.running.append(job)

    def _stop(self, job: ReferenceJob) -> None:
        held = tuple((node, tuple(sorted(gpus))) for node, gpus in job.held.items())
        job.runs.append((job.started_s, self.now, held))
        for node, gpus in job.held.items():
            self.free[node] |= gpus
        job.held = {}
        self.running.remove(job)

    def _strict(self) -> None:
        while self.waiting and (chosen := fits(self.count(), self.waiting[0].gpus, self.size)):
            self._start(self.waiting[0], chosen)

    def _srtf(self) -> None:
        while self.waiting:
            self._strict()
            if not self.waiting:
                return
            job = self.waiting[0]
            count, stopped = self.count(), []
            longer = [each for each in self.running if each.end_s - self.now > job.left_s]
            for victim in sorted(longer, key=lambda each: (each.end_s, each.number), reverse=True):
                stopped.append(victim)
                for node, gpus in victim.held.items():
                    count[node] += len(gpus)
                if chosen := fits(count, job.gpus, self.size):
                    nodes = {node for node, _ in chosen}
                    for each in [each for each in stopped if nodes & set(each.held)]:
                        each.left_s = each.end_s - self.now
                        each.key = each.left_s
                        self._stop(each)
                        self.waiting.append(each)
                    self._start(job, chosen)
                    self.waiting.sort(key=lambda each: each.order)
                    break
            else:
                return

    def _easy(self) -> None:
        self._strict()
        if not self.waiting:
            return
        for job in self.running:
            expected_s = self.expected_end_s[job.number] - job.started_s
            while job.started_s + expected_s <= self.now:
                expected_s *= 2
                self.reserved = None
            self.expected_end_s[job.number] = job.started_s + expected_s
        head = self.waiting[0]
        if self.reserved is None:
            self.reserved = (head.number, *self._reserve(head))
        _, start_s, spare = self.reserved
        for job in list(self.waiting[1:]):
            now_free = self.count()
            is_short = self.now + job.expected_s <= start_s
            able = now_free if is_short else [min(free, left) for free, left in zip(now_free, spare, strict=True)]
            chosen = fits(able, job.gpus, self.size)
            if chosen:
                self._start(job, chosen)
                if not is_short:
                    for node, gpus in chosen:
                        spare[node] -= gpus

    def _reserve(self, head: ReferenceJob) -> tuple[int, list[int]]:
        """Return (start of the first job, GPUs of each node that it leaves free from then on)."""
        count = self.count()
        ends = sorted({self.expected_end_s[job.number] for job in self.running})
        for end in ends:
            for job in self.running:
                if self.expected_end_s[job.number] == end:
                    for node, gpus in job.held.items():
                        count[node] += len(gpus)
            if chosen := fits(count, head.gpus, self.size):
                reserved = dict(chosen)
                # Nodes that it does not take are as free later as they are for jobs of any length.
                return end, [free - reserved.get(node, -self.size) for node, free in enumerate(count)]
        raise AssertionError("a job that never fits")
