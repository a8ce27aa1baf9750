"""Job ids as people write them, and which jobs each one names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac.errors import RequestError
from almanac.units import printable
from slurm.queued_job import QueuedJob

FORMS = "expected 1234, a task 1234_5, tasks 1234_[1-3], a component 1234+1, or a step 1234.0"
MOST_TASKS = 100_000
LARGEST_ID = 2**32 - 3
"""Slurm's ids have 32 bits, and the last two values mean something else."""
_ID = re.compile(
    r"(\d{1,10})(?:_(?:(\d{1,9})|\[([\d,\-]{1,200})\])|\+(\d{1,9}))?(?:\.(\d{1,10}|batch|extern|interactive))?"
)
_BETWEEN = re.compile(r"(?:,|\s+)(?![^\[]*\])")
"""A comma or blanks that do not stand within brackets."""


@dataclass(frozen=True)
class NamedJob:
    """The jobs that an id names. tasks: of an array; offset: of a heterogeneous job. Both are None for all of a job.

    step: "" for the whole job.
    """

    text: str
    job_id: int
    tasks: frozenset[int] | None = None
    offset: int | None = None
    step: str = ""

    def names(self, job: QueuedJob) -> bool:
        return job.is_named(self.job_id, self.tasks, self.offset)

    def among(self, rows: Iterable[Mapping[str, Any]]) -> list[int]:
        """Raw ids by task or component, of rows of the table jobs; a number of a job and of an array is the array."""
        rows = list(rows)
        of_array = _parts(self.job_id, rows, "array_job_id", "array_task_id")
        of_het = _parts(self.job_id, rows, "het_job_id", "het_offset")
        if self.tasks is not None:
            return [job_id for task, job_id in of_array if task in self.tasks]
        if self.offset is not None:
            return [job_id for offset, job_id in of_het if offset == self.offset]
        own = [(0, row["job_id"]) for row in rows if row["job_id"] == self.job_id]
        return list(dict.fromkeys(job_id for _, job_id in of_array or of_het or own))


def _parts(job_id: int, rows: Sequence[Mapping[str, Any]], whole: str, part: str) -> list[tuple[int, int]]:
    """Task or offset, and raw id, of the parts of this job, in their order."""
    return sorted({(row[part], row["job_id"]) for row in rows if row[whole] == job_id and row[part] is not None})


def named_jobs(texts: Sequence[str]) -> list[NamedJob]:
    """The jobs that "12", "12,13", "12 13", and "12_[1,3],13" name. Raises RequestError."""
    return [parse_id(part) for text in texts for part in _split(text)]


def _split(text: str) -> Iterator[str]:
    yield from _BETWEEN.split(text.strip())


def parse_id(text: str) -> NamedJob:
    """ "1234", "1234_5", "1234_[1-3,7]", "1234+1", or "1234.batch". Raises RequestError."""
    match = _ID.fullmatch(text.strip())
    if not match or not text.isascii() or not 0 < int(match[1]) <= LARGEST_ID:
        raise RequestError(f"not a job id: {printable(text, 80) or 'an empty text'}", FORMS)
    tasks = match[2] or match[3]
    offset = None if match[4] is None else int(match[4])
    return NamedJob(text.strip(), int(match[1]), frozenset(_tasks(tasks)) if tasks else None, offset, match[5] or "")


def _tasks(text: str) -> Iterable[int]:
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not first <= last < first + MOST_TASKS:
            raise RequestError(f"not tasks of an array: {printable(text, 80)}", "expected 1-3,7")
        yield from range(first, last + 1)
