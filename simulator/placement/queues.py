"""One strict queue for each GPU type: each job chooses its type at submission and is never placed or moved by us.

In a strict queue, no job starts before an earlier one, so that a job's start is known once all earlier jobs are in the
queue. What a chooser sees is older and less certain: a snapshot of the queues, and predicted run times.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.decisions.gpu_type import GpuTypeRules, decide_type
from advisor.decisions.placement import Floats, Ints
from advisor.waits.view import TypeWait
from simulator.placement.problem import PlacementProblem
from simulator.placement.rounds import PlacementRecord


@dataclass(frozen=True)
class QueuedJob:
    """A job in a type's queue. predicted_s: its run time on the type, as far as it is known."""

    submit_s: float
    start_s: float
    gpus: int
    run_s: float
    predicted_s: float


@dataclass
class TypeQueue:
    """A strict queue in front of the GPUs of a type. jobs: all jobs ever, in the order of submission and of start."""

    capacity: int
    jobs: list[QueuedJob] = field(default_factory=list)
    _free_s: list[float] = field(default_factory=list)

    def add(self, submit_s: float, gpus: int, run_s: float, predicted_s: float, not_before_s: float = 0.0) -> QueuedJob:
        """The job with its start."""
        self._free_s = self._free_s or [0.0] * self.capacity
        first = max(submit_s, not_before_s, self.jobs[-1].start_s if self.jobs else 0.0)
        start_s = _take(self._free_s, gpus, run_s, first)
        self.jobs.append(QueuedJob(submit_s, start_s, gpus, run_s, predicted_s))
        return self.jobs[-1]

    def predicted_wait_s(self, seen_s: float, gpus: int, more: list[tuple[int, float]]) -> float:
        """Wait from seen_s on of a job at the queue's end, as a snapshot of the jobs submitted before that time tells.

        more: GPUs and predicted run times of jobs that are thought to have joined since. A job that outran its
        prediction is thought to need a tenth of it more.
        """
        joined = bisect_left(self.jobs, seen_s, key=lambda job: job.submit_s)
        started = min(bisect_right(self.jobs, seen_s, key=lambda job: job.start_s), joined)
        ends = [_predicted_end_s(job, seen_s) for job in self._running(started, seen_s) for _ in range(job.gpus)]
        free = [seen_s] * (self.capacity - len(ends)) + sorted(ends)
        first = seen_s
        for count, run_s in [(job.gpus, job.predicted_s) for job in self.jobs[started:joined]] + more:
            first = _take(free, count, run_s, first)
        return max(heapq.nsmallest(gpus, free)[-1], first) - seen_s

    def _running(self, started: int, now_s: float) -> list[QueuedJob]:
        return [job for job in self.jobs[:started] if job.start_s + job.run_s > now_s]

    def recent_waits_s(self, now_s: float, window_s: float) -> list[float]:
        """Waits of the jobs that started in the last window_s."""
        first = bisect_left(self.jobs, now_s - window_s, key=lambda job: job.start_s)
        last = bisect_left(self.jobs, now_s, key=lambda job: job.start_s)
        return [job.start_s - job.submit_s for job in self.jobs[first:last]]


def _predicted_end_s(job: QueuedJob, now_s: float) -> float:
    return max(job.start_s + job.predicted_s, now_s + 0.1 * job.predicted_s)


def _take(free_s: list[float], gpus: int, run_s: float, first: float) -> float:
    """Start of a gang on the GPUs that are free first, whose times of being free are renewed."""
    free_s.sort()
    start = max(first, free_s[gpus - 1])
    free_s[:gpus] = [start + run_s] * gpus
    return start


@dataclass(frozen=True)
class Submission:
    """What a chooser knows of a job. run_s: (types,) predicted, infinite where it cannot run."""

    now_s: float
    gpus: int
    run_s: Floats


Chooser = Callable[[list[TypeQueue], Submission], int]
"""The type that a job asks for."""


