"""Job ids as people write them: 1234, a task 1234_5, or tasks 1234_[1-3,7]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from almanac.units import printable

if TYPE_CHECKING:
    from telemetry.sources.live_jobs import LiveJob

_ID = re.compile(r"(\d{1,18})(?:_(?:(\d{1,9})|\[([\d,\-]{1,200})\]))?")
MOST_TASKS = 100_000


@dataclass(frozen=True)
class Named:
    """What a job id names: tasks is None for a whole array, or a plain job."""

    text: str
    job_id: int
    tasks: frozenset[int] | None

    def names(self, job: LiveJob) -> bool:
        return job.is_named(self.job_id, self.tasks)


def parse_id(text: str) -> Named:
    """ "1234", "1234_5" or "1234_[1-3,7]". Raises click.BadParameter."""
    match = _ID.fullmatch(text.strip())
    if not match or not text.isascii():
        raise click.BadParameter(f"not a job id: {printable(text)} (expected 1234, 1234_5 or 1234_[1-3])")
    tasks = match[2] or match[3]
    return Named(text, int(match[1]), frozenset(_tasks(tasks)) if tasks else None)


def _tasks(text: str) -> Iterable[int]:
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not first <= last < first + MOST_TASKS:
            raise click.BadParameter(f"not tasks of an array: {printable(text)} (expected 1-3,7)")
        yield from range(first, last + 1)


def matching(named: Named, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Raw ids by task; a number that is both a job's and an array's means the array."""
    known = {
        (row["array_job_id"], row["array_task_id"], row["job_id"])
        for row in rows
        if named.job_id in (row["job_id"], row["array_job_id"])
    }
    tasks = sorted((task, job_id) for array, task, job_id in known if array == named.job_id and task is not None)
    if named.tasks is not None:
        return [job_id for task, job_id in tasks if task in named.tasks]
    return [job_id for _, job_id in tasks] or sorted({job_id for _, _, job_id in known if job_id == named.job_id})
