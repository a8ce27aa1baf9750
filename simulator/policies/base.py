"""What a scheduling policy decides: the order of the queue, and what else it may pick. The engine does the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy.typing as npt

from simulator.cluster import Cluster
from simulator.workload import Workload

Backfill = Literal["none", "skip", "easy", "conservative"]
"""none: the first job that does not fit blocks those behind it. skip: whatever fits starts. easy: a job may start
before its turn if the first one that waits starts no later. conservative: if no job before it starts later."""

Estimate = Literal["requested", "true", "predicted"]


@dataclass(frozen=True)
class Ranking:
    """keys: by job, the smallest starts first, and the earliest submission among equals.

    expected_s: predicted run times in whole seconds; None where nothing is predicted.
    """

    keys: npt.NDArray[Any]
    expected_s: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class ClusterView:
    """What a policy sees at a tick. Each list holds job or node numbers, waiting jobs in the order of the queue."""

    now_s: int
    waiting: Sequence[int]
    running: Sequence[int]
    idle_nodes: Sequence[int]
    asleep_nodes: Sequence[int]


@dataclass(frozen=True)
class Actions:
    """keys: new keys of waiting jobs. sleep, wake: node numbers; a node with jobs stays awake."""

    keys: Mapping[int, float] = field(default_factory=dict)
    sleep: Sequence[int] = ()
    wake: Sequence[int] = ()


class Speeds(Protocol):
    """How fast jobs run where they are placed: 1 is the speed at which a job takes its run_s."""

    def __call__(self, job: int, node_set: int, neighbors: Sequence[int]) -> float:
        """Speed above 0. neighbors: jobs that share a GPU with it."""


class Policy:
    """FIFO is the base: override what differs.

    label: what it is called in results; "" for its name. estimate: the run times that a backfill plans with.
    observes: whether `start` and `end` are called. tick_s: seconds between calls of `tick`, 0 for none. slices: masks
    of positions that a slice of a GPU may take, by the workload's slice, in the order in which they are tried; a GPU
    without slices is whole. restart_s: seconds that a preempted job loses.
    """

    name: ClassVar[str] = "fifo"
    label: str = ""
    estimate: Estimate = "requested"
    backfill: Backfill = "none"
    is_preemptive: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    tick_s: int = 0
    restart_s: int = 0
    slices: Mapping[str, tuple[int, ...]] = {}
    speeds: Speeds | None = None

    def rank(self, workload: Workload, cluster: Cluster) -> Ranking | None:
        """Rank all jobs before the simulation starts; None if only `arrive` can."""
        return Ranking(workload.array("submit_s"))

    def arrive(self, jobs: Sequence[int], now_s: int) -> Ranking:
        """Rank jobs that become eligible now, in their order. Called if `rank` gave None."""
        raise NotImplementedError

    def start(self, job: int, now_s: int) -> None:
        """A job starts, or starts again."""

    def end(self, job: int, now_s: int, is_failed: bool) -> None:
        """A job that had started ends for good."""

    def tick(self, view: ClusterView) -> Actions:
        return Actions()

    def node_sets(self, job: int) -> Sequence[Sequence[int]]:
        """Groups of node sets in the order in which they are tried; () for all at once."""
        return ()

    def shares(self, job: int, neighbors: Sequence[int]) -> bool:
        """Whether a job may take a slice of a GPU on which these jobs run."""
        return True

    def victims(self, job: int, left_s: int, now_s: int, running: Sequence[int]) -> Iterator[int]:
        """Jobs to preempt for a waiting one until it fits. running: entries end << 32 | job, ascending."""
        return iter(())

    def resume_order(self, job: int, left_s: int, order: int) -> int:
        """The order of a job that was preempted, or whose node failed. order: the one it had."""
        return order
