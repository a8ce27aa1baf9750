"""From the store's jobs and telemetry to its job_metrics and gpu_metrics."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config
from almanac.errors import StoreError
from almanac.units import format_count
from telemetry.attribution import DAY_S, Attribution, Job, attribute, days_of, shared_jobs
from telemetry.bindings import Binding
from telemetry.marks import day_text
from telemetry.metrics.chunks import Mapper, Progress, map_partials, split_files
from telemetry.metrics.finish import Results, finish
from telemetry.metrics.frames import claim_frame, job_frame, model_frame
from telemetry.metrics.hours import Files
from telemetry.metrics.inventory import Survey, survey
from telemetry.metrics.labels import aligned, labelled_units
from telemetry.metrics.options import Options
from telemetry.metrics.partials import Partials
from telemetry.metrics.uuids import unit_names
from telemetry.runs import ended_jobs, load_runs, neighbours_of, sharing
from telemetry.steps import Measure, StepCounts, summarize_steps
from telemetry.store import Store, partition_start

ALWAYS = (-(2**40), 2**40)
MOST_DAYS = 31
"""Days of telemetry looked at together: of each, some 30 MB are held for 1,800 nodes of four GPUs."""


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
    for block in _blocks(numbers):
        first, last = (dt.date.fromordinal(number).isoformat() for number in (block[0], block[-1]))
        yield first if first == last else f"{first} to {last}"


def _blocks(days: Iterable[int]) -> Iterator[list[int]]:
    """Days in order, those that follow each other together."""
    for _, group in groupby(enumerate(sorted(days)), key=lambda item: item[1] - item[0]):
        yield [day for _, day in group]


def summarize(
    store: Store,
    cluster: str,
    config: Config,
    since_s: int | None = None,
    until_s: int | None = None,
    *,
    progress: Progress | None = None,
    mapper: Mapper = map_partials,
) -> SummaryCounts:
    """Compute and store the metrics of every ended GPU job that ran on a day that has changed.

    With since_s or until_s instead of every one that ran in [since_s, until_s), changed or not. Such jobs are looked
    at whole, also outside the days or the span, and what is found of each does not depend on which others are looked
    at. Days are closed once their jobs' metrics are stored. mapper: where the chunks are computed. Raises
    StoreError where a file cannot be read, BusyError where another process summarises.
    """
    total, verdicts = SummaryCounts(), dict[tuple[int, int], tuple[str, str | None]]()
    with store.summarising(cluster):
        opened = store.open_days(cluster)
        if since_s is None and until_s is None:
            blocks = [((days[0] * DAY_S, (days[-1] + 1) * DAY_S), days) for days in _blocks(opened)]
        else:
            span = (ALWAYS[0] if since_s is None else since_s, ALWAYS[1] if until_s is None else until_s)
            blocks = [(span, _days_of_telemetry(store, cluster, span))]
        spans = [part for span, days in blocks for part in _parts(span, days)]
        runs = load_runs(store, cluster)
        for place, span in enumerate(spans):
            step = _part_of(progress or _silent, place, len(spans))
            results, counts = _summarize_span(store, cluster, config, runs, span, step, mapper)
            done = {day: number for day, number in opened.items() if _is_within(day, span)}
            store.close_days(cluster, done)
            total.days += map(day_text, sorted(done))
            total.samples += counts.samples
            total.samples_without_job += counts.samples_without_job
            total.steps.add(counts.steps)
            verdicts |= _verdicts(results.jobs)
    total.count_jobs(verdicts.values())
    return total


def _summarize_span(
    store: Store,
    cluster: str,
    config: Config,
    runs: pa.Table,
    span: tuple[int, int],
    progress: Progress,
    mapper: Mapper,
) -> tuple[Results, SummaryCounts]:
    """Compute and store the metrics of the runs that have ended and touch the span."""
    jobs = ended_jobs(runs, *span)
    others = neighbours_of(runs, jobs)
    paths = _telemetry(store, cluster, span, [*jobs, *sharing(jobs, others)])
    bindings = load_bindings(store, cluster, config, [*jobs, *others])
    with store.connect() as db:
        try:
            prepared = prepare(db, paths, jobs, bindings, config, span, neighbours=others)
            results, counts = complete(db, prepared, _partials(db, prepared, mapper, progress), config)
            measure = _measuring(db, prepared, mapper, config)
            counts.steps = summarize_steps(
                db, store, cluster, config, jobs, prepared.attribution, results.jobs, measure
            )
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise StoreError(
                f"{store.root}: telemetry cannot be read: {error}", "move the file away and ingest its span again"
            ) from error
    owners = results.jobs.select(["job_id", "submit_s"])
    store.replace("gpu_metrics", cluster, results.gpus, owners)
    store.replace("job_metrics", cluster, results.jobs, owners)
    return results, counts


def _days_of_telemetry(store: Store, cluster: str, span: tuple[int, int]) -> list[int]:
    return sorted({partition_start(path) // DAY_S for path in store.files("telemetry", cluster, *span)})


def _parts(span: tuple[int, int], days: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The span, cut at midnights so that no part has more than MOST_DAYS of the days (in order)."""
    return pairwise([span[0], *(day * DAY_S for day in days[MOST_DAYS::MOST_DAYS]), span[1]])


