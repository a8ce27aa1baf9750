"""Features of the duration model: a job at its submission, and its user's past runs.

One path serves replay (a sweep over time) and a live request (the user's own rows, in the same order): a job counts
as ended once it has ended before the submission, as running once it has started before it, and only for its own
user, so that one user's rows are enough to repeat the numbers of training to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from almanac.config import Config, Tier
from almanac.records import JobRequest
from almanac.tiers import requested_tier
from slurm.states import NODE_FAILED, PART_OF_JOB

ROUND_S, SCHEDULED_WITHIN_S = 1800, 60
"""A submission in the first minute of a full or half hour is a timer's, as cron's are, or may be."""
CATEGORIES = ("user", "account", "partition", "qos", "name_key", "tier")
_REQUESTED = (
    "gpu_count",
    "node_count",
    "cpu_count",
    "cpus_per_gpu",
    "log_time_limit",
    "is_array",
    "hour",
    "weekday",
    "is_scheduled",
)
SCOPES = ("user", "family", "shape", "twin", "clock")
ENDED = (
    "log_runs",
    "log_last",
    "log_mean2",
    "log_median5",
    "decayed",
    "spread",
    "failed",
    "last_failed",
    "log_since_s",
)
RUNNING = ("running", "log_oldest_s", "log_middle_s", "log_youngest_s")
NUMBERS = _REQUESTED + tuple(f"{scope}_{name}" for scope in SCOPES for name in ENDED + RUNNING)
_PLACES = {name: place for place, name in enumerate(NUMBERS)}


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job as Slurm knows it at submission. gpu_type is left out: accounting names what was allocated."""

    user: str
    account: str
    partition: str
    qos: str
    name_key: str
    tier: str
    gpu_count: int
    node_count: int
    cpu_count: int
    time_limit_s: float
    is_array: bool
    submit_s: int
    script_key: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.gpu_count, self.node_count, self.cpu_count)

    @property
    def is_scheduled(self) -> bool:
        return self.submit_s % ROUND_S < SCHEDULED_WITHIN_S

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order of CATEGORIES."""
        return (self.user, self.account, self.partition, self.qos, self.name_key, self.tier)


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that is over: its submission, how long it ran and how it went."""

    submission: SubmittedJob
    end_s: int
    duration_s: float
    is_failed: bool


def submission_of(request: JobRequest, tiers: Sequence[Tier]) -> SubmittedJob:
    """A live request as the history would record it."""
    tier = requested_tier(request, tiers)
    return SubmittedJob(
        user=request.user,
        account=request.account,
        partition=request.partition,
        qos=request.qos,
        name_key=request.name_key,
        tier=tier.name if tier else "",
        gpu_count=request.gpu_count,
        node_count=request.node_count,
        cpu_count=request.cpu_count,
        time_limit_s=math.nan if request.time_limit_s is None else float(request.time_limit_s),
        is_array=request.is_array,
        submit_s=request.submit_s,
        script_key=request.script_key,
    )


def submissions(history: pd.DataFrame) -> list[SubmittedJob]:
    """One per row of the history frame, in its order."""
    texts = [texts_of(history[name]) for name in CATEGORIES]
    counts = [history[name].fillna(0).astype("int64").tolist() for name in ("gpu_count", "node_count", "cpu_count")]
    limits = history["time_limit_s"].astype("float64").tolist()
    arrays = history["is_array"].fillna(False).astype(bool).tolist()
    submits = history["submit_s"].astype("int64").tolist()
    scripts = texts_of(history["script_key"]) if "script_key" in history else [""] * len(history)
    return [SubmittedJob(*row) for row in zip(*texts, *counts, limits, arrays, submits, scripts, strict=True)]


def texts_of(column: pd.Series[Any]) -> list[str]:
    """Equal texts are one object: 400,000 rows with six of their own each would take 150 MiB."""
    codes, values = pd.factorize(column)
    shared = [*map(str, values), ""]  # a missing value's code is -1
    return [shared[code] for code in codes.tolist()]


