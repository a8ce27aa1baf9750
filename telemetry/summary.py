"""From the store's jobs and telemetry to its job_metrics and gpu_metrics."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Config
from almanac.errors import StoreError
from almanac.units import format_count
from telemetry.attribution import Attribution, Job, attribute, parse_hosts, shared_jobs
from telemetry.bindings import Binding
from telemetry.metrics.base import BASE
from telemetry.metrics.chunks import Progress, map_partials, split_files
from telemetry.metrics.finish import Results, finish
from telemetry.metrics.frames import claim_frame, job_frame, model_frame
from telemetry.metrics.inventory import Survey, first_samples, labelled_units, survey
from telemetry.metrics.options import Options
from telemetry.metrics.partials import Files, Partials
from telemetry.metrics.uuids import unit_names
from telemetry.steps import Measure, StepCounts, summarize_steps
from telemetry.store import Store

DAY_S = 86_400
ALWAYS = (-(2**40), 2**40)


@dataclass
class SummaryCounts:
    """What one run looked at. samples_without_job: in the span, and of no ended job whose GPUs are known."""

    jobs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    attributed_by: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    samples_without_job: int = 0
    steps: StepCounts = field(default_factory=StepCounts)

    def as_dict(self) -> dict[str, Any]:
        # dataclasses.asdict turns a Counter into one keyed by its items (Python 3.11).
        shown = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {**shown, "steps": self.steps.as_dict()}

    def lines(self) -> list[str]:
        """For a person: jobs by verdict, and samples that belong to no job."""
        verdicts = ", ".join(f"{format_count(number)} {verdict}" for verdict, number in self.verdicts.most_common())
        return [
            f"metrics: {format_count(self.jobs)} jobs" + (f": {verdicts}" if verdicts else ""),
            f"  samples: {format_count(self.samples)} read, {format_count(self.samples_without_job)} of no job",
            *self.steps.lines(),
        ]


def summarize(
    store: Store, cluster: str, config: Config, since_s: int, until_s: int, *, progress: Progress | None = None
) -> SummaryCounts:
    """Compute and store the metrics of every ended GPU job that ran at some time of [since_s, until_s).

    Such jobs are looked at whole, also outside the span. Raises StoreError where a file cannot be read.
    """
    jobs = load_jobs(store, cluster, since_s, until_s)
    if not jobs:
        return SummaryCounts()
    first_s, last_s = min(job.start_s for job in jobs), max(job.end_s for job in jobs)
    files = store.files("telemetry", cluster, first_s, last_s)
    bindings = load_bindings(store, cluster, config, first_s, last_s)
    with store.connect() as db:
        try:
            prepared = prepare(db, files, jobs, bindings, config, (since_s, until_s))
            results, counts = complete(db, prepared, _partials(db, prepared, progress), config)
            measure = _measuring(db, prepared, config)
            counts.steps = summarize_steps(
                db, store, cluster, config, jobs, prepared.attribution, results.jobs, measure
            )
        except duckdb.Error as error:
            raise StoreError(
                f"{store.root}: telemetry cannot be read: {error}", "move the file away and ingest its span again"
            ) from error
    store.write("gpu_metrics", cluster, results.gpus)
    store.write("job_metrics", cluster, results.jobs)
    return counts


def _measuring(db: duckdb.DuckDBPyConnection, prepared: Prepared, config: Config) -> Measure:
    """Measures other intervals on the files that were looked through; of them, those with claims are read."""

    def measure(jobs: Sequence[Job], attribution: Attribution) -> pa.Table:
        start_ms, end_ms = (attribution.claims[name].to_numpy() for name in ("start_ms", "end_ms"))
        chunks = [files for files in prepared.chunks if ((start_ms < files.until_ms) & (end_ms > files.from_ms)).any()]
        part = _with_frames(db, replace(prepared, chunks=chunks, given=jobs, attribution=attribution), config)
        return complete(db, part, _partials(db, part), config)[0].jobs

    return measure


def _partials(db: duckdb.DuckDBPyConnection, prepared: Prepared, progress: Progress | None = None) -> Partials:
    return map_partials(
        db, prepared.chunks, prepared.claims, prepared.options, prepared.counted_ms, progress or _silent
    )


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
    options: Options | None = None,
) -> tuple[Results, SummaryCounts]:
    """Metrics of jobs from telemetry files. Samples are counted in the span counted_s.

    options: by default what the configuration says.
    """
    prepared = prepare(db, paths, jobs, bindings, config, counted_s, options=options)
    return complete(db, prepared, _partials(db, prepared, progress), config)


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
    options: Options | None = None,
) -> Prepared:
    """Look through the files once: which GPUs there are, how often they were scraped, and whose they were."""
    options = options or Options.of(config.metrics)
    counted_ms = (counted_s[0] * 1000, counted_s[1] * 1000)
    chunks = split_files(paths)
    seen = survey(db, paths, counted_ms, is_unique=all(chunk.is_sorted for chunk in chunks))
    attribution = attribute_jobs(db, paths, jobs, seen, bindings, config)
    empty = pa.table({})
    return _with_frames(db, Prepared(chunks, empty, empty, jobs, attribution, seen, counted_ms, options), config)


def _with_frames(db: duckdb.DuckDBPyConnection, prepared: Prepared, config: Config) -> Prepared:
    """With the frames of its jobs and their claims."""
    jobs, attribution, seen = prepared.given, prepared.attribution, prepared.seen
    paths = [path for files in prepared.chunks for path in files.paths]
    first_ms = first_samples(db, paths, attribution.claims) if prepared.options.is_aligned_to_job else None
    claims = claim_frame(jobs, attribution, seen, first_ms)
    return replace(prepared, claims=claims, jobs=job_frame(jobs, attribution, seen, config.filters))


def complete(
    db: duckdb.DuckDBPyConnection, prepared: Prepared, partials: Partials, config: Config
) -> tuple[Results, SummaryCounts]:
    """Metrics from the merged partials of all chunks."""
    results = finish(db, partials, prepared.claims, model_frame(), prepared.jobs, config)
    return results, count(results, prepared.seen.counted, partials)


def attribute_jobs(
    db: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    jobs: Sequence[Job],
    seen: Survey,
    bindings: Sequence[Binding],
    config: Config,
) -> Attribution:
    """Claims of the jobs, with the exporter's labels where the configuration believes them."""
    inventory = replace(seen.inventory(), named=unit_names(db, paths, bindings))
    labelled = labelled_units(db, paths, jobs, shared_jobs(jobs, inventory)) if config.bindings.use_labels else {}
    return attribute(jobs, inventory, labelled, bindings)


