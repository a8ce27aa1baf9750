"""Which submitted jobs may wait for a start: dependencies, limits of job arrays, and cancellations."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from simulator.simulation import Simulation
from simulator.waiting import orders_of


class Eligibility:
    """Holds jobs back until the jobs that they depend on have ended, and array tasks above their array's limit."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        workload = simulation.workload
        self._open = Counter(job for job, _ in workload.dependencies)
        self._followers: dict[int, list[int]] = {}
        for job, before in workload.dependencies:
            self._followers.setdefault(before, []).append(job)
        limits = workload.array_limits
        groups = workload.array("array_group").tolist() if limits else []
        self._group = {job: group for job, group in enumerate(groups) if group in limits}
        self._admitted: Counter[int] = Counter()
        self._held: dict[int, deque[int]] = {}
        self._submitted: set[int] = set()
        self._waiting: set[int] = set()
        self._cancels = bool((workload.array("cancel_s") >= 0).any())
        self.watches_ends = bool(self._followers or self._group)
        self.is_needed = self.watches_ends or self._cancels

    def is_holding(self) -> bool:
        return any(self._held.values()) or any(job in self._submitted for job in self._open)

    def submit(self, jobs: list[int]) -> None:
        if not self.is_needed:
            self._admit(jobs)
            return
        ready = []
        for job in jobs:
            self._submitted.add(job)
            if job not in self._of.canceled and not self._open.get(job) and self._has_room(job):
                ready.append(job)
        self._admit(ready)

    def _has_room(self, job: int) -> bool:
        group = self._group.get(job)
        if group is None:
            return True
        if self._admitted[group] >= self._of.workload.array_limits[group]:
            self._held.setdefault(group, deque()).append(job)
            return False
        self._admitted[group] += 1
        return True

    def _admit(self, jobs: list[int]) -> None:
        simulation = self._of
        if not jobs:
            return
        if not simulation.is_ranked:
            ranking = simulation.policy.arrive(jobs, simulation.now_s)
            for job, order in zip(jobs, orders_of(np.asarray(ranking.keys)), strict=True):
                simulation.entries[job] = order << 32 | job
            if ranking.expected_s is not None and simulation.policy.estimate == "predicted":
                for job, expected_s in zip(jobs, np.asarray(ranking.expected_s).tolist(), strict=True):
                    simulation.expected_s[job] = max(int(expected_s), 1)
        for job in jobs:
            if self._cancels:
                self._waiting.add(job)
            simulation.scheduler.add(job, simulation.entries[job])

    def ended(self, job: int) -> None:
        """A job ended or was canceled: those that waited for it alone become eligible."""
        ready = []
        for follower in self._followers.get(job, ()):
            self._open[follower] -= 1
            if not self._open[follower]:
                del self._open[follower]
                if follower in self._submitted and follower not in self._of.canceled and self._has_room(follower):
                    ready.append(follower)
        group = self._group.get(job)
        if group is not None:
            self._admitted[group] -= 1
            held = self._held.get(group)
            while held and self._admitted[group] < self._of.workload.array_limits[group]:
                task = held.popleft()
                if task not in self._of.canceled:
                    self._admitted[group] += 1
                    ready.append(task)
        self._admit(ready)

    def cancel(self, job: int) -> None:
        """Cancel a job that has not started."""
        simulation = self._of
        if simulation.first_s[job] >= 0 or job in simulation.canceled:
            return
        simulation.canceled.add(job)
        was_admitted = job in self._waiting
        if was_admitted:
            self._waiting.discard(job)
            simulation.scheduler.discard(job, simulation.entries[job])
        self._after_cancel(job, was_admitted)

    def _after_cancel(self, job: int, was_admitted: bool) -> None:
        group = self._group.pop(job, None) if not was_admitted else None
        if self.watches_ends:
            self.ended(job)
        if group is not None:
            self._group[job] = group