def _is_within(day: int, span: tuple[int, int]) -> bool:
    return span[0] <= day * DAY_S and (day + 1) * DAY_S <= span[1]


def _part_of(progress: Progress, place: int, parts: int) -> Progress:
    """Progress of one of several parts as that of them all."""
    return lambda done, total, word: progress(place * total + done, parts * total, word)


def _telemetry(store: Store, cluster: str, span: tuple[int, int], runs: Sequence[Job]) -> list[Path]:
    """Files of the span, and of every whole day of the runs: which GPUs there were is said of days."""
    days = {day for run in runs for day in days_of(run.start_s, run.end_s)}
    in_span = set(store.files("telemetry", cluster, *span))
    return [
        path for path in store.files("telemetry", cluster) if path in in_span or partition_start(path) // DAY_S in days
    ]


def _verdicts(jobs: pa.Table) -> Mapping[tuple[int, int], tuple[str, str | None]]:
    columns = (jobs[name].to_pylist() for name in ("job_id", "submit_s", "verdict", "attributed_by"))
    return {(job_id, submit_s): (verdict, origin) for job_id, submit_s, verdict, origin in zip(*columns, strict=True)}


def _measuring(db: duckdb.DuckDBPyConnection, prepared: Prepared, mapper: Mapper, config: Config) -> Measure:
    """Measures other intervals on the files that were looked through; of them, those with claims are read."""

    def measure(jobs: Sequence[Job], attribution: Attribution) -> pa.Table:
        start_ms, end_ms = (attribution.claims[name].to_numpy() for name in ("start_ms", "end_ms"))
        chunks = [files for files in prepared.chunks if ((start_ms < files.until_ms) & (end_ms > files.from_ms)).any()]
        part = _with_frames(db, replace(prepared, chunks=chunks, given=jobs, attribution=attribution), config)
        return complete(db, part, _partials(db, part, mapper), config)[0].jobs

    return measure


def _partials(
    db: duckdb.DuckDBPyConnection, prepared: Prepared, mapper: Mapper, progress: Progress | None = None
) -> Partials:
    return mapper(db, prepared.chunks, prepared.claims, prepared.options, prepared.counted_ms, progress or _silent)


def _silent(done: int, total: int, word: str) -> None:
    """No progress is shown."""


def compute(
    db: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    jobs: Sequence[Job],
    bindings: Sequence[Binding],
    config: Config,
    counted_s: tuple[int, int] = ALWAYS,
    progress: Progress | None = None,
    *,
    neighbours: Sequence[Job] = (),
    options: Options | None = None,
    mapper: Mapper = map_partials,
) -> tuple[Results, SummaryCounts]:
    """Metrics of jobs from telemetry files. Samples are counted in the span counted_s.

    neighbours: jobs of which nothing is computed, but which may have had the same nodes. options: by default what the
    configuration says. mapper: where the chunks are computed.
    """
    prepared = prepare(db, paths, jobs, bindings, config, counted_s, neighbours=neighbours, options=options)
    return complete(db, prepared, _partials(db, prepared, mapper, progress), config)


