"""What a wait is estimated from: nodes, running jobs, and waiting jobs, without names of users or jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TypeWait:
    """The wait of a job that is submitted now, seconds, and its interval. as_of_s: time of the snapshot."""

    gpu_type: str
    wait_s: float
    low_s: float
    high_s: float
    as_of_s: int


@dataclass(frozen=True)
class Span:
    """A time from now, seconds: likely, and its interval."""

    low_s: float
    likely_s: float
    high_s: float


@dataclass(frozen=True)
class PoolNode:
    """A node in service. gpus: that it has, of one type."""

    gpu_type: str
    gpus: int
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunningJob:
    """A job that holds GPUs. gpus: by index of the node. left: until it ends; limit_s: until its time limit."""

    gpus: Mapping[int, int]
    left: Span
    limit_s: float | None = None


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits, or tasks of an array that do (count).

    nodes: over which its gpus are spread evenly. types: that it accepts; empty: any. partitions: empty: any.
    is_ready: only priority and resources keep it from starting. submitted_s: seconds ago.
    """

    gpus: int
    nodes: int
    types: frozenset[str]
    run: Span
    submitted_s: float
    partitions: frozenset[str] = frozenset()
    limit_s: float | None = None
    is_ready: bool = True
    count: int = 1


@dataclass(frozen=True)
class QueueView:
    """A snapshot of the cluster. waiting: by Slurm's priority, first to start first. as_of_s: unix seconds."""

    nodes: tuple[PoolNode, ...]
    running: tuple[RunningJob, ...]
    waiting: tuple[WaitingJob, ...]
    as_of_s: int
