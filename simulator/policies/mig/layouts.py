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
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from advisor.events import LAST, JobLoop
from advisor.mig.decide import GpuLayout, LayoutPlan, MigNode, PendingSlice, SliceJob, decide_raises
from advisor.mig.outlook import homes_of
from advisor.mig.states import WHOLE, sizes_of
from almanac.hardware import mig_models
from almanac.units import DAY_S
from simulator.engine import STUCK
from simulator.outcomes import PolicyRun, uninterrupted
from simulator.traces.mig import SliceRequest

HISTORY_S = 8 * DAY_S
"""The planner sees jobs that are younger."""
DEFAULT_S = 3600.0
"""Expected where nothing has ended yet: an hour, as good a guess as any."""
KEPT = 400


class LayoutPlanner(Protocol):
    """decide_layout, or what takes its place."""

    def __call__(self, nodes: Sequence[MigNode], jobs: Sequence[SliceJob], now_s: int, /) -> LayoutPlan: ...


@dataclass(frozen=True)
class MigSite:
    """The simulated cluster. initial: layout of each GPU at the start, by node; None for full GPUs."""

    model: str = "A100-40"
    nodes: int = 16
    gpus_per_node: int = 1
    change_s: int = 120
    plan_every_s: int = 3600
    initial: tuple[tuple[GpuLayout, ...], ...] | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def layouts(self) -> tuple[tuple[GpuLayout, ...], ...]:
        """The layouts at the start, by node."""
        return self.initial or (((WHOLE,),) * self.gpus_per_node,) * self.nodes


@dataclass
class SliceJobRun:
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


@dataclass(frozen=True)
class LayoutSwitch:
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
    runs: list[SliceJobRun] = field(default_factory=list)

    @property
    def takes_jobs(self) -> bool:
        return self.target is None and not self.is_changing


