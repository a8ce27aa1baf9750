"""Changes while jobs run: of the cluster (failures, sizes, boots, sleep, ticks), and of the jobs that may wait.

Jobs wait for the jobs that they depend on, and array tasks for their array's limit. Users cancel waiting jobs.
"""

from __future__ import annotations

from collections import Counter, deque
from heapq import heappop, heappush

import numpy as np

from simulator.policies.base import JOB_MASK, ClusterView, Ranking
from simulator.requests import find
from simulator.simulation import Simulation

_FAR_S = 1 << 62
UP, DOWN, BOOTED, SIZE, CANCEL, LOOK = range(6)
"""In the order in which changes of one time are applied."""


class Changes:
    """Planned changes and ticks of a simulation. next_s: time of the next of either. next_tick_s: of the next tick."""

    def __init__(self, simulation: Simulation) -> None:
        self._of = simulation
        self._planned: list[tuple[int, int, int, int]] = []
        self.states: list[tuple[int, int, str]] = []
        self._down, self._asleep, self._booting = set[int](), set[int](), set[int]()
        cluster, workload = simulation.cluster, simulation.workload
        for failure in cluster.failures:
            heappush(self._planned, (failure.down_s, DOWN, failure.node, 0))
            heappush(self._planned, (failure.up_s, UP, failure.node, 0))
        begin_s = int(workload.array("submit_s")[0])
        for number, name in enumerate(simulation.requests.queues):
            for size in cluster.sizes.get(name, ()):
                heappush(self._planned, (max(size.from_s, begin_s), SIZE, number, size.nodes))
        cancel_s = workload.array("cancel_s")
        for job in (cancel_s >= 0).nonzero()[0].tolist():
            heappush(self._planned, (max(int(cancel_s[job]), begin_s), CANCEL, job, 0))
        for name in cluster.sizes:
            simulation.requests.resize(name, 0)
        self.next_tick_s = begin_s if simulation.policy.tick_s else _FAR_S
        simulation.now_s = begin_s
        for node in sorted(cluster.asleep):
            self._sleep(node)
        self._set_next()

    def is_pending(self) -> bool:
        """Return True if a change of the cluster is planned, ticks not counted."""
        return bool(self._planned)

    def _set_next(self) -> None:
        self.next_s = min(self._planned[0][0] if self._planned else _FAR_S, self.next_tick_s)

    def apply(self) -> None:
        """Apply what is planned up to now."""
        while self._planned and self._planned[0][0] <= self._of.now_s:
            _, what, which, value = heappop(self._planned)
            if what == CANCEL:
                self._of.eligibility.cancel(which)
            elif what == SIZE:
                self._resize(which, value)
            elif what == DOWN:
                self._fail(which)
            elif what == UP and which in self._down:
                self._down.discard(which)
                self._restore(which)
            elif what == BOOTED and which in self._booting:
                self._booting.discard(which)
                self._restore(which)
        self._set_next()

    def _restore(self, node: int) -> None:
        if node not in self._down | self._asleep | self._booting:
            self._of.free.restore(node)
            self._of.freed |= 1 << node
            self._say(node, "up")

    def _say(self, node: int, state: str) -> None:
        self.states.append((self._of.now_s, node, state))

    def _fail(self, node: int) -> None:
        """The node's jobs lose their work and wait again."""
        self._of.free.remove(node)
        self._down.add(node)
        self._of.freed |= 1 << node
        self._say(node, "down")
        for job in self._jobs_on(node):
            self._of.send_back(job, int(self._of.workload.array("run_s")[job]), is_preempted=False)

    def _running(self) -> list[int]:
        end_s = self._of.end_s
        return sorted({entry & JOB_MASK for entry in self._of.ends if end_s[entry & JOB_MASK] == entry >> 32})

    def _jobs_on(self, node: int) -> list[int]:
        return [job for job in self._running() if any(node == each for each, _ in self._of.allocation(job))]

    def _resize(self, queue: int, nodes: int) -> None:
        """Keep the nodes that have jobs, then the lowest; take the lowest that no other partition with sizes has."""
        requests, sizes = self._of.requests, self._of.cluster.sizes
        name = requests.queues[queue]
        own = requests.nodes_of[name]
        others = 0
        for other in sizes:
            others |= requests.nodes_of[other] if other != name else 0
        whole = self._of.cluster.gpus_by_node()
        is_busy = {node for node, free in enumerate(self._of.free.count) if free < whole[node]}
        members = [node for node in range(len(whole)) if own >> node & 1]
        kept = sorted(members, key=lambda node: (node not in is_busy, node))[:nodes]
        possible = requests.potential(name) & ~others & ~own
        new = [node for node in range(len(whole)) if possible >> node & 1][: nodes - len(kept)]
        requests.resize(name, sum(1 << node for node in (*kept, *new)))
        self._of.scheduler.resized()
        self._of.freed |= (1 << len(whole)) - 1

    def _sleep(self, node: int) -> None:
        self._of.free.remove(node)
        self._asleep.add(node)
        self._of.freed |= 1 << node
        self._say(node, "asleep")

    def wake(self, node: int) -> None:
        if node in self._asleep:
            self._asleep.discard(node)
            self._booting.add(node)
            heappush(self._planned, (self._of.now_s + max(self._of.cluster.boot_s, 1), BOOTED, node, 0))
            self._say(node, "booting")
            self._set_next()

    def _idle(self) -> list[int]:
        whole, free = self._of.cluster.gpus_by_node(), self._of.free
        return [node for node, count in enumerate(free.count) if count == whole[node] and free.in_service >> node & 1]

    def tick(self) -> None:
        simulation, policy = self._of, self._of.policy
        self.next_tick_s = simulation.now_s + policy.tick_s
        waiting = [entry & JOB_MASK for entry in simulation.scheduler.waiting()]
        view = ClusterView(simulation.now_s, waiting, self._running(), self._idle(), sorted(self._asleep))
        actions = policy.tick(view)
        if actions.keys:
            simulation.rank(list(actions.keys), Ranking(np.array(list(actions.keys.values()), dtype="float64")))
            simulation.scheduler.reorder()
        idle = set(view.idle_nodes)
        for node in actions.sleep:
            if node in idle:
                self._sleep(node)
        for node in actions.wake:
            self.wake(node)
        self._set_next()

    def look_at(self, time_s: int) -> None:
        """Let the scheduler look at the queue then, even if nothing else happens."""
        heappush(self._planned, (time_s, LOOK, 0, 0))
        self._set_next()

    def wake_for(self, job: int) -> None:
        """Wake the fewest sleeping nodes with which the first waiting job would fit, counting those that boot."""
        if not self._asleep:
            return
        free = self._of.free
        trial = list(free.by_count)
        for node in self._booting - self._down:
            trial[free.count[node]] |= 1 << node
        shapes = self._of.request[job].shapes
        if find(trial, shapes):
            return
        for node in sorted(self._asleep - self._down):
            trial[free.count[node]] |= 1 << node
        for node, _ in find(trial, shapes) or ():
            self.wake(node)


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
            policy, now_s = simulation.policy, simulation.now_s
            simulation.rank(jobs, policy.arrive(jobs, now_s))
            if policy.has_learned() and simulation.scheduler:
                waiting = [entry & JOB_MASK for entry in simulation.scheduler.waiting()]
                simulation.rank(waiting, policy.rank_again(waiting, now_s))
                simulation.scheduler.reorder()
        for job in jobs:
            if self._cancels:
                self._waiting.add(job)
            simulation.scheduler.add(job, simulation.entries[job])

    def ended(self, job: int, was_admitted: bool = True) -> None:
        """Admit the jobs that waited only for this ended or canceled one, and the next tasks of its array."""
        ready = []
        for follower in self._followers.get(job, ()):
            self._open[follower] -= 1
            if not self._open[follower]:
                del self._open[follower]
                if follower in self._submitted and follower not in self._of.canceled and self._has_room(follower):
                    ready.append(follower)
        group = self._group.get(job) if was_admitted else None
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
        if self.watches_ends:
            self.ended(job, was_admitted)
