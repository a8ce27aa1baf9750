"""Summarize the store's jobs and telemetry into job_metrics and gpu_metrics, and count what was done."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config
from almanac.units import DAY_S, format_count, listed, span_text
from slurm.states import JOB_FAILED
from telemetry.attribution.allocations import Attribution, JobRun
from telemetry.attribution.runs import depending_jobs, ended_jobs, load_runs, neighbors_of, sharing
from telemetry.attribution.seen_units import Binding, days_of
from telemetry.health.failures import errors_of_jobs
from telemetry.metrics.engine import ALWAYS, Prepared, Results, compute, prepare, with_allocations
from telemetry.metrics.partials import Mapper, Progress, map_partials, silent
from telemetry.metrics.steps import Measure, StepCounts, summarize_steps
from telemetry.store.partitions import partition_start
from telemetry.store.progress import Stale, day_text
from telemetry.store.store import ClusterStore


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
    """Counts of one run. samples_without_job: in the span, and of no ended job whose GPUs are known.

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
        """True if any day or job had changed."""
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
        yield span_text(first, last)


def day_blocks(days: Iterable[int]) -> Iterator[list[int]]:
    """Days in order, those that follow each other together."""
    for _, group in groupby(enumerate(sorted(days)), key=lambda item: item[1] - item[0]):
        yield [day for _, day in group]


def verdicts_of(jobs: pa.Table) -> Mapping[tuple[int, int], tuple[str, str | None]]:
    columns = (jobs[name].to_pylist() for name in ("job_id", "submit_s", "verdict", "attributed_by"))
    return {(job_id, submit_s): (verdict, origin) for job_id, submit_s, verdict, origin in zip(*columns, strict=True)}


_INPUTS, _OUTPUTS = ("telemetry", "bindings", "jobs"), ("job_metrics", "gpu_metrics", "steps", "step_metrics")
MOST_DAYS = 31
"""Days of telemetry looked at together: of each, some 30 MB are held for 1,800 nodes of four GPUs."""
_NOTHING = (0, 0)
"""A span without samples."""


