"""What changes the cluster while jobs run: failures, partition sizes, boots, sleep, cancellations, and ticks."""

from __future__ import annotations

from heapq import heappop, heappush

from simulator.free_gpus import choose
from simulator.policies.base import ClusterView
from simulator.simulation import Simulation
from simulator.waiting import JOB_MASK, order_of

_FAR_S = 1 << 62
UP, DOWN, BOOTED, SIZE, CANCEL = range(5)
"""In the order in which changes of one time are applied."""


class Changes:
    """next_s: time of the next change or tick. next_tick_s: of the next tick alone."""

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
        """Whether the cluster will change, by more than what a tick may bring."""
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
            for job, key in actions.keys.items():
                simulation.entries[job] = order_of(key) << 32 | job
            simulation.scheduler.reorder()
        idle = set(view.idle_nodes)
        for node in actions.sleep:
            if node in idle:
                self._sleep(node)
        for node in actions.wake:
            self.wake(node)
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
        if any(choose(trial, shape) for shape in shapes):
            return
        for node in sorted(self._asleep - self._down):
            trial[free.count[node]] |= 1 << node
        for shape in shapes:
            if chosen := choose(trial, shape):
                for node, _ in chosen:
                    self.wake(node)
                return
