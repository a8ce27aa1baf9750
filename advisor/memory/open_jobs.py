"""Count the submissions of a name that have not ended, and keep what the running ones have shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from advisor.duration.features import SubmittedJob
from advisor.memory.runs import MeasuredRun


@dataclass
class _Open:
    """The submissions of one name that have not ended: single jobs, and tasks of arrays by when they were submitted."""

    singles: int = 0
    arrays: Counter[int] = field(default_factory=Counter)

    def number(self, job: SubmittedJob) -> int:
        """Count the open jobs that a submission meets; an array is one, and meets nothing of itself."""
        return self.singles + len(self.arrays) - (job.is_array and job.submit_s in self.arrays)

    def add(self, job: SubmittedJob) -> None:
        if job.is_array:
            self.arrays[job.submit_s] += 1
        else:
            self.singles += 1

    def end(self, job: SubmittedJob) -> bool:
        """Remove a job; True if none is left."""
        if not job.is_array:
            self.singles -= 1
        elif self.arrays[job.submit_s] > 1:
            self.arrays[job.submit_s] -= 1
        else:
            del self.arrays[job.submit_s]
        return not self.singles and not self.arrays


class OpenBy(defaultdict[str, _Open]):
    """By key the submissions that have not ended; a key without any is forgotten.

    shown: by key, the needs that running jobs have shown so far, MiB.
    """

    def __init__(self) -> None:
        super().__init__(_Open)
        self.shown: defaultdict[str, dict[int, float]] = defaultdict(dict)

    def show(self, key: str, job: SubmittedJob, run: MeasuredRun) -> None:
        """Keep what a job that still runs has needed so far; of an array, its tasks' highest."""
        shown, number = self.shown[key], job.submit_s if job.is_array else -id(run)
        shown[number] = max(run.need_mib, shown.get(number, 0.0))

    def hide(self, key: str, job: SubmittedJob, run: MeasuredRun) -> None:
        """Forget it: the job has ended."""
        if key in self.shown:
            self.shown[key].pop(job.submit_s if job.is_array else -id(run), None)

    def needs_of(self, keys: Collection[str]) -> tuple[float, ...]:
        """Return what the running jobs of these keys have shown so far, MiB."""
        return tuple([need for key in keys if key in self.shown for need in self.shown[key].values()])

    def end(self, key: str, job: SubmittedJob) -> None:
        still_open = self.get(key)
        if still_open is not None and still_open.end(job):
            del self[key]

    def number(self, key: str, job: SubmittedJob) -> int:
        return self[key].number(job) if key in self else 0