def simulate_queues(
    problem: PlacementProblem, chooser: Chooser, known_work: Floats | None = None, start_every_s: float | None = None
) -> PlacementRecord:
    """Run all jobs, each in the queue of the type that it chose.

    start_every_s: jobs start at multiples of it, as in rounds; None for at once. Run times of jobs are then rounded up
    in the queues, as a job keeps its GPUs to the end of its round.
    """
    believed = problem.work if known_work is None else known_work
    with np.errstate(divide="ignore"):
        run_s = np.where(problem.rates > 0, problem.work[:, None] / problem.rates, np.inf)
        predicted_s = np.where(problem.rates > 0, believed[:, None] / problem.rates, np.inf)
    queues = [TypeQueue(int(gpus)) for gpus in problem.capacity]
    start, end = np.zeros(len(problem)), np.zeros(len(problem))
    begin = float(problem.submit_s.min())
    for row in np.argsort(problem.submit_s, kind="stable"):
        now, gpus = float(problem.submit_s[row]) - begin, int(problem.gpus[row])
        kind = chooser(queues, Submission(now, gpus, predicted_s[row]))
        step = start_every_s
        job = queues[kind].add(
            now,
            gpus,
            float(run_s[row, kind]) if step is None else float(np.ceil(run_s[row, kind] / step) * step),
            float(predicted_s[row, kind]),
            0.0 if step is None else float(np.ceil(now / step) * step),
        )
        start[row] = begin + job.start_s
        end[row] = start[row] + run_s[row, kind]
    nothing: Ints = np.zeros(len(problem), dtype=np.int64)
    return PlacementRecord(start, end, nothing, np.zeros(0))


def fastest_type(_: list[TypeQueue], job: Submission) -> int:
    """Everyone asks for their own fastest type."""
    return int(job.run_s.argmin())


@dataclass(frozen=True)
class _KnownTime:
    """A predicted run time in the form that decide_type takes."""

    gpu_type: str
    run_s: float
    runs: int = 0
    source: str = "specifications"

    @property
    def low_s(self) -> float:
        return self.run_s

    @property
    def high_s(self) -> float:
        return self.run_s

    @property
    def longest_s(self) -> float:
        return self.run_s


def least_end(waits_s: Sequence[float], run_s: Sequence[float]) -> int:
    """The type that decide_type advises to a job that accepts all on which its run time is finite.

    The waits and run times count as exact, and any gain counts: a job has no type of its own that it would keep.
    """
    names = {f"{kind:03}": kind for kind, each_s in enumerate(run_s) if np.isfinite(each_s)}
    times = [_KnownTime(name, run_s[kind]) for name, kind in names.items()]
    waits = [TypeWait(name, waits_s[kind], waits_s[kind], waits_s[kind], 0) for name, kind in names.items()]
    found = decide_type(times, waits, (), GpuTypeRules(now_s=0, min_gain=0.0))
    soonest = min(waits, key=lambda wait: (wait.wait_s, run_s[names[wait.gpu_type]], wait.gpu_type))
    return names[found.best.gpu_type if found else soonest.gpu_type]


class AdvisedType:
    """The type of decide_type, from snapshots of the queues that are up to snapshot_s old.

    Jobs that were advised since the snapshot count as queued where they were sent. follow: share of the jobs that do
    what they are told; the others ask for their fastest type. A job accepts every type: without advice, it goes where
    it starts first.
    """

    def __init__(self, snapshot_s: float = 600.0, follow: float = 1.0, seed: int = 0) -> None:
        self._snapshot_s, self._follow = snapshot_s, follow
        self._generator = np.random.default_rng([seed, 23])
        self._seen_s = 0.0
        self._advised: list[list[tuple[int, float]]] = []

    def __call__(self, queues: list[TypeQueue], job: Submission) -> int:
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

    def __call__(self, queues: list[TypeQueue], job: Submission) -> int:
        waits = [queue.recent_waits_s(job.now_s, self._window_s) for queue in queues]
        medians = [float(np.median(each)) if each else 0.0 for each in waits]
        return int(np.argmin(np.array(medians) + job.run_s))