def summarize(
    store: ClusterStore,
    config: Config,
    since_s: int | None = None,
    until_s: int | None = None,
    *,
    progress: Progress = silent,
    mapper: Mapper = map_partials,
) -> SummaryCounts:
    """Compute and store the metrics of every ended GPU job that ran on a stale day or depends on a stale run.

    With since_s or until_s instead of every one that ran in [since_s, until_s), changed or not. Such jobs are looked
    at whole, also outside the days or the span, and what is found of each does not depend on which others are looked
    at. Days and runs are closed once their jobs' metrics are stored. Jobs that a damaged file concerns keep their
    metrics, and their days stay stale. mapper: where the chunks are computed. Raises StoreError where a file cannot be
    read, BusyError where another process summarizes.
    """
    total, verdicts = SummaryCounts(), dict[tuple[int, int], tuple[str, str | None]]()
    damaged = set[int]()
    with store.summarizing():
        stale = store.stale()
        runs = load_runs(store)
        done_before = _with_final_metrics(store)
        if since_s is None and until_s is None:
            whole = ALWAYS
            blocks = [((days[0] * DAY_S, (days[-1] + 1) * DAY_S), days) for days in day_blocks(stale.days)]
            depending = (
                job
                for job in depending_jobs(runs, stale.runs)
                if (job.job_id, job.submit_s) not in done_before
                and not any(day in stale.days for day in days_of(job.start_s, job.end_s))
            )
            groups = _groups(depending)
        else:
            whole = (ALWAYS[0] if since_s is None else since_s, ALWAYS[1] if until_s is None else until_s)
            days = sorted({partition_start(path) // DAY_S for path in store.files("telemetry", *whole)})
            blocks, groups = [(whole, days)], []
        parts = [_Part(part) for span, days in blocks for part in _parts(span, days)]
        parts += [_Part(_NOTHING, jobs) for jobs in groups]
        for place, part in enumerate(parts):
            step = _part_of(progress, place, len(parts))
            results, left = _summarize_part(store, config, runs, part, step, mapper, done_before, total)
            damaged |= _damaged_days(store, _INPUTS).union(*(days_of(job.start_s, job.end_s) for job in left))
            done = {
                day: number for day, number in stale.days.items() if _is_within(day, part.span) and day not in damaged
            }
            store.close(Stale(days=done))
            total.days += map(day_text, sorted(done))
            verdicts |= verdicts_of(results.jobs)
        computed = {
            run: number
            for run, number in stale.runs.items()
            if all(_is_within(day, whole) and day not in damaged for day in run.days)
        }
        store.close(Stale(runs=computed))
    total.changed_jobs = len({run.job_id for run in computed})
    total.count_jobs(verdicts.values())
    return total


@dataclass(frozen=True)
class _Part:
    """Jobs that are computed together: all that ran in a span, whose samples are counted, or the given ones."""

    span: tuple[int, int]
    jobs: Sequence[JobRun] | None = None


def _summarize_part(
    store: ClusterStore,
    config: Config,
    runs: pa.Table,
    part: _Part,
    progress: Progress,
    mapper: Mapper,
    done_before: Collection[tuple[int, int]],
    total: SummaryCounts,
) -> tuple[Results, list[JobRun]]:
    """Compute and store the metrics of a part, without the jobs that are done, and those that a damaged file concerns.

    The latter come last. Their numbers, and those of samples, steps, and hosts, are added to total.
    """
    span = part.span
    jobs = ended_jobs(runs, *span) if part.jobs is None else part.jobs
    found = len(jobs)
    jobs = [job for job in jobs if (job.job_id, job.submit_s) not in done_before]
    jobs, left = _without_damage(store, jobs)
    others = neighbors_of(runs, jobs)
    paths = _telemetry(store, span, [*jobs, *sharing(jobs, others)])
    bindings = load_bindings(store, config, [*jobs, *others])
    with store.connect() as db:
        prepared = prepare(db, paths, jobs, bindings, config, span, neighbors=others)
        results = compute(db, prepared, config, mapper, progress)
        errors = errors_of_jobs(
            db, paths, prepared.seen.nodes, jobs, _failed(store, jobs), prepared.attribution.allocations
        )
        measure = _measuring(db, prepared, mapper, config)
        total.steps.add(summarize_steps(db, store, config, jobs, prepared.attribution, results.jobs, measure))
    total.samples += results.samples
    total.samples_without_job += results.samples_without_job
    total.kept_jobs += found - len(jobs) - len(left)
    total.damaged_jobs += len(left)
    seen, named = prepared.seen, [*jobs, *others]
    if part.jobs:
        # The telemetry of whole days was read: a host of it can have jobs that are not computed again.
        days = [day for job in jobs for day in days_of(job.start_s, job.end_s)]
        named += ended_jobs(runs, min(days) * DAY_S, (max(days) + 1) * DAY_S)
    total.hosts.add(HostCounts(set().union(*seen.hosts().values()), _hosts(jobs), _hosts(named), set(seen.unclear)))
    owners = results.jobs.select(["job_id", "submit_s"])
    store.replace("gpu_metrics", results.gpus, owners)
    store.replace("job_metrics", results.jobs.set_column(results.jobs.num_columns - 1, "gpu_errors", errors), owners)
    return results, left


def _without_damage(store: ClusterStore, jobs: Sequence[JobRun]) -> tuple[list[JobRun], list[JobRun]]:
    """The jobs whose metrics come from whole files and go to such, and the others, which keep what they have."""
    if not jobs:
        return [], []
    for tables, days in (
        (_INPUTS, {day for job in jobs for day in days_of(job.start_s, job.end_s)}),
        (_OUTPUTS, {job.submit_s // DAY_S for job in jobs}),
    ):
        for table in tables:
            paths = store.all_files(table, min(days) * DAY_S, (max(days) + 1) * DAY_S)
            store.sound_files([path for path in paths if partition_start(path) // DAY_S in days])
    from_days, to_days = _damaged_days(store, _INPUTS), _damaged_days(store, _OUTPUTS)

    def is_whole(job: JobRun) -> bool:
        return job.submit_s // DAY_S not in to_days and from_days.isdisjoint(days_of(job.start_s, job.end_s))

    return [job for job in jobs if is_whole(job)], [job for job in jobs if not is_whole(job)]


def _damaged_days(store: ClusterStore, tables: Collection[str]) -> set[int]:
    return {partition_start(path) // DAY_S for path in store.damaged_files(tables)}


def _with_final_metrics(store: ClusterStore) -> frozenset[tuple[int, int]]:
    """Jobs that keep the metrics that they have: retention has removed rows that these were computed from."""
    from_s = store.complete_from()
    if not from_s:
        return frozenset()
    begun = store.read("jobs", ["job_id", "submit_s", "start_s"], until_s=from_s)
    begun = begun.filter(pc.field("start_s") < from_s)
    known = store.read("job_metrics", ["job_id", "submit_s"], until_s=from_s)
    return _keys(begun) & _keys(known)


def _failed(store: ClusterStore, jobs: Sequence[JobRun]) -> frozenset[tuple[int, int]]:
    """Runs of these job ids that failed."""
    if not jobs:
        return frozenset()
    ids, states = pa.array(sorted({job.job_id for job in jobs}), pa.int64()), pa.array(sorted(JOB_FAILED), pa.string())
    return _keys(store.read("jobs", ["job_id", "submit_s"], among={"job_id": ids, "state": states}))


def _keys(rows: pa.Table) -> frozenset[tuple[int, int]]:
    columns: Iterator[list[Any]] = (rows[name].to_pylist() for name in ("job_id", "submit_s"))
    return frozenset(zip(*columns, strict=True))


def _groups(jobs: Iterable[JobRun]) -> list[list[JobRun]]:
    """Jobs by the days of their start, so that each group needs the telemetry of few days."""
    by_day: dict[int, list[JobRun]] = defaultdict(list)
    for job in jobs:
        by_day[job.start_s // DAY_S].append(job)
    blocks = [
        block[place : place + MOST_DAYS] for block in day_blocks(by_day) for place in range(0, len(block), MOST_DAYS)
    ]
    return [[job for day in block for job in by_day[day]] for block in blocks]


def _hosts(jobs: Sequence[JobRun]) -> set[str]:
    return {host for job in jobs for host in job.hosts}


def _parts(span: tuple[int, int], days: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The span, cut at midnights so that no part has more than MOST_DAYS of the days (in order)."""
    return pairwise([span[0], *(day * DAY_S for day in days[MOST_DAYS::MOST_DAYS]), span[1]])


def _is_within(day: int, span: tuple[int, int]) -> bool:
    return span[0] <= day * DAY_S and (day + 1) * DAY_S <= span[1]


def _part_of(progress: Progress, place: int, parts: int) -> Progress:
    """Progress of one of several parts as that of them all."""
    return lambda done, total, word: progress(place * total + done, parts * total, word)


def _telemetry(store: ClusterStore, span: tuple[int, int], runs: Sequence[JobRun]) -> list[Path]:
    """Files of the span, and of every whole day of the runs: GPUs are surveyed by the day."""
    days = {day for run in runs for day in days_of(run.start_s, run.end_s)}
    in_span = set(store.all_files("telemetry", *span))
    starts = {path: partition_start(path) for path in store.all_files("telemetry")}
    return store.sound_files([path for path, at in starts.items() if path in in_span or at // DAY_S in days])


def _measuring(db: duckdb.DuckDBPyConnection, prepared: Prepared, mapper: Mapper, config: Config) -> Measure:
    """Measures other intervals on the files that were looked through; of them, those with allocations are read."""

    def measure(jobs: Sequence[JobRun], attribution: Attribution) -> pa.Table:
        start_ms, end_ms = (attribution.allocations[name].to_numpy() for name in ("start_ms", "end_ms"))
        work = prepared.work
        chunks = [files for files in work.chunks if ((start_ms < files.until_ms) & (end_ms > files.from_ms)).any()]
        part = replace(prepared, work=replace(work, chunks=chunks), given=jobs, attribution=attribution)
        return compute(db, with_allocations(db, part, config), config, mapper).jobs

    return measure


def load_bindings(store: ClusterStore, config: Config, jobs: Sequence[JobRun]) -> list[Binding]:
    """Prolog and squeue records of the jobs' ids, made in the time of these jobs or a day around it."""
    if not jobs:
        return []
    first_s, last_s = min(job.start_s for job in jobs), max(job.end_s for job in jobs)
    ids = pa.array(sorted({job.job_id for job in jobs}), pa.int64())
    rows = store.read(
        "bindings",
        since_s=first_s - DAY_S,
        until_s=last_s + DAY_S,
        among={"origin": pa.array(["prolog", "squeue"]), "job_id": ids},
    )
    return [Binding(**row) for row in rows.to_pylist()]