@dataclass(frozen=True)
class Prepared:
    """What the partials of any chunk need, and the end of the summary. Small: claims and jobs, no samples."""

    chunks: list[Files]
    claims: pa.Table
    jobs: pa.Table
    given: Sequence[Job]
    attribution: Attribution
    seen: Survey
    counted_ms: tuple[int, int]
    options: Options


def prepare(
    db: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    jobs: Sequence[Job],
    bindings: Sequence[Binding],
    config: Config,
    counted_s: tuple[int, int] = ALWAYS,
    *,
    neighbours: Sequence[Job] = (),
    options: Options | None = None,
) -> Prepared:
    """Look through the files once: which GPUs there are, how often they were scraped, and whose they were."""
    options = options or Options.of(config.metrics)
    counted_ms = (counted_s[0] * 1000, counted_s[1] * 1000)
    seen = survey(db, split_files(paths), counted_ms)
    attribution = attribute_jobs(db, jobs, seen, bindings, config, neighbours)
    empty = pa.table({})
    return _with_frames(db, Prepared(seen.chunks, empty, empty, jobs, attribution, seen, counted_ms, options), config)


def _with_frames(db: duckdb.DuckDBPyConnection, prepared: Prepared, config: Config) -> Prepared:
    """With the frames of its jobs and their claims."""
    jobs, attribution, seen = prepared.given, prepared.attribution, prepared.seen
    claims = claim_frame(jobs, attribution, seen)
    if prepared.options.is_aligned_to_job:
        claims = aligned(db, prepared.chunks, claims)
    return replace(prepared, claims=claims, jobs=job_frame(jobs, attribution, seen, config.filters))


def complete(
    db: duckdb.DuckDBPyConnection, prepared: Prepared, partials: Partials, config: Config
) -> tuple[Results, SummaryCounts]:
    """Metrics from the merged partials of all chunks."""
    results = finish(db, partials, prepared.claims, model_frame(), prepared.jobs, config, prepared.options)
    return results, count(results, prepared.seen.counted, partials)


def attribute_jobs(
    db: duckdb.DuckDBPyConnection,
    jobs: Sequence[Job],
    seen: Survey,
    bindings: Sequence[Binding],
    config: Config,
    neighbours: Sequence[Job] = (),
) -> Attribution:
    """Claims of the jobs, with the exporter's labels where the configuration believes them.

    Neighbours may crowd a job's nodes, or be bound to its GPUs; they get no claims themselves.
    """
    everyone = [*jobs, *neighbours]
    paths = [path for files in seen.chunks for path in files.paths]
    inventory = replace(seen.inventory(), named=unit_names(db, paths, bindings))
    shared = shared_jobs(everyone, inventory) if config.bindings.use_labels else []
    labelled = labelled_units(db, everyone, shared, seen, inventory) if shared else {}
    return attribute(everyone, inventory, labelled, bindings).of_first(len(jobs))


def load_bindings(store: Store, cluster: str, config: Config, jobs: Sequence[Job]) -> list[Binding]:
    """Prolog and squeue records of the jobs' ids, made in the time of these jobs or a day around it."""
    if not jobs:
        return []
    first_s, last_s = min(job.start_s for job in jobs), max(job.end_s for job in jobs)
    wanted = ["prolog", *(["squeue"] if config.bindings.use_squeue else [])]
    ids = pa.array(sorted({job.job_id for job in jobs}), pa.int64())
    rows = store.read("bindings", cluster, since_s=first_s - DAY_S, until_s=last_s + DAY_S)
    chosen = rows.filter(pc.field("origin").isin(wanted) & pc.field("job_id").isin(ids))
    return [Binding(**row) for row in chosen.to_pylist()]


def count(results: Results, counted: int, partials: Partials) -> SummaryCounts:
    counts = SummaryCounts(samples=counted, samples_without_job=counted - partials.counted)
    counts.count_jobs(_verdicts(results.jobs).values())
    return counts
