"""An online cluster with MIG: jobs arrive, wait for an instance of the size that they ask for, and run; a planner may
change the layouts. Event-driven.

How it works, and what it leaves out:
- A job asks for the smallest size in service that holds it when it is submitted. Sizes have one queue each, first
  come, first served: jobs of one instance never block jobs of another size.
- Of several nodes with an idle instance of the size, the one with the most busy instances takes the job, so that
  others become idle; then the first.
- Raises are decided whenever something starts or ends, by the decision that the hooks use, as if its timer ran then.
- The planner is asked every `plan_every_s`, and when a node that it drains becomes idle. A node changes only while
  nothing runs on it; it is out of service for change_s. A change that a drain prepared takes place as it was planned.
- Pending jobs whose size vanished ask for the smallest size in service that holds them (almanac releases them).
- The planner sees a finished job's run time. Of waiting and running jobs it sees an expectation from finished ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from advisor.decisions.mig_layout import GpuLayout, LayoutPlan, MigNode, SliceJob
from advisor.decisions.mig_raise import PendingSlice, decide_raises
from advisor.mig.replay import homes_of
from advisor.mig.sizes import Sizes
from almanac.units import DAY_S
from simulator.mig.demand import SliceRequest
from simulator.mig.prediction import RunTimes

_PLAN, _SUBMIT, _END, _CHANGED = 3, 2, 0, 1
"""Order of events at one time: what ends comes before what starts, and the planner sees the result."""


class Planner(Protocol):
    """decide_layout, or what takes its place."""

    def __call__(self, nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int, /) -> LayoutPlan: ...


@dataclass(frozen=True)
class ClusterRules:
    """raises: whether pending jobs get idle larger instances. history_s: how far back the planner sees."""

    model: str = "A100-40"
    raises: bool = True
    change_s: int = 120
    plan_every_s: int = 1800
    history_s: int = 8 * DAY_S


@dataclass
class JobRun:
    """A job's course. size: what it was given. start_s, end_s: None while it waits."""

    number: int
    request: SliceRequest
    shape: int
    runs_s: tuple[float, ...]
    asked: int = 0
    size: int | None = None
    node: int | None = None
    start_s: float | None = None
    end_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Infinite for a job that never started."""
        return math.inf if self.start_s is None else self.start_s - self.request.submit_s


@dataclass(frozen=True)
class Change:
    """A change of layout that took place."""

    node: int
    begin_s: float
    end_s: float
    old: tuple[GpuLayout, ...]
    new: tuple[GpuLayout, ...]


@dataclass
class _Node:
    gpus: tuple[GpuLayout, ...]
    counts: tuple[int, ...]
    idle: list[int]
    changed_s: int | None = None
    target: tuple[GpuLayout, ...] | None = None
    is_changing: bool = False
    runs: list[JobRun] = field(default_factory=list)

    @property
    def takes_jobs(self) -> bool:
        return self.target is None and not self.is_changing


@dataclass(frozen=True)
class ClusterRun:
    """What happened: every job, every change, and the times at which the planner was asked."""

    jobs: tuple[JobRun, ...]
    changes: tuple[Change, ...]
    plans: int

    @property
    def wait_s(self) -> float:
        """Mean wait in seconds; 0 without jobs, infinite if some job never started."""
        return sum(job.wait_s for job in self.jobs) / max(1, len(self.jobs))


class MigCluster:
    """Runs the jobs once. nodes: the layout of each GPU, by node. planner: None leaves the layouts alone."""

    def __init__(
        self,
        nodes: Sequence[tuple[GpuLayout, ...]],
        sizes: Sizes,
        rules: ClusterRules,
        planner: Planner | None = None,
    ) -> None:
        self._sizes, self._rules, self._planner = sizes, rules, planner
        self._nodes = [self._node(gpus) for gpus in nodes]
        self._queues: list[deque[JobRun]] = [deque() for _ in sizes.shapes]
        self._idle = [0] * len(sizes.shapes)
        self._homes: list[int | None] = []
        self._events: list[tuple[float, int, int, int]] = []
        self._times = RunTimes()
        self._first_seen = 0
        self._jobs: list[JobRun] = []
        self._history: list[SliceJob] = []
        self._changes: list[Change] = []
        self._plans = 0
        self._refresh()

    def run(self, requests: Sequence[SliceRequest], history: Sequence[SliceRequest] = ()) -> ClusterRun:
        """The course of all jobs, until the last one has ended or nothing can change any more.

        history: jobs that ended before 0 s on their own shape, without a wait. Only the planner sees them.
        """
        self._history = [self._past(request) for request in sorted(history, key=lambda each: each.submit_s)]
        for number, request in enumerate(sorted(requests, key=lambda each: each.submit_s)):
            shape = self._sizes.shapes.index(request.shape)
            runs_s = self._sizes.run_times(request.full_s, request.compute)
            self._jobs.append(JobRun(number, request, shape, runs_s))
        self._events += [(job.request.submit_s, _SUBMIT, job.number, 0) for job in self._jobs]
        last_s = max((job.request.submit_s for job in self._jobs), default=0.0)
        if self._planner:
            every_s = self._rules.plan_every_s
            self._events += [(tick * every_s, _PLAN, 0, 0) for tick in range(int(last_s // every_s) + 2)]
        heapify(self._events)
        while self._events:
            now_s, kind, number, place = heappop(self._events)
            if kind == _SUBMIT:
                self._submit(self._jobs[number], now_s)
            elif kind == _END:
                self._end(self._jobs[number], now_s)
            elif kind == _CHANGED:
                self._put_into_service(place, now_s)
            else:
                self._plan(now_s)
        return ClusterRun(tuple(self._jobs), tuple(self._changes), self._plans)

    def _past(self, request: SliceRequest) -> SliceJob:
        shape = self._sizes.shapes.index(request.shape)
        run_s = self._sizes.run_times(request.full_s, request.compute)[shape]
        self._times.observe(shape, run_s)
        submit_s = int(request.submit_s)
        return SliceJob(
            request.shape, submit_s, run_s, start_s=min(submit_s, math.floor(-run_s)), compute=request.compute
        )

    def _node(self, gpus: tuple[GpuLayout, ...]) -> _Node:
        counts = self._sizes.counts(gpus)
        if counts is None:
            raise ValueError(f"layout {gpus} has a shape other than {', '.join(self._sizes.shapes)}")
        return _Node(gpus, counts, list(counts))

    def _refresh(self) -> None:
        """Count again what is in service, after a node changed."""
        sizes = range(len(self._sizes.shapes))
        self._homes = homes_of([sum(node.counts[size] for node in self._nodes) for size in sizes])
        self._idle = [sum(node.idle[size] for node in self._nodes if node.takes_jobs) for size in sizes]

    def _submit(self, job: JobRun, now_s: float) -> None:
        home = self._homes[job.shape]
        job.asked = job.shape if home is None else home
        if self._idle[job.asked] and not self._queues[job.asked]:
            self._start(job, job.asked, now_s)
            return
        self._queues[job.asked].append(job)
        self._raise_pending(now_s)

    def _start(self, job: JobRun, size: int, now_s: float) -> None:
        place = max(
            (place for place, node in enumerate(self._nodes) if node.idle[size] and node.takes_jobs),
            key=lambda place: (len(self._nodes[place].runs), -place),
        )
        node = self._nodes[place]
        node.idle[size] -= 1
        self._idle[size] -= 1
        node.runs.append(job)
        job.size, job.node, job.start_s, job.end_s = size, place, now_s, now_s + job.runs_s[size]
        heappush(self._events, (job.end_s, _END, job.number, 0))

    def _end(self, job: JobRun, now_s: float) -> None:
        assert job.node is not None and job.size is not None and job.start_s is not None
        node = self._nodes[job.node]
        node.runs.remove(job)
        node.idle[job.size] += 1
        self._times.observe(job.shape, now_s - job.start_s)
        if node.takes_jobs:
            self._idle[job.size] += 1
            self._serve(now_s)
        elif node.target is not None and not node.runs:
            self._change(job.node, node.target, now_s)

    def _serve(self, now_s: float) -> None:
        """Start pending jobs on idle instances of the sizes that they ask for, then raise others."""
        for size, queue in enumerate(self._queues):
            while queue and self._idle[size]:
                self._start(queue.popleft(), size, now_s)
        self._raise_pending(now_s)

    def _raise_pending(self, now_s: float) -> None:
        if not self._rules.raises or not any(self._idle) or not any(self._queues):
            return
        shapes = self._sizes.shapes
        most = sum(self._idle)
        first = [job for queue in self._queues for _, job in zip(range(most), queue, strict=False)]
        first.sort(key=lambda job: job.request.submit_s)
        pending = [PendingSlice(number, shapes[job.asked]) for number, job in enumerate(first)]
        idle = {shape: count for shape, count in zip(shapes, self._idle, strict=True) if count}
        for each in decide_raises(pending, idle, shapes):
            job = first[each.job_id]
            self._queues[job.asked].remove(job)
            self._start(job, shapes.index(each.new), now_s)

    def _change(self, place: int, gpus: tuple[GpuLayout, ...], now_s: float) -> None:
        node = self._nodes[place]
        if node.runs:
            raise ValueError(f"node {place} runs {len(node.runs)} jobs: its layout cannot change")
        self._changes.append(Change(place, now_s, now_s + self._rules.change_s, node.gpus, gpus))
        fresh = self._node(gpus)
        node.gpus, node.counts, node.idle = fresh.gpus, fresh.counts, fresh.idle
        node.target, node.is_changing, node.changed_s = None, True, int(now_s)
        self._refresh()
        self._move_lost()
        heappush(self._events, (now_s + self._rules.change_s, _CHANGED, 0, place))

    def _move_lost(self) -> None:
        """Pending jobs whose size vanished ask for another one, in the order of submission."""
        for size, queue in enumerate(self._queues):
            lost = [job for job in queue if self._homes[size] is not None and self._homes[size] != size]
            for job in lost:
                queue.remove(job)
                job.asked = self._homes[size] or 0
                insort(self._queues[job.asked], job, key=lambda each: each.request.submit_s)

    def _put_into_service(self, place: int, now_s: float) -> None:
        self._nodes[place].is_changing = False
        self._refresh()
        self._serve(now_s)

    def _plan(self, now_s: float) -> None:
        assert self._planner is not None
        self._plans += 1
        plan = self._planner(self._views(), self._seen_jobs(now_s), int(now_s))
        for change in plan.changes:
            self._change(int(change.node), change.new, now_s)
        for change in plan.drains:
            self._nodes[int(change.node)].target = change.new
            self._refresh()
            if not self._nodes[int(change.node)].runs:
                self._change(int(change.node), change.new, now_s)

    def _views(self) -> list[MigNode]:
        return [
            MigNode(
                name=f"{place:05d}",
                model=self._rules.model,
                gpus=node.gpus,
                is_free=not node.runs and node.takes_jobs,
                changed_s=node.changed_s,
                target=node.target,
                can_change=not node.is_changing,
            )
            for place, node in enumerate(self._nodes)
        ]

    def _seen_jobs(self, now_s: float) -> list[SliceJob]:
        while (
            self._first_seen < len(self._jobs)
            and (end_s := self._jobs[self._first_seen].end_s) is not None
            and end_s <= now_s - self._rules.history_s
        ):
            self._first_seen += 1
        seen = [job for job in self._history if job.submit_s >= now_s - self._rules.history_s]
        for place in range(self._first_seen, len(self._jobs)):
            job = self._jobs[place]
            if job.request.submit_s > now_s:
                break
            seen.append(self._seen(job, now_s))
        return seen

    def _seen(self, job: JobRun, now_s: float) -> SliceJob:
        shapes, start_s, size = self._sizes.shapes, job.start_s, job.size
        if start_s is None or size is None:
            run_s = self._times.expect(job.shape, 0.0)
        elif job.end_s is not None and job.end_s <= now_s:
            run_s = job.runs_s[size]
        else:
            run_s = max(self._times.expect(job.shape, now_s - start_s), now_s - start_s + 1)
        return SliceJob(
            shape=shapes[job.shape],
            submit_s=int(job.request.submit_s),
            run_s=run_s,
            start_s=None if start_s is None else int(start_s),
            ran_on=None if size is None else shapes[size],
            node=None if job.node is None else f"{job.node:05d}",
            compute=job.request.compute,
        )