def is_packed(history: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Row by row, True if the job is known to have run several tasks on each GPU."""
    if "is_packed" not in history:
        return np.zeros(len(history), dtype=bool)
    found: npt.NDArray[np.bool_] = history["is_packed"].isin([True]).to_numpy(dtype=bool)
    return found


def ended_jobs(history: pd.DataFrame, jobs: Sequence[SubmittedJob] | None = None) -> list[EndedJob | None]:
    """One per row of the history frame, in its order; None for a job that is still running, and for a part of one.

    jobs: the rows' submissions, where the caller has them.
    """
    ends = history["end_s"].astype("float64").tolist()
    durations = history["elapsed_s"].astype("float64").tolist()
    states = history["state"].fillna("").astype(str).tolist()
    return [
        None
        if math.isnan(end) or math.isnan(duration) or state in _NO_RUN
        else EndedJob(job, int(end), max(duration, 1.0), not state.startswith("COMPLETED"))
        for job, end, duration, state in zip(jobs or submissions(history), ends, durations, states, strict=True)
    ]


def outcomes(ended: pd.DataFrame) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """(duration_s, is_failed) of jobs that have ended, row by row as `ended_jobs` has them."""
    codes, states = pd.factorize(ended["state"])
    failed = np.array([*(not str(state).startswith("COMPLETED") for state in states), True])  # a missing state's is -1
    return np.maximum(ended["elapsed_s"].to_numpy(dtype="float64"), 1.0), failed[codes]


_NO_RUN = PART_OF_JOB | set(NODE_FAILED)
"""States whose run time is not the job's: parts of it, and those that a node ended."""
HISTORY_COLUMNS = (
    *CATEGORIES,
    *("gpu_count", "node_count", "cpu_count", "time_limit_s", "is_array", "job_id"),
    *("submit_s", "start_s", "end_s", "elapsed_s", "state"),
)
"""Of the history frame what submissions, ended jobs and events are read from."""


def has_ended(history: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Row by row, True if ended_jobs() has a job."""
    is_timed = history["end_s"].notna() & history["elapsed_s"].notna()
    ended: npt.NDArray[np.bool_] = (is_timed & ~history["state"].isin(_NO_RUN)).to_numpy(dtype=bool)
    return ended


def without_parts(history: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of whole jobs, running ones included, without parts of requeued or resized jobs."""
    return history[~history["state"].fillna("").isin(PART_OF_JOB)]


def submitted_by(history: pd.DataFrame, now_s: int, history_days: int) -> pd.DataFrame:
    """The history as it was at now_s: what had been submitted, pending jobs too, with the end of what had ended.

    Parts of a job are left out, and so is what was submitted more than history_days ago and has no end: accounting has
    lost it.
    """
    submit_s, end_s = (history[name].to_numpy(dtype="float64", na_value=math.nan) for name in ("submit_s", "end_s"))
    end_s = np.where(end_s < now_s, end_s, math.nan)
    is_lost = np.isnan(end_s) & (submit_s < now_s - history_days * 86_400)
    is_part = history["state"].isin(_NO_RUN).to_numpy(dtype=bool)
    return _taken(history, (submit_s < now_s) & ~is_part & ~is_lost, end_s)


def known_at(history: pd.DataFrame, now_s: int) -> pd.DataFrame:
    """The history as it was at now_s: what had started, with the end of what had ended; in one order of rows."""
    start_s, end_s = (history[name].to_numpy(dtype="float64", na_value=math.nan) for name in ("start_s", "end_s"))
    return _taken(history, start_s < now_s, np.where(end_s < now_s, end_s, math.nan))


def _taken(history: pd.DataFrame, is_in: npt.NDArray[np.bool_], end_s: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Return these rows with these ends, by submission: one copy, for each more of 400,000 rows takes 100 MiB."""
    rows = np.flatnonzero(is_in)
    keys = [history[name].to_numpy()[rows] for name in ("start_s", "job_id", "submit_s")]
    rows = rows[np.lexsort(keys)]
    return history.take(rows).reset_index(drop=True).assign(end_s=end_s[rows])


class Event(IntEnum):
    """Kinds of events, in the order of those of one second: a submission sees no other event of its second.

    LOOK is the last look at a job that waited, right before it starts.
    """

    SUBMIT = 0
    LOOK = 1
    START = 2
    END = 3


_EVENTS = tuple(Event)


def events(history: pd.DataFrame) -> Iterator[tuple[int, Event]]:
    """(row, event) in order of time, whatever the frame's order; equal times go by event, then by job id.

    A job that ends before it starts counts as one that never ran.
    """
    return in_order(history, event_times(history))


def event_times(history: pd.DataFrame) -> npt.NDArray[np.float64]:
    """(events, rows), s since 1970; NaN where there is no such event, and for all of LOOK."""
    times = [history[name].to_numpy(dtype="float64", na_value=math.nan) for name in ("submit_s", "start_s", "end_s")]
    submit_s, start_s, end_s = times
    return np.array([submit_s, np.full(len(history), math.nan), np.where(start_s > end_s, math.nan, start_s), end_s])


def in_order(history: pd.DataFrame, times: npt.NDArray[np.float64]) -> Iterator[tuple[int, Event]]:
    """The events that have a time, as events() gives them. times: of event_times."""
    kind = np.repeat(np.arange(len(times)), len(history))
    job_id, submit_s = (np.tile(history[name].to_numpy(), len(times)) for name in ("job_id", "submit_s"))
    time = times.ravel()
    there = np.flatnonzero(~np.isnan(time))
    order = there[np.lexsort((submit_s[there], job_id[there], kind[there], time[there]))]
    rows, kinds = (order % max(len(history), 1)).tolist(), kind[order].tolist()
    return ((row, _EVENTS[which]) for row, which in zip(rows, kinds, strict=True))


def sweep(history: pd.DataFrame) -> Iterator[tuple[int, bool]]:
    """(row, is_end) of every submission and end, in order of time, whatever the frame's order.

    What is submitted in the second in which another job ends does not know of that end yet; equal times go by
    job id.
    """
    return ((row, event is Event.END) for row, event in events(history) if event is not Event.START)


Rows = npt.NDArray[np.bool_] | npt.NDArray[np.intp]
"""Rows: a mask, or their numbers."""


@dataclass(frozen=True)
class Features:
    """Features of jobs. numbers: (jobs, NUMBERS), NaN if unknown. categories: (jobs, CATEGORIES) of str."""

    numbers: npt.NDArray[np.float64]
    categories: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.numbers)

    def number(self, name: str) -> npt.NDArray[np.float64]:
        """A column of NUMBERS. Raises KeyError."""
        return self.numbers[:, _PLACES[name]]

    def first_known(self, *names: str) -> npt.NDArray[np.float64]:
        """Of these columns of NUMBERS the first known value of each row; NaN without one."""
        found = self.number(names[0])
        for name in names[1:]:
            found = np.where(np.isnan(found), self.number(name), found)
        return found

    def category(self, name: str) -> list[str]:
        """A column of CATEGORIES. Raises ValueError."""
        column: list[str] = self.categories[:, CATEGORIES.index(name)].tolist()
        return column

    def select(self, rows: Rows) -> Features:
        return Features(self.numbers[rows], self.categories[rows])


def features_of(jobs: Sequence[SubmittedJob], numbers: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> Features:
    """Join jobs and their numbers, as SubmissionHistory.features gave them, one tuple a job."""
    categories = np.empty((len(jobs), len(CATEGORIES)), dtype=object)
    for row, job in enumerate(jobs):
        categories[row] = job.categories
    return Features(np.asarray(numbers, dtype="float64").reshape(len(jobs), len(NUMBERS)), categories)


@dataclass(frozen=True)
class AdviceRequest:
    """A submission at request.submit_s, the submitting user's own jobs, and the settings.

    history: load_history(..., running=True) of that user.
    """

    request: JobRequest
    history: pd.DataFrame
    config: Config

    @cached_property
    def job(self) -> SubmittedJob:
        return submission_of(self.request, self.config.tiers)
