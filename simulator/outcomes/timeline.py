"""The cluster over time: busy GPUs, free GPUs on partly used nodes, and waiting jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.record import CANCELED, Record
from simulator.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BINS = 240


@dataclass(frozen=True)
class Timeline:
    """Means over bins of equal width. edges_s: (BINS + 1,) times; the others: (BINS,).

    fragmented_gpus: free GPUs on nodes that are partly used. A GPU that several jobs share counts once for each, up
    to the GPUs of its node.
    """

    edges_s: Floats
    gpus: int
    busy_gpus: Floats
    fragmented_gpus: Floats
    waiting_jobs: Floats

    @property
    def utilization(self) -> float:
        """Mean share of busy GPUs."""
        return float(self.busy_gpus.mean() / self.gpus)

    @property
    def fragmentation(self) -> float:
        """Mean share of GPUs that are free on partly used nodes."""
        return float(self.fragmented_gpus.mean() / self.gpus)


def timeline(workload: Workload, cluster: Cluster, record: Record, first: int = 0) -> Timeline:
    """From the submission of job number `first` to the last submission; to the last end if all come at once."""
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
