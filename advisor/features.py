"""What is known of a job when it is submitted, and what its user's ended jobs say: the features of the duration model.

One path serves replay (`replay_features`, a sweep over time) and a live request (`Past.absorb` of the user's own
rows, then `Past.features`): a job counts only once it has ended before the submission, and only for its own user,
so that one user's rows are enough to repeat the numbers of training to the last bit.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from almanac.config import Tier
from almanac.names import name_key
from almanac.records import Request
from almanac.tiers import requested_tier

NEWEST = 8
DECAY = 0.7
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
)
_SCOPES = ("user", "family", "shape", "twin")
_AGGREGATES = ("log_runs", "log_last", "log_mean2", "log_median5", "decayed", "spread", "failed", "log_since_s")
NUMBERS = _REQUESTED + tuple(f"{scope}_{name}" for scope in _SCOPES for name in _AGGREGATES)
_UNKNOWN = (math.nan,) * len(_AGGREGATES)


@dataclass(frozen=True)
class Submission:
    """What Slurm knows when a job is submitted. gpu_type is left out: accounting names what was allocated."""

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

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.gpu_count, self.node_count, self.cpu_count)

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order of CATEGORIES."""
        return (self.user, self.account, self.partition, self.qos, self.name_key, self.tier)


@dataclass(frozen=True)
class Ended:
    """A job that is over: its submission, how long it ran and how it went."""

    submission: Submission
    end_s: int
    duration_s: float
    is_failed: bool


def submission_of(request: Request, tiers: Sequence[Tier]) -> Submission:
    """A live request as the history would record it."""
    tier = requested_tier(request, tiers)
    return Submission(
        user=request.user,
        account=request.account,
        partition=request.partition,
        qos=request.qos,
        name_key=name_key(request.job_name),
        tier=tier.name if tier else "",
        gpu_count=request.gpu_count,
        node_count=request.node_count,
        cpu_count=request.cpu_count,
        time_limit_s=math.nan if request.time_limit_s is None else float(request.time_limit_s),
        is_array=request.is_array,
        submit_s=request.submit_s,
    )


def submissions(history: pd.DataFrame) -> list[Submission]:
    """One per row of the history frame, in its order."""
    texts = [history[name].fillna("").astype(str).tolist() for name in CATEGORIES]
    counts = [history[name].fillna(0).astype("int64").tolist() for name in ("gpu_count", "node_count", "cpu_count")]
    limits = history["time_limit_s"].astype("float64").tolist()
    arrays = history["is_array"].fillna(False).astype(bool).tolist()
    submits = history["submit_s"].astype("int64").tolist()
    return [Submission(*row) for row in zip(*texts, *counts, limits, arrays, submits, strict=True)]


def ended_jobs(history: pd.DataFrame) -> list[Ended | None]:
    """One per row of the history frame, in its order; None for a job that is still running."""
    ends = history["end_s"].astype("float64").tolist()
    durations = history["elapsed_s"].astype("float64").tolist()
    failed = (~history["state"].fillna("").astype(str).str.startswith("COMPLETED")).tolist()
    return [
        None if math.isnan(end) or math.isnan(duration) else Ended(job, int(end), max(duration, 1.0), bad)
        for job, end, duration, bad in zip(submissions(history), ends, durations, failed, strict=True)
    ]


def sweep(history: pd.DataFrame) -> Iterator[tuple[int, bool]]:
    """(row, is_end) of every submission and end, in order of time, whatever the frame's order.

    What is submitted in the second in which another job ends does not know of that end yet; equal times go by
    job id.
    """
    submit_s = history["submit_s"].to_numpy(dtype="float64")
    end_s = history["end_s"].to_numpy(dtype="float64", na_value=math.nan)
    times = np.concatenate([submit_s, end_s])
    is_end = np.repeat([False, True], len(history))
    rows = np.tile(np.arange(len(history)), 2)
    job_id = np.tile(history["job_id"].to_numpy(), 2)
    order = np.lexsort((np.tile(submit_s, 2), job_id, is_end, times))
    for place in order:
        if not math.isnan(times[place]):
            yield int(rows[place]), bool(is_end[place])


@dataclass
class _Recent:
    """The newest ended jobs of one group, and their running figures."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    runs: int = 0
    failed: int = 0
    last_end_s: int = 0
    decayed: float = 0.0

    def add(self, job: Ended) -> None:
        log_s = math.log(job.duration_s)
        self.newest.append(log_s)
        self.decayed = log_s if not self.runs else DECAY * self.decayed + (1 - DECAY) * log_s
        self.runs += 1
        self.failed += job.is_failed
        self.last_end_s = job.end_s

    def aggregates(self, submit_s: int) -> tuple[float, ...]:
        """In the order of _AGGREGATES; durations as natural logarithms of seconds."""
        newest = list(self.newest)
        last2 = [math.exp(value) for value in newest[-2:]]
        return (
            math.log1p(self.runs),
            newest[-1],
            math.log(sum(last2) / len(last2)),
            statistics.median(newest[-5:]),
            self.decayed,
            _spread(newest),
            self.failed / self.runs,
            math.log1p(max(submit_s - self.last_end_s, 0)),
        )


def _spread(values: Sequence[float]) -> float:
    """Population standard deviation; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


class Past:
    """The jobs that have ended so far, as features of the next submission see them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Recent] = {}

    def absorb(self, job: Ended) -> None:
        for group in _groups(job.submission):
            self._groups.setdefault(group, _Recent()).add(job)

    def features(self, job: Submission) -> tuple[float, ...]:
        """In the order of NUMBERS; NaN where nothing is known."""
        values = [*_requested(job)]
        for group in _groups(job):
            recent = self._groups.get(group)
            values.extend(recent.aggregates(job.submit_s) if recent else _UNKNOWN)
        return tuple(values)


def _groups(job: Submission) -> tuple[tuple[object, ...], ...]:
    """In the order of _SCOPES."""
    return (
        (job.user,),
        (job.user, job.name_key),
        (job.user, job.shape),
        (job.user, job.name_key, job.shape, job.time_limit_s if job.time_limit_s > 0 else None),
    )


def _requested(job: Submission) -> tuple[float, ...]:
    day_s = job.submit_s % 86_400
    return (
        float(job.gpu_count),
        float(job.node_count),
        float(job.cpu_count),
        job.cpu_count / job.gpu_count if job.gpu_count else math.nan,
        math.log(job.time_limit_s) if job.time_limit_s > 0 else math.nan,
        float(job.is_array),
        day_s / 3600,
        float((job.submit_s // 86_400 + 3) % 7),
    )


def feature_frame(jobs: Sequence[Submission], numbers: Sequence[Sequence[float]]) -> pd.DataFrame:
    """Columns NUMBERS (float64) and CATEGORIES (text), one row per job."""
    frame = pd.DataFrame(np.array(numbers, dtype="float64").reshape(len(jobs), len(NUMBERS)), columns=list(NUMBERS))
    for place, name in enumerate(CATEGORIES):
        frame[name] = pd.Series([job.categories[place] for job in jobs], dtype="object")
    return frame