def load_jobs(store: Store, cluster: str, since_s: int, until_s: int) -> list[Job]:
    """GPU jobs that have ended and ran at some time of [since_s, until_s), in the order of their start."""
    columns = ["job_id", "submit_s", "start_s", "end_s", "gpu_count", "node_list", "account", "partition"]
    hosts = functools.cache(parse_hosts)
    jobs = [
        Job(
            job_id=row["job_id"],
            submit_s=row["submit_s"],
            start_s=row["start_s"],
            end_s=row["end_s"],
            gpu_count=row["gpu_count"],
            hosts=hosts(row["node_list"]),
            account=row["account"] or "",
            partition=row["partition"] or "",
        )
        for row in store.read("jobs", cluster, columns, until_s=until_s)
        .filter(_ran_on_gpus(since_s, until_s))
        .to_pylist()
    ]
    return sorted(jobs, key=lambda job: (job.start_s, job.job_id, job.submit_s))


def _ran_on_gpus(since_s: int, until_s: int) -> pc.Expression:
    start, end = pc.field("start_s"), pc.field("end_s")
    return (start < end) & (pc.field("gpu_count") > 0) & (end > since_s) & (start < until_s)


def load_bindings(store: Store, cluster: str, config: Config, since_s: int, until_s: int) -> list[Binding]:
    """Prolog and squeue records made in [since_s, until_s) or a day around it."""
    rows = store.read("bindings", cluster, since_s=since_s - DAY_S, until_s=until_s + DAY_S)
    wanted = {"prolog"} | ({"squeue"} if config.bindings.use_squeue else set())
    return [Binding(**row) for row in rows.to_pylist() if row["origin"] in wanted]


def count(results: Results, counted: int, partials: Partials) -> SummaryCounts:
    attributed = pc.sum(partials[BASE]["counted"]).as_py() or 0
    return SummaryCounts(
        jobs=results.jobs.num_rows,
        verdicts=Counter(str(verdict) for verdict in results.jobs["verdict"].to_pylist()),
        attributed_by=Counter(origin for origin in results.jobs["attributed_by"].to_pylist() if origin),
        samples=counted,
        samples_without_job=counted - attributed,
    )
