"""Which pending jobs get a larger idle slice that nobody waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PendingSlice:
    """A pending job of one slice. shape: the one asked for. can_rise: its owner, site, and release allow a change."""

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
    """Jobs to raise, in the queue's order, each to the smallest larger shape that is idle.

    pending: every pending job of a slice or GPU, first to start first. idle: free instances by shape. sizes: shapes in
    service from the smallest up, comparable ones only (a larger one holds every job of a smaller one).
    A shape that any pending job asks for is left to those jobs. A job that finds its own shape idle is not raised.
    """
    wanted = {job.shape for job in pending}
    order = {shape: place for place, shape in enumerate(sizes)}
    free = {shape: count for shape in sizes if shape not in wanted and (count := idle.get(shape, 0)) > 0}
    own = dict(idle)
    raises = []
    for job in pending:
        if not free:
            break
        if own.get(job.shape, 0) > 0:
            own[job.shape] -= 1
        elif job.can_rise and job.shape in order:
            new = next((shape for shape in free if order[shape] > order[job.shape]), None)
            if new is not None:
                raises.append(Raise(job.job_id, job.shape, new))
                free[new] -= 1
                if not free[new]:
                    del free[new]
    return tuple(raises)
