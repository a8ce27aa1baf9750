"""What a user's runs say of their next submission: the newest of each kind that have ended, and those that run now."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from advisor.families import Families
from advisor.features import ENDED, RUNNING, Ended, Submission

NEWEST = 8
DECAY = 0.8
LOG_OVERRUN = math.log(2)
MIN_OVERRUNS = 4
_NONE_ENDED = (math.nan,) * len(ENDED)
_NONE_RUNNING = (0.0,) + (math.nan,) * (len(RUNNING) - 1)


@dataclass(slots=True)
class _Group:
    """The newest ended jobs of one group, their running figures, and when those that still run have started."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    runs: int = 0
    failed: int = 0
    last_failed: bool = False
    last_end_s: int = 0
    weighted: float = 0.0
    weight: float = 0.0
    starts: list[int] = field(default_factory=list)

    def add(self, job: Ended, log_s: float) -> None:
        """log_s: natural logarithm of its duration."""
        self.newest.append(log_s)
        self.weighted = DECAY * self.weighted + log_s
        self.weight = DECAY * self.weight + 1.0
        self.runs += 1
        self.failed += job.is_failed
        self.last_failed = job.is_failed
        self.last_end_s = job.end_s

    def stop(self, start_s: int) -> None:
        self.starts.pop(bisect.bisect_left(self.starts, start_s))

    def features(self, submit_s: int) -> tuple[float, ...]:
        return (self._ended(submit_s) if self.runs else _NONE_ENDED) + self._running(submit_s)

    def _ended(self, submit_s: int) -> tuple[float, ...]:
        """In the order of ENDED; durations as natural logarithms of seconds."""
        newest = list(self.newest)
        last2 = [math.exp(value) for value in newest[-2:]]
        return (
            math.log1p(self.runs),
            newest[-1],
            math.log(sum(last2) / len(last2)),
            statistics.median(newest[-5:]),
            self.weighted / self.weight,
            _spread(newest),
            self.failed / self.runs,
            float(self.last_failed),
            math.log1p(max(submit_s - self.last_end_s, 0)),
        )

    def _running(self, submit_s: int) -> tuple[float, ...]:
        """In the order of RUNNING: how many, and the logarithms of how long the oldest, middle and newest have run."""
        starts = self.starts
        if not starts:
            return _NONE_RUNNING
        ages = (starts[0], starts[len(starts) // 2], starts[-1])
        return (math.log1p(len(starts)), *(math.log1p(max(submit_s - start_s, 0)) for start_s in ages))


def _spread(values: Sequence[float]) -> float:
    """Population standard deviation; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum([(value - mean) ** 2 for value in values]) / len(values))


class Past:
    """The jobs that have started and ended so far, as features of the next submission see them."""

    def __init__(self, families: Families | None = None) -> None:
        """families: None for those of the name's mask."""
        self._groups: defaultdict[tuple[object, ...], _Group] = defaultdict(_Group)
        self._families = families
        self._overruns: dict[str, deque[bool]] = {}

    def start(self, job: Submission, start_s: int) -> None:
        for group in self._groups_of(job):
            bisect.insort(group.starts, start_s)

    def stop(self, job: Submission, start_s: int) -> None:
        """Of a job that was told of by start()."""
        for group in self._groups_of(job):
            group.stop(start_s)

    def absorb(self, job: Ended) -> None:
        groups, log_s = self._groups_of(job.submission), math.log(job.duration_s)
        expected = next((group for group in (groups[-1], groups[0]) if group.runs), None)
        if expected is not None:
            overran = log_s > expected.weighted / expected.weight + LOG_OVERRUN
            self._overruns.setdefault(job.submission.user, deque(maxlen=NEWEST)).append(overran)
        for group in groups:
            group.add(job, log_s)

    def overran(self, user: str) -> float:
        """Share of the user's newest ended runs that took more than twice what those before them did; 0 below 4."""
        newest = self._overruns.get(user, ())
        return sum(newest) / len(newest) if len(newest) >= MIN_OVERRUNS else 0.0

    def features(self, job: Submission) -> tuple[float, ...]:
        """In the order of NUMBERS; NaN where nothing is known."""
        values = [*_requested(job)]
        family = self._families.find(job.user, job.name_key) if self._families else job.name_key
        for key in _groups(job, family):
            group = self._groups.get(key)
            values.extend(group.features(job.submit_s) if group else _NONE_ENDED + _NONE_RUNNING)
        return tuple(values)

    def _groups_of(self, job: Submission) -> list[_Group]:
        family = self._families.join(job.user, job.name_key) if self._families else job.name_key
        return [self._groups[key] for key in _groups(job, family)]


def _groups(job: Submission, family: str) -> tuple[tuple[object, ...], ...]:
    """In the order of SCOPES."""
    return (
        (job.user,),
        (job.user, family),
        (job.user, job.shape),
        (job.user, family, job.shape, job.time_limit_s if job.time_limit_s > 0 else None),
        (job.user, job.is_scheduled),
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
        float(job.is_scheduled),
    )
