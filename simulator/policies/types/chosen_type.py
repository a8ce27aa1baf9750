"""One strict queue for each GPU type: each job chooses its type at submission and is never placed or moved by us.

In a strict queue, no job starts before an earlier one, so that a job's start is known once all earlier jobs are in the
queue. What a chooser sees is older and less certain: a snapshot of the queues, and predicted run times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.events import JobLoop, StrictPool
from advisor.types.decide import GpuTypeRules, TypeRunTime, TypeWait, decide_type
from advisor.types.placement import Floats
from simulator.outcomes import JobOutcomes, uninterrupted
from simulator.traces.gavel import PlacementProblem


@dataclass(frozen=True)
class TypeJob:
    """A job in a type's queue. predicted_s: its run time on the type, as far as it is known."""

    submit_s: float
    start_s: float
    gpus: int
    run_s: float
    predicted_s: float


class TypeQueue:
    """A strict queue in front of the GPUs of a type. jobs: all jobs ever, in the order of submission and of start."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.jobs = capacity, list[TypeJob]()
        self._pool = StrictPool(capacity)

    def add(self, submit_s: float, gpus: int, run_s: float, predicted_s: float, not_before_s: float = 0.0) -> TypeJob:
        """The job with its start."""
        start_s = self._pool.start(gpus, run_s, max(submit_s, not_before_s))
        self.jobs.append(TypeJob(submit_s, start_s, gpus, run_s, predicted_s))
        return self.jobs[-1]

    def predicted_wait_s(self, seen_s: float, gpus: int, more: list[tuple[int, float]]) -> float:
        """Wait from seen_s on of a job at the queue's end, as a snapshot of the jobs submitted before that time tells.

        more: GPUs and predicted run times of jobs that are thought to have joined since. A job that outran its
        prediction is thought to need a tenth of it more.
        """
        joined = bisect_left(self.jobs, seen_s, key=lambda job: job.submit_s)
        started = min(bisect_right(self.jobs, seen_s, key=lambda job: job.start_s), joined)
        ends = [(_predicted_end_s(job, seen_s), job.gpus) for job in self._running(started, seen_s)]
        pool = StrictPool(self.capacity, seen_s, ends)
        for count, run_s in [(job.gpus, job.predicted_s) for job in self.jobs[started:joined]] + more:
            pool.start(count, run_s)
        return pool.next_start_s(gpus) - seen_s

    def _running(self, started: int, now_s: float) -> list[TypeJob]:
        return [job for job in self.jobs[:started] if job.start_s + job.run_s > now_s]

    def recent_waits_s(self, now_s: float, window_s: float) -> list[float]:
        """Waits of the jobs that started in the last window_s."""
        first = bisect_left(self.jobs, now_s - window_s, key=lambda job: job.start_s)
        last = bisect_left(self.jobs, now_s, key=lambda job: job.start_s)
        return [job.start_s - job.submit_s for job in self.jobs[first:last]]


def _predicted_end_s(job: TypeJob, now_s: float) -> float:
    return max(job.start_s + job.predicted_s, now_s + 0.1 * job.predicted_s)


@dataclass(frozen=True)
class TypeSubmission:
    """Submission as a chooser sees it. run_s: (types,) predicted, infinite on types that cannot run it."""

    now_s: float
    gpus: int
    run_s: Floats


Chooser = Callable[[list[TypeQueue], TypeSubmission], int]
"""The type that a job asks for."""


def simulate_queues(
    problem: PlacementProblem, chooser: Chooser, known_work: Floats | None = None, start_every_s: float | None = None
) -> JobOutcomes:
    """Run all jobs, each in the queue of the type that it chose.

    start_every_s: jobs start at multiples of it, as in rounds; None for at once. Run times of jobs are then rounded up
    in the queues, as a job keeps its GPUs to the end of its round.
    """
    run = _TypeQueueJobs(problem, chooser, known_work, start_every_s)
    run.run()
    begin = float(problem.submit_s.min())
    return uninterrupted(problem.submit_s, begin + np.array(run.start_s), begin + np.array(run.end_s), problem.best_s)


class _TypeQueueJobs(JobLoop):
    """Times are since the first submission."""

    def __init__(
        self, problem: PlacementProblem, chooser: Chooser, known_work: Floats | None, start_every_s: float | None
    ) -> None:
        super().__init__((problem.submit_s - problem.submit_s.min()).tolist())
        self._gpus, self._chooser, self._step_s = problem.gpus.tolist(), chooser, start_every_s
        with np.errstate(divide="ignore"):
            self._run_s, self._predicted_s = (
                np.where(problem.rates > 0, work[:, None] / problem.rates, np.inf)
                for work in (problem.work, problem.work if known_work is None else known_work)
            )
        self._queues = [TypeQueue(int(gpus)) for gpus in problem.capacity]

    def submitted(self, job: int) -> None:
        now_s, gpus, step_s = self.now_s, self._gpus[job], self._step_s
        kind = self._chooser(self._queues, TypeSubmission(now_s, gpus, self._predicted_s[job]))
        run_s = held_s = float(self._run_s[job, kind])
        not_before_s = 0.0
        if step_s is not None:
            held_s, not_before_s = float(np.ceil(run_s / step_s) * step_s), float(np.ceil(now_s / step_s) * step_s)
        queued = self._queues[kind].add(now_s, gpus, held_s, float(self._predicted_s[job, kind]), not_before_s)
        self.start(job, run_s, delay_s=queued.start_s - now_s)


def fastest_type(_: list[TypeQueue], job: TypeSubmission) -> int:
    """Everyone asks for their own fastest type."""
    return int(job.run_s.argmin())


def least_end(waits_s: Sequence[float], run_s: Sequence[float]) -> int:
    """The type that decide_type advises to a job that accepts all on which its run time is finite.

    The waits and run times count as exact, and any gain counts: a job has no type of its own that it would keep.
    """
    names = {f"{kind:03}": kind for kind, each_s in enumerate(run_s) if np.isfinite(each_s)}
    exact = [(name, run_s[kind]) for name, kind in names.items()]
    times = [TypeRunTime(name, each_s, each_s, each_s, each_s, 0, "specifications") for name, each_s in exact]
    waits = [TypeWait(name, waits_s[kind], waits_s[kind], waits_s[kind], 0) for name, kind in names.items()]
    found = decide_type(times, waits, (), GpuTypeRules(now_s=0, min_gain=0.0))
    soonest = min(waits, key=lambda wait: (wait.wait_s, run_s[names[wait.gpu_type]], wait.gpu_type))
    return names[found.best.gpu_type if found else soonest.gpu_type]


class AdvisedType:
    """The type of decide_type, from snapshots of the queues that are up to snapshot_s old.

    Jobs that were advised since the snapshot count as queued where they were sent. follow: share of the jobs that do
    what they are told; the others ask for their fastest type. A job accepts every type: without advice, it goes to
    the type on which it starts first.
    """

    def __init__(self, snapshot_s: float = 600.0, follow: float = 1.0, seed: int = 0) -> None:
        self._snapshot_s, self._follow = snapshot_s, follow
        self._generator = np.random.default_rng([seed, 23])
        self._seen_s = 0.0
        self._advised: list[list[tuple[int, float]]] = []

    def __call__(self, queues: list[TypeQueue], job: TypeSubmission) -> int:
        seen_s = job.now_s // self._snapshot_s * self._snapshot_s
        if seen_s != self._seen_s or not self._advised:
            self._seen_s, self._advised = seen_s, [[] for _ in queues]
        # A queue moves on after the snapshot: what is left of the wait is shorter by the snapshot's age.
        age_s = job.now_s - seen_s
        run_s = job.run_s.tolist()
        waits_s = [
            max(queue.predicted_wait_s(seen_s, job.gpus, more) - age_s, 0.0) if np.isfinite(each_s) else np.inf
            for queue, more, each_s in zip(queues, self._advised, run_s, strict=True)
        ]
        advised = least_end(waits_s, run_s)
        self._advised[advised].append((job.gpus, float(job.run_s[advised])))
        return advised if self._generator.random() < self._follow else fastest_type(queues, job)


class RecentWaits:
    """The control: the median wait of jobs that started in the last window_s plus run time. Everybody herds."""

    def __init__(self, window_s: float = 86_400.0) -> None:
        self._window_s = window_s

    def __call__(self, queues: list[TypeQueue], job: TypeSubmission) -> int:
        waits = [queue.recent_waits_s(job.now_s, self._window_s) for queue in queues]
        medians = [float(np.median(each)) if each else 0.0 for each in waits]
        return int(np.argmin(np.array(medians) + job.run_s))
