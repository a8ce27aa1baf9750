"""Read job ids as Slurm writes them, and find the jobs that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import StoreError
from almanac.units import format_moment, printable
from cli.app import App

if TYPE_CHECKING:
    from telemetry.sources.live_jobs import LiveJob

FORMS = "expected 1234, a task 1234_5, tasks 1234_[1-3], or a component 1234+1"
MOST_TASKS = 100_000
_ID = re.compile(r"(\d{1,19})(?:_(?:(\d{1,9})|\[([\d,\-]{1,200})\])|\+(\d{1,9}))?")
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma that does not stand within brackets."""


@dataclass(frozen=True)
class Named:
    """What a job id names. tasks: of an array; offset: of a heterogeneous job. Both are None for all of a job."""

    text: str
    job_id: int
    tasks: frozenset[int] | None
    offset: int | None = None

    def names(self, job: LiveJob) -> bool:
        return job.is_named(self.job_id, self.tasks, self.offset)


@dataclass(frozen=True)
class FoundJobs:
    """ids: raw ids of jobs that the caller may see, in the order named. absent: the texts that name none."""

    ids: tuple[int, ...]
    absent: tuple[str, ...]


def parse_id(text: str) -> Named:
    """ "1234", "1234_5", "1234_[1-3,7]", or "1234+1". Raises click.BadParameter."""
    match = _ID.fullmatch(text.strip())
    if not match or not text.isascii() or int(match[1]) >= 2**63:
        raise click.BadParameter(f"not a job id: {printable(text, 80)} ({FORMS})")
    tasks = match[2] or match[3]
    offset = None if match[4] is None else int(match[4])
    return Named(text.strip(), int(match[1]), frozenset(_tasks(tasks)) if tasks else None, offset)


def split_ids(texts: Sequence[str]) -> Iterator[str]:
    """The ids of "12", "12,13", and "12_[1,3],13"."""
    for text in texts:
        yield from _COMMA.split(text)


def search_jobs(app: App, texts: Sequence[str]) -> FoundJobs:
    """The jobs that are named, array ids as their tasks. Raises click.BadParameter, and what `caller_jobs` raises."""
    wanted = [parse_id(text) for text in split_ids(texts)]
    rows = app.caller_jobs.runs_named(sorted({each.job_id for each in wanted})).to_pylist()
    found = [matching(each, rows) for each in wanted]
    absent = tuple(each.text for each, ids in zip(wanted, found, strict=True) if not ids)
    return FoundJobs(tuple(dict.fromkeys(job_id for ids in found for job_id in ids)), absent)


def no_such_job(app: App, absent: Sequence[str], silence: str = "") -> StoreError:
    """The error for ids that name no job. It does not say whether another user has such a job.

    silence: why Slurm could not be asked for running jobs.
    """
    unasked = f"; Slurm could not be asked for running jobs: {printable(silence, 200)}" if silence else ""
    named = printable(", ".join(absent))
    whose = "" if app.is_operator else " of yours"
    published_s = app.caller_jobs.published_s
    if published_s is None:
        hint = f"an ended job is known once it was ingested; `almanac jobs` lists them{unasked}"
        return StoreError(f"no such job{whose} in the store: {named}", hint)
    as_of = format_moment(published_s)
    return StoreError(
        f"no such job of yours among those published for you: {named}",
        f"your newest ended GPU jobs are, last changed {as_of}; `almanac jobs` lists them. A job without GPUs"
        f" is not among them; ask an operator for others{unasked}",
    )


def _tasks(text: str) -> Iterable[int]:
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not first <= last < first + MOST_TASKS:
            raise click.BadParameter(f"not tasks of an array: {printable(text)} (expected 1-3,7)")
        yield from range(first, last + 1)


def matching(named: Named, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Raw ids by task or component; a number that is both a job's and an array's means the array."""
    of_array = _parts(named.job_id, rows, "array_job_id", "array_task_id")
    of_het = _parts(named.job_id, rows, "het_job_id", "het_offset")
    if named.tasks is not None:
        return [job_id for task, job_id in of_array if task in named.tasks]
    if named.offset is not None:
        return [job_id for offset, job_id in of_het if offset == named.offset]
    own = [(0, row["job_id"]) for row in rows if row["job_id"] == named.job_id]
    return list(dict.fromkeys(job_id for _, job_id in of_array or of_het or own))


def _parts(job_id: int, rows: Sequence[Mapping[str, Any]], whole: str, part: str) -> list[tuple[int, int]]:
    """Task or offset, and raw id, of the parts of this job, in their order."""
    return sorted({(row[part], row["job_id"]) for row in rows if row[whole] == job_id and row[part] is not None})