class MigCluster(JobLoop):
    """Runs the requests once, until the last job has ended or nothing can change any more.

    raises: whether pending jobs get idle larger instances. planner: None leaves the layouts alone. history: jobs that
    ended before 0 s on their own shape, without a wait. Only the planner sees them.
    """

    def __init__(
        self,
        site: MigSite,
        requests: Sequence[SliceRequest],
        raises: bool,
        planner: LayoutPlanner | None = None,
        history: Sequence[SliceRequest] = (),
    ) -> None:
        requests = sorted(requests, key=lambda each: each.submit_s)
        super().__init__([each.submit_s for each in requests])
        self._site, self._raises = site, raises
        self._sizes = sizes = sizes_of(mig_models()[site.model])
        self._nodes = [self._node(gpus) for gpus in site.layouts]
        self._queues: list[deque[SliceJobRun]] = [deque() for _ in sizes.shapes]
        self._idle = [0] * len(sizes.shapes)
        self._homes: list[int | None] = []
        self._times = RunTimes()
        self._first_seen = 0
        self.jobs = [self._job(number, request) for number, request in enumerate(requests)]
        self._history = [self._past(request) for request in sorted(history, key=lambda each: each.submit_s)]
        self.changes: list[LayoutSwitch] = []
        self._refresh()
        if planner:
            every_s, last_s = site.plan_every_s, max(self.submit_s, default=0.0)
            for tick in range(int(last_s // every_s) + 2):
                self.at(tick * every_s, partial(self._plan, planner), LAST)

    def outcome(self, policy: str) -> PolicyRun:
        """The result. Its details: changes of layout, the most of a node in 24 hours, and the layouts at the end."""
        jobs, compute = self.jobs, self._sizes.compute
        found = uninterrupted(self.submit_s, self.start_s, self.end_s, [job.request.full_s for job in jobs])
        busy_s = sum(compute[job.size] * found.ran_s[job.number] for job in jobs if job.size is not None)
        waiting = sum(job.start_s is None for job in jobs)
        return PolicyRun(
            policy,
            found,
            self._site.gpus,
            float(busy_s) / compute[-1],
            unfinished={STUCK: waiting} if waiting else {},
            details={
                "changes": len(self.changes),
                "most_changes_of_a_node_in_a_day": changes_in_a_day(self.changes),
                "layout": layout_text([gpu for node in self._nodes for gpu in node.gpus]),
            },
        )

    def _job(self, number: int, request: SliceRequest) -> SliceJobRun:
        shape = self._sizes.shapes.index(request.shape)
        return SliceJobRun(number, request, shape, self._sizes.run_times(request.full_s, request.compute))

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

    def submitted(self, number: int) -> None:
        job = self.jobs[number]
        home = self._homes[job.shape]
        job.asked = job.shape if home is None else home
        if self._idle[job.asked] and not self._queues[job.asked]:
            self._start(job, job.asked)
            return
        self._queues[job.asked].append(job)
        self._raise_pending()

    def _start(self, job: SliceJobRun, size: int) -> None:
        place = max(
            (place for place, node in enumerate(self._nodes) if node.idle[size] and node.takes_jobs),
            key=lambda place: (len(self._nodes[place].runs), -place),
        )
        node = self._nodes[place]
        node.idle[size] -= 1
        self._idle[size] -= 1
        node.runs.append(job)
        self.start(job.number, job.runs_s[size])
        job.size, job.node, job.start_s, job.end_s = size, place, self.now_s, self.end_s[job.number]

    def ended(self, number: int) -> None:
        job = self.jobs[number]
        assert job.node is not None and job.size is not None and job.start_s is not None
        node = self._nodes[job.node]
        node.runs.remove(job)
        node.idle[job.size] += 1
        self._times.observe(job.shape, self.now_s - job.start_s)
        if node.takes_jobs:
            self._idle[job.size] += 1
            self._serve()
        elif node.target is not None and not node.runs:
            self._change(job.node, node.target)

    def _serve(self) -> None:
        """Start pending jobs on idle instances of the sizes that they ask for, then raise others."""
        for size, queue in enumerate(self._queues):
            while queue and self._idle[size]:
                self._start(queue.popleft(), size)
        self._raise_pending()

    def _raise_pending(self) -> None:
        if not self._raises or not any(self._idle) or not any(self._queues):
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
            self._start(job, shapes.index(each.new))

    def _change(self, place: int, gpus: tuple[GpuLayout, ...]) -> None:
        node = self._nodes[place]
        if node.runs:
            raise ValueError(f"node {place} runs {len(node.runs)} jobs: its layout cannot change")
        end_s = self.now_s + self._site.change_s
        self.changes.append(LayoutSwitch(place, self.now_s, end_s, node.gpus, gpus))
        fresh = self._node(gpus)
        node.gpus, node.counts, node.idle = fresh.gpus, fresh.counts, fresh.idle
        node.target, node.is_changing, node.changed_s = None, True, int(self.now_s)
        self._refresh()
        self._move_lost()
        self.at(end_s, partial(self._put_into_service, place))

    def _move_lost(self) -> None:
        """Pending jobs whose size vanished ask for another one, in the order of submission."""
        for size, queue in enumerate(self._queues):
            lost = [job for job in queue if self._homes[size] is not None and self._homes[size] != size]
            for job in lost:
                queue.remove(job)
                job.asked = self._homes[size] or 0
                insort(self._queues[job.asked], job, key=lambda each: each.request.submit_s)

    def _put_into_service(self, place: int) -> None:
        self._nodes[place].is_changing = False
        self._refresh()
        self._serve()

    def _plan(self, planner: LayoutPlanner) -> None:
        plan = planner(self._views(), self._seen_jobs(self.now_s), int(self.now_s))
        for change in plan.changes:
            self._change(int(change.node), change.new)
        for change in plan.drains:
            self._nodes[int(change.node)].target = change.new
            self._refresh()
            if not self._nodes[int(change.node)].runs:
                self._change(int(change.node), change.new)

    def _views(self) -> list[MigNode]:
        return [
            MigNode(
                name=f"{place:05d}",
                model=self._site.model,
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
            self._first_seen < len(self.jobs)
            and (end_s := self.jobs[self._first_seen].end_s) is not None
            and end_s <= now_s - HISTORY_S
        ):
            self._first_seen += 1
        seen = [job for job in self._history if job.submit_s >= now_s - HISTORY_S]
        for place in range(self._first_seen, len(self.jobs)):
            job = self.jobs[place]
            if job.request.submit_s > now_s:
                break
            seen.append(self._seen(job, now_s))
        return seen

    def _seen(self, job: SliceJobRun, now_s: float) -> SliceJob:
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


def changes_in_a_day(changes: Sequence[LayoutSwitch]) -> int:
    """The most changes of one node in any 24 hours."""
    times: dict[int, list[float]] = {}
    for change in changes:
        times.setdefault(change.node, []).append(change.begin_s)
    return max(
        (sum(begin <= other < begin + DAY_S for other in own) for own in times.values() for begin in own), default=0
    )


def layout_text(gpus: Sequence[GpuLayout]) -> str:
    """GPUs by layout, most frequent first: "10 x gpu, 4 x 3g+4g"."""
    counted = {"+".join(layout): gpus.count(layout) for layout in sorted(set(gpus))}
    return ", ".join(f"{count} x {name}" for name, count in sorted(counted.items(), key=lambda item: -item[1]))


class RunTimes:
    """Run times of the last jobs of each shape."""

    def __init__(self) -> None:
        self._ended: dict[int, list[float]] = {}
        self._order: dict[int, list[float]] = {}

    def observe(self, shape: int, run_s: float) -> None:
        """Add the run time of a job that has ended."""
        ended, order = self._ended.setdefault(shape, []), self._order.setdefault(shape, [])
        insort(ended, run_s)
        order.append(run_s)
        if len(order) > KEPT:
            ended.remove(order.pop(0))

    def expect(self, shape: int, elapsed_s: float) -> float:
        """Mean run time of those that ran longer than elapsed_s; half as long again without such jobs."""
        ended = self._ended.get(shape, [])
        longer = ended[bisect_right(ended, elapsed_s) :]
        return sum(longer) / len(longer) if longer else max(DEFAULT_S, 1.5 * elapsed_s)
