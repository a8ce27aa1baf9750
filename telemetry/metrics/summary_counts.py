"""What a summary looked at, as numbers and in words."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa

from almanac.units import format_count
from telemetry.metrics.steps import StepCounts


@dataclass
class SummaryCounts:
    """What one run looked at. samples_without_job: in the span, and of no ended job whose GPUs are known.

    days: those that had changed since they were last looked at (UTC, YYYY-MM-DD).
    """

    jobs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    attributed_by: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    samples_without_job: int = 0
    days: list[str] = field(default_factory=list)
    steps: StepCounts = field(default_factory=StepCounts)

    def count_jobs(self, outcomes: Collection[tuple[str, str | None]]) -> None:
        """Count the verdicts of jobs, and where their GPUs are known from."""
        self.jobs = len(outcomes)
        self.verdicts = Counter(verdict for verdict, _ in outcomes)
        self.attributed_by = Counter(origin for _, origin in outcomes if origin)

    def as_dict(self) -> dict[str, Any]:
        # dataclasses.asdict turns a Counter into one keyed by its items (Python 3.11).
        shown = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {**shown, "steps": self.steps.as_dict()}

    def lines(self) -> list[str]:
        """For a person: jobs by verdict, samples that belong to no job, and the days that had changed."""
        verdicts = ", ".join(f"{format_count(number)} {verdict}" for verdict, number in self.verdicts.most_common())
        return [
            f"metrics: {format_count(self.jobs)} jobs" + (f": {verdicts}" if verdicts else ""),
            f"  samples: {format_count(self.samples)} read, {format_count(self.samples_without_job)} of no job",
            *self.steps.lines(),
            f"  days that had changed: {', '.join(_ranges(self.days)) or 'none'}",
        ]


def _ranges(days: Iterable[str]) -> Iterator[str]:
    """Days (YYYY-MM-DD, in order) that follow each other as "first to last"."""
    numbers = [dt.date.fromisoformat(day).toordinal() for day in days]
    for block in day_blocks(numbers):
        first, last = (dt.date.fromordinal(number).isoformat() for number in (block[0], block[-1]))
        yield first if first == last else f"{first} to {last}"


def day_blocks(days: Iterable[int]) -> Iterator[list[int]]:
    """Days in order, those that follow each other together."""
    for _, group in groupby(enumerate(sorted(days)), key=lambda item: item[1] - item[0]):
        yield [day for _, day in group]


def verdicts_of(jobs: pa.Table) -> Mapping[tuple[int, int], tuple[str, str | None]]:
    columns = (jobs[name].to_pylist() for name in ("job_id", "submit_s", "verdict", "attributed_by"))
    return {(job_id, submit_s): (verdict, origin) for job_id, submit_s, verdict, origin in zip(*columns, strict=True)}
