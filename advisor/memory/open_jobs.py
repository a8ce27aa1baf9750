"""Count the submissions of a name that have not ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from advisor.duration.features import SubmittedJob


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
    """By key the submissions that have not ended; a key without any is forgotten."""

    def __init__(self) -> None:
        super().__init__(_Open)

    def end(self, key: str, job: SubmittedJob) -> None:
        still_open = self.get(key)
        if still_open is not None and still_open.end(job):
            del self[key]

    def number(self, key: str, job: SubmittedJob) -> int:
        return self[key].number(job) if key in self else 0
