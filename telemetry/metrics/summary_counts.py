"""The counts of a summary, as numbers and in words."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa

from almanac.units import format_count, listed
from telemetry.metrics.steps import StepCounts


@dataclass
class HostCounts:
    """The names that each side uses: hosts of telemetry, nodes of the measured GPU jobs, and nodes of any GPU job.

    unclear: hosts that were matched with no node, because several have the same short name.
    """

    seen: set[str] = field(default_factory=set)
    measured: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    unclear: set[str] = field(default_factory=set)

    def add(self, other: HostCounts) -> None:
        for name, found in vars(other).items():
            getattr(self, name).update(found)

    @property
    def silent(self) -> list[str]:
        """Nodes of GPU jobs without telemetry; [] if there is none at all."""
        return sorted(self.measured - self.seen) if self.seen else []

    @property
    def strange(self) -> list[str]:
        """Hosts of telemetry without a GPU job; [] unless a node lacks telemetry, because idle hosts are normal."""
        return sorted(self.seen - self.known - self.unclear) if self.silent else []

    def as_dict(self) -> dict[str, list[str]]:
        return {
            "nodes_without_telemetry": self.silent,
            "hosts_without_jobs": self.strange,
            "hosts_unclear": sorted(self.unclear),
        }

    def lines(self) -> list[str]:
        """For a person; [] if every node of a GPU job has telemetry."""
        lines = []
        if self.silent:
            lines.append(f"  no telemetry from {listed(self.silent, 'node')} of GPU jobs")
        if self.strange:
            lines.append(f"  no GPU job on {listed(self.strange, 'host')} with telemetry")
        if self.unclear:
            lines.append(f"  not matched, because only the domain differs: {listed(sorted(self.unclear), 'host')}")
        return [*lines, "  try: almanac doctor, which compares these names with Slurm's nodes"] if lines else []


@dataclass
class SummaryCounts:
    """What one run looked at. samples_without_job: in the span, and of no ended job whose GPUs are known.

    days: those that had changed since they were last looked at (UTC, YYYY-MM-DD). changed_jobs: jobs with a changed
    record. kept_jobs: jobs that kept their metrics, because retention has removed older data. damaged_jobs: the same,
    because a file is damaged.
    """

    jobs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    attributed_by: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    samples_without_job: int = 0
    days: list[str] = field(default_factory=list)
    changed_jobs: int = 0
    kept_jobs: int = 0
    damaged_jobs: int = 0
    steps: StepCounts = field(default_factory=StepCounts)
    hosts: HostCounts = field(default_factory=HostCounts)

    @property
    def has_changes(self) -> bool:
        """Whether any day or job had changed."""
        return bool(self.days or self.changed_jobs)

    def count_jobs(self, outcomes: Collection[tuple[str, str | None]]) -> None:
        """Count the verdicts of jobs, and where their GPUs are known from."""
        self.jobs = len(outcomes)
        self.verdicts = Counter(verdict for verdict, _ in outcomes)
        self.attributed_by = Counter(origin for _, origin in outcomes if origin)

    def as_dict(self) -> dict[str, Any]:
        # dataclasses.asdict turns a Counter into one keyed by its items (Python 3.11).
        shown = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {**shown, "steps": self.steps.as_dict(), "hosts": self.hosts.as_dict()}

    def lines(self) -> list[str]:
        """For a person: jobs by verdict, samples that belong to no job, and the days that had changed."""
        verdicts = ", ".join(f"{format_count(number)} {verdict}" for verdict, number in self.verdicts.most_common())
        return [
            f"metrics: {format_count(self.jobs)} jobs" + (f": {verdicts}" if verdicts else ""),
            f"  samples: {format_count(self.samples)} read, {format_count(self.samples_without_job)} of no job",
            *self.hosts.lines(),
            *self.steps.lines(),
            f"  days that had changed: {', '.join(day_ranges(self.days)) or 'none'}",
            *([f"  older jobs that keep their metrics: {format_count(self.kept_jobs)}"] if self.kept_jobs else []),
            *([f"  jobs of damaged files: {format_count(self.damaged_jobs)}"] if self.damaged_jobs else []),
            *([f"  jobs that had changed: {format_count(self.changed_jobs)}"] if self.changed_jobs else []),
        ]


def day_ranges(days: Iterable[str]) -> Iterator[str]:
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
