"""Which pending jobs get a larger idle slice that nobody waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PendingSlice:
    """A pending job of one slice. shapes: the shape asked for. can_rise: its owner's site and release allow a change."""

    job_id: int
    shape: str
    can_rise: bool = True


@dataclass(frozen=True)
class Raise:
    """A pending job's new shape."""

    job_id: int
    old: str
    new: str


def decide_raises(pending: Sequence[PendingSlice], idle: Mapping[str, int], sizes: Sequence[str]) -> tuple[Raise, ...]:
    """Jobs to raise, in the queue's order.

    pending: every pending job of a slice or GPU, first to start first. idle: free instances by shape. sizes: shapes in
    service from the smallest up, comparable ones only (a larger one holds every job of a smaller one).
    """
    raise NotImplementedError
