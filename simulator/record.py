"""What happened in a simulation: one row a job, and the placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.free_gpus import Allocation

UNFINISHED, COMPLETED, TIMEOUT, CANCELED = 0, 1, 2, 3
"""States of a job at the end. UNFINISHED: it neither ended nor was canceled; Record.unfinished says why."""


@dataclass(frozen=True)
class Segment:
    """One uninterrupted run of a job, in [start_s, end_s)."""

    job: int
    start_s: int
    end_s: int
    allocation: Allocation


@dataclass(frozen=True)
class Record:
    """By job number. start_s: the first start, -1 where there is none; end_s: the last end, -1 likewise.

    last_start_s, allocations: of the last run. segments: the runs before it, of jobs that were preempted or lost a
    node. node_states: (time, node, state) in order of time, state one of asleep, booting, down, up. unfinished:
    reason to number of jobs.
    """

    policy: str
    start_s: npt.NDArray[np.int64]
    end_s: npt.NDArray[np.int64]
    last_start_s: npt.NDArray[np.int64]
    state: npt.NDArray[np.int8]
    preemptions: npt.NDArray[np.int32]
    allocations: Sequence[Allocation]
    segments: tuple[Segment, ...] = ()
    node_states: tuple[tuple[int, int, str], ...] = ()
    unfinished: Mapping[str, int] = field(default_factory=dict)

    def runs(self) -> list[Segment]:
        """All runs of all jobs, by job and then by time."""
        last = [
            Segment(job, int(start), int(end), self.allocations[job])
            for job, (start, end) in enumerate(zip(self.last_start_s, self.end_s, strict=True))
            if end >= 0
        ]
        return sorted([*self.segments, *last], key=lambda run: (run.job, run.start_s))


class Placements(Sequence[Allocation]):
    """Allocations by job, kept as two columns: one node and mask for most jobs."""

    def __init__(self, nodes: Sequence[int], masks: Sequence[Any]) -> None:
        self._nodes, self._masks = nodes, masks

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, job: Any) -> Any:
        if isinstance(job, slice):
            return [self[each] for each in range(*job.indices(len(self)))]
        node = self._nodes[job]
        return ((node, self._masks[job]),) if node >= 0 else self._masks[job] or ()
