"""The result of every simulation: outcomes of each job, and the use of the cluster over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.simulation import CANCELED, Record
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]
BINS = 240


@dataclass(frozen=True)
class Timeline:
    """Means over bins of equal width. edges_s: (BINS + 1,) times; the others: (BINS,).

    fragmented_gpus: free GPUs on nodes that are partly used. busy_gpu_s: sum over all runs, also outside of the bins.
    """

    edges_s: Floats
    gpus: int
    busy_gpus: Floats
    fragmented_gpus: Floats
    waiting_jobs: Floats
    busy_gpu_s: float


def timeline_of(workload: Workload, cluster: Cluster, record: Record, first: int = 0) -> Timeline:
    """Return the timeline from the submission of job number `first` to the last submission.

    It goes to the last end if all jobs are submitted at once.
    """
    submit_s = workload.array("submit_s")
    since_s, until_s = int(submit_s[first]), int(submit_s[-1])
    if until_s == since_s:
        until_s = max(since_s + 1, int(record.end_s.max()))
    edges_s = np.linspace(since_s, until_s, BINS + 1)
    time_s, busy, used = _gpu_changes(cluster, record)
    waiting = _waiting_changes(workload, record)
    busy_gpus = _means(time_s, busy, edges_s)
    return Timeline(
        edges_s=edges_s,
        gpus=cluster.gpu_count,
        busy_gpus=busy_gpus,
        fragmented_gpus=_means(time_s, used, edges_s) - busy_gpus,
        waiting_jobs=_means(*waiting, edges_s),
        busy_gpu_s=-float((time_s * busy).sum()),
    )


def _means(time_s: Ints, changes: Ints, edges_s: Floats) -> Floats:
    """Means between edges of a level that starts at 0 and changes at these times."""
    order = np.argsort(time_s, kind="stable")
    ends = (edges_s[0], edges_s[-1])
    times = np.concatenate([time_s[order], [max(ends[1], time_s.max(initial=0)) + 1]]).astype("float64")
    levels = np.cumsum(changes[order]).astype("float64")
    area = np.concatenate([[0.0], np.cumsum(levels * np.diff(times))])
    means: Floats = np.diff(np.interp(edges_s, times, area)) / np.diff(edges_s)
    return means


def _gpu_changes(cluster: Cluster, record: Record) -> tuple[Ints, Ints, Ints]:
    """Times, and by how much the busy GPUs change then, and the GPUs of nodes in use."""
    runs = np.array(list(_node_runs(record)), dtype="int64").reshape(-1, 4)
    node = np.concatenate([runs[:, 0], runs[:, 0]])
    time_s = np.concatenate([runs[:, 1], runs[:, 2]])
    change = np.concatenate([runs[:, 3], -runs[:, 3]])
    order = np.lexsort((-change, time_s, node))
    node, time_s, change = node[order], time_s[order], change[order]
    sizes = np.array(cluster.gpus_by_node(), dtype="int64")[node]
    # Each node ends with no busy GPU, so that one sum over all nodes starts each node at 0.
    in_use = np.cumsum(change)
    busy, used = np.minimum(in_use, sizes), np.where(in_use > 0, sizes, 0)
    return time_s, np.diff(busy, prepend=0), np.diff(used, prepend=0)


def _node_runs(record: Record) -> Iterator[tuple[int, int, int, int]]:
    """(node, start, end, GPUs) of each run on each of its nodes."""
    for job, (start_s, end_s) in enumerate(zip(record.last_start_s.tolist(), record.end_s.tolist(), strict=True)):
        if end_s >= 0:
            for node, mask in record.allocations[job]:
                yield node, start_s, end_s, mask.bit_count()
    for segment in record.segments:
        for node, mask in segment.allocation:
            yield node, segment.start_s, segment.end_s, mask.bit_count()


def _waiting_changes(workload: Workload, record: Record) -> tuple[Ints, Ints]:
    """Jobs join the queue at submission and after a preemption; they leave it at a start or a cancellation."""
    ended, canceled = record.end_s >= 0, record.state == CANCELED
    stops = np.array([segment.end_s for segment in record.segments], dtype="int64")
    starts = np.array([segment.start_s for segment in record.segments], dtype="int64")
    joins = np.concatenate([workload.array("submit_s"), stops])
    leaves = np.concatenate([record.last_start_s[ended], starts, workload.array("cancel_s")[canceled]])
    return np.concatenate([joins, leaves]), np.repeat([1, -1], [len(joins), len(leaves)])


Floats = npt.NDArray[np.float64]
BOUND_S = 10
"""Shorter run times count as this in the bounded slowdown (Feitelson et al., 1997)."""


@dataclass(frozen=True)
class JobOutcomes:
    """Times of jobs in a simulation, by job number, in seconds; NaN for jobs that did not start or end.

    start_s: the first start. run_s: the run time of a job that nothing slows down. ran_s: the time in which it ran.
    is_canceled: canceled by its user while it waited.
    """

    submit_s: Floats
    start_s: Floats
    end_s: Floats
    run_s: Floats
    ran_s: Floats
    is_canceled: npt.NDArray[np.bool_]

    @property
    def jct_s(self) -> Floats:
        """Job completion time, from submission to end."""
        return self.end_s - self.submit_s

    @property
    def delay_s(self) -> Floats:
        """Queueing delay: all time between submission and end in which the job did not run."""
        return self.jct_s - self.ran_s

    @property
    def slowdown(self) -> Floats:
        """Completion time over run time."""
        return self.jct_s / self.run_s

    @property
    def bounded_slowdown(self) -> Floats:
        """Slowdown with run times of BOUND_S or more."""
        return np.maximum(self.jct_s / np.maximum(self.run_s, BOUND_S), 1.0)

    @property
    def speed(self) -> Floats:
        """Mean speed of a job while it ran, relative to its own."""
        return self.run_s / self.ran_s

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """True for jobs that ended."""
        return np.isfinite(self.end_s)


def uninterrupted(
    submit_s: npt.ArrayLike, start_s: npt.ArrayLike, end_s: npt.ArrayLike, run_s: npt.ArrayLike
) -> JobOutcomes:
    """Outcomes of jobs that run from their start to their end, and that nobody cancels."""
    submit, start, end, run = (np.asarray(each, dtype="float64") for each in (submit_s, start_s, end_s, run_s))
    return JobOutcomes(submit, start, end, run, end - start, np.zeros(len(submit), dtype=bool))


def job_outcomes(workload: Workload, record: Record) -> JobOutcomes:
    ran_s = np.where(record.end_s >= 0, record.end_s - record.last_start_s, np.nan)
    for segment in record.segments:
        ran_s[segment.job] += segment.end_s - segment.start_s
    return JobOutcomes(
        submit_s=workload.array("submit_s").astype("float64"),
        start_s=np.where(record.start_s >= 0, record.start_s, np.nan),
        end_s=np.where(record.end_s >= 0, record.end_s, np.nan),
        run_s=workload.array("run_s").astype("float64"),
        ran_s=ran_s,
        is_canceled=record.state == CANCELED,
    )


@dataclass(frozen=True)
class PolicyRun:
    """Result of one simulation for scoring, whatever the jobs share: GPUs, MIG slices, or GPU types.

    busy_gpu_s: GPU-seconds with a job; a slice counts as its part of the GPU's compute slices. interruptions: times
    that running jobs were preempted, moved, or paused. unfinished: reason to number of all jobs, scored or not.
    timeline: None where a simulation keeps none. details: figures that only some simulations have.
    """

    policy: str
    jobs: JobOutcomes
    gpus: int
    busy_gpu_s: float
    interruptions: int = 0
    unfinished: Mapping[str, int] = field(default_factory=dict)
    timeline: Timeline | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first submission to the last end; 0 without an end."""
        known = self.jobs.end_s[self.jobs.is_known]
        return float(known.max() - self.jobs.submit_s.min()) if len(known) else 0.0

    @property
    def utilization(self) -> float:
        """Share of the GPUs that is busy over the timeline, or else over the makespan (Hadar's CRU)."""
        if self.timeline:
            return float(self.timeline.busy_gpus.mean() / self.gpus)
        return self.busy_gpu_s / (self.gpus * self.makespan_s) if self.makespan_s else 0.0

    def energy_kwh(self, idle_w: float, busy_w: float) -> float:
        """Energy over the makespan. The watts are those of a GPU with its part of the node."""
        return (idle_w * self.gpus * self.makespan_s + (busy_w - idle_w) * self.busy_gpu_s) / 3.6e6
