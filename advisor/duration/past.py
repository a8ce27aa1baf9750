"""A user's past for a job that has not started: the newest runs of each kind that have ended, and those that run."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.features import (
    ENDED,
    ROUND_S,
    RUNNING,
    SCHEDULED_WITHIN_S,
    EndedJob,
    SubmittedJob,
    outcomes,
    texts_of,
)

NEWEST = 8
DECAY = 0.8
Shape = tuple[int, int, int]
Keys = tuple[tuple[object, ...], ...]
"""Keys of a job's groups, in the order of SCOPES."""
_OF_GROUPS = ("user", "name_key", "gpu_count", "node_count", "cpu_count", "time_limit_s")
"""Columns that Keys are made of, with the time of submission."""
_NONE_ENDED = (math.nan,) * len(ENDED)
_NONE_RUNNING = (0.0,) + (math.nan,) * (len(RUNNING) - 1)


def _weights() -> list[float]:
    """Sums of 1, DECAY, DECAY², ... by how many there are, until a further one changes no bit."""
    sums = [0.0]
    while len(sums) < 2 or sums[-1] != sums[-2]:
        sums.append(DECAY * sums[-1] + 1.0)
    return sums


_WEIGHTS = _weights()


@dataclass(slots=True)
class _Group:
    """The newest ended jobs of one group, their running figures, and when those that still run have started."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    runs: int = 0
    failed: int = 0
    last_failed: bool = False
    last_end_s: int = 0
    weighted: float = 0.0
    starts: list[int] = field(default_factory=list)
    _figures: tuple[float, ...] | None = None
    """Of _ended without the last, until the next end."""

    def add(self, job: EndedJob, log_s: float) -> None:
        """log_s: natural logarithm of its duration."""
        self._figures = None
        self.newest.append(log_s)
        self.weighted = DECAY * self.weighted + log_s
        self.runs += 1
        self.failed += job.is_failed
        self.last_failed = job.is_failed
        self.last_end_s = job.end_s

    def add_all(self, logs: Sequence[float], failed: int, last_failed: bool, last_end_s: int) -> None:
        """Add at least one job, oldest end first. failed: how many of them failed."""
        self._figures = None
        weighted = self.weighted
        for log_s in logs:
            weighted = DECAY * weighted + log_s
        self.weighted = weighted
        self.newest.extend(logs[-NEWEST:])
        self.runs += len(logs)
        self.failed += failed
        self.last_failed, self.last_end_s = last_failed, last_end_s

    @property
    def decayed(self) -> float:
        """Mean of at least one logarithm; the newer, the heavier."""
        return self.weighted / _WEIGHTS[min(self.runs, len(_WEIGHTS) - 1)]

    def stop(self, start_s: int) -> None:
        self.starts.pop(bisect.bisect_left(self.starts, start_s))

    def features(self, at_s: int) -> tuple[float, ...]:
        return (self._ended(at_s) if self.runs else _NONE_ENDED) + self._running(at_s)

    def _ended(self, at_s: int) -> tuple[float, ...]:
        """In the order of ENDED; durations as natural logarithms of seconds."""
        if self._figures is None:
            newest = list(self.newest)
            last2 = [math.exp(value) for value in newest[-2:]]
            self._figures = (
                math.log1p(self.runs),
                newest[-1],
                math.log(sum(last2) / len(last2)),
                _median(newest[-5:]),
                self.decayed,
                _spread(newest),
                self.failed / self.runs,
                float(self.last_failed),
            )
        return (*self._figures, math.log1p(max(at_s - self.last_end_s, 0)))

    def _running(self, at_s: int) -> tuple[float, ...]:
        """In the order of RUNNING: how many, and the logarithms of how long the oldest, middle and newest have run."""
        starts = self.starts
        if not starts:
            return _NONE_RUNNING
        ages = (starts[0], starts[len(starts) // 2], starts[-1])
        return (math.log1p(len(starts)), *(math.log1p(max(at_s - start_s, 0)) for start_s in ages))


def _median(values: Sequence[float]) -> float:
    """Of at least one value; statistics.median takes three times as long."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _spread(values: Sequence[float]) -> float:
    """Population standard deviation; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum([(value - mean) ** 2 for value in values]) / len(values))


class SubmissionHistory:
    """The jobs that have started and ended so far, as features of the next job see them."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[object, ...], _Group] = defaultdict(_Group)

    def start(self, job: SubmittedJob, start_s: int) -> None:
        for group in self._groups_of(job):
            bisect.insort(group.starts, start_s)

    def stop(self, job: SubmittedJob, start_s: int) -> None:
        """Observe the end of a job that start() observed."""
        for group in self._groups_of(job):
            group.stop(start_s)

    def absorb(self, job: EndedJob, start_s: int | None = None) -> None:
        """Observe the end of a job. start_s: the start that start() received for it; None if start() did not see it."""
        groups, log_s = self._groups_of(job.submission), math.log(job.duration_s)
        if start_s is not None:
            for group in groups:
                group.stop(start_s)
        for group in groups:
            group.add(job, log_s)

    def absorb_all(self, ended: pd.DataFrame) -> None:
        """Observe the ends of these rows of the history frame, oldest first, as absorb() does, but quicker."""
        kinds, keys = self._kinds(ended)
        durations_s, is_failed = outcomes(ended)
        logs = np.array(list(map(math.log, durations_s.tolist())))
        ends: npt.NDArray[np.int64] = ended["end_s"].to_numpy(dtype="int64")
        for scope in zip(*keys, strict=True):
            numbers, names = _numbered(scope)
            rows, edges = by_number(numbers[kinds])
            newest = rows[np.array(edges[1:], dtype="intp") - 1]
            failed = np.diff(np.append(0, np.cumsum(is_failed[rows], dtype="int64"))[edges])
            outcome = (failed.tolist(), is_failed[newest].tolist(), ends[newest].tolist())
            found = [names[number] for number in numbers[kinds[newest]].tolist()]
            by_group = logs[rows].tolist()
            for key, (first, last), *of_group in zip(found, itertools.pairwise(edges), *outcome, strict=True):
                self._groups[key].add_all(by_group[first:last], *of_group)

    def features(self, job: SubmittedJob, at_s: int) -> tuple[float, ...]:
        """Return a job's features at a time from its submission on, in the order of NUMBERS; NaN where unknown."""
        values = [*_requested(job)]
        for key in _groups(job.user, job.name_key, job.shape, job.time_limit_s, job.is_scheduled):
            group = self._groups.get(key)
            values.extend(group.features(at_s) if group else _NONE_ENDED + _NONE_RUNNING)
        return tuple(values)

    def _groups_of(self, job: SubmittedJob) -> list[_Group]:
        keys = _groups(job.user, job.name_key, job.shape, job.time_limit_s, job.is_scheduled)
        return [self._groups[key] for key in keys]

    def _kinds(self, ended: pd.DataFrame) -> tuple[npt.NDArray[np.intp], list[Keys]]:
        """A number for each row, in the order in which they first appear, and the keys of the groups of each number."""
        is_scheduled = ended["submit_s"].to_numpy(dtype="int64") % ROUND_S < SCHEDULED_WITHIN_S
        kinds: npt.NDArray[np.intp] = is_scheduled.astype("intp")
        number = 2
        for name in _OF_GROUPS:
            values, distinct = pd.factorize(ended[name])
            if number * (len(distinct) + 1) > 2**62:
                kinds, number = pd.factorize(kinds)[0], len(kinds)
            kinds, number = kinds * (len(distinct) + 1) + values + 1, number * (len(distinct) + 1)
        kinds = pd.factorize(kinds)[0]
        first = np.flatnonzero(np.diff(np.maximum.accumulate(kinds), prepend=-1))
        rows = ended[list(_OF_GROUPS)].iloc[first]
        users, names = (texts_of(rows[name]) for name in _OF_GROUPS[:2])
        shapes = zip(*(rows[name].fillna(0).astype("int64").tolist() for name in _OF_GROUPS[2:5]), strict=True)
        limits = rows["time_limit_s"].astype("float64").tolist()
        return kinds, list(map(_groups, users, names, shapes, limits, is_scheduled[first].tolist()))


def _numbered(keys: Iterable[Hashable]) -> tuple[npt.NDArray[np.intp], list[Hashable]]:
    """A number for each key, and the key of each number."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype="intp"), list(numbers)


def by_number(numbers: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], list[int]]:
    """Return the rows sorted by number, stable, and the places at which each number begins, with the end."""
    # Numbers of 16 bits are sorted digit by digit, in a tenth of the time.
    few = numbers.astype("uint16") if numbers.max(initial=0) < 2**16 else numbers
    order = np.argsort(few, kind="stable")
    changes = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    return order, [*changes.tolist(), len(order)]


def _groups(user: str, family: str, shape: Shape, time_limit_s: float, is_scheduled: bool) -> Keys:
    """In the order of SCOPES."""
    return (
        (user,),
        (user, family),
        (user, shape),
        (user, family, shape, time_limit_s if time_limit_s > 0 else None),
        (user, is_scheduled),
    )


def _requested(job: SubmittedJob) -> tuple[float, ...]:
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
        float(job.is_scheduled),
    )
