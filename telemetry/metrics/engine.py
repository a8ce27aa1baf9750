"""Metrics of jobs from telemetry files: whose GPUs they were, the map over chunks, and the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa

from almanac.config import Config
from telemetry.attribution.allocations import Attribution, JobRun, attribute, shared_jobs
from telemetry.attribution.bindings import Binding
from telemetry.attribution.host_names import match_days
from telemetry.metrics.chunks import Mapper, Progress, Work, map_partials, silent, split_files
from telemetry.metrics.finish import Results, finish
from telemetry.metrics.frames import allocation_frame, job_frame, model_frame
from telemetry.metrics.inventory import Survey, survey
from telemetry.metrics.labels import labelled_units
from telemetry.metrics.options import Options
from telemetry.metrics.partials import Partials
from telemetry.metrics.summary_counts import SummaryCounts, verdicts_of
from telemetry.metrics.uuids import unit_names

ALWAYS = (-(2**40), 2**40)


@dataclass(frozen=True)
class Prepared:
    """What the partials of any chunk need, and the end of the summary. Small: allocations and jobs, no samples."""

    work: Work
    jobs: pa.Table
    given: Sequence[JobRun]
    attribution: Attribution
    seen: Survey


def prepare(
    db: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    jobs: Sequence[JobRun],
    bindings: Sequence[Binding],
    config: Config,
    counted_s: tuple[int, int] = ALWAYS,
    *,
    neighbors: Sequence[JobRun] = (),
    options: Options | None = None,
) -> Prepared:
    """Look through the files once: which GPUs there are, how often they were scraped, and whose they were.

    counted_s: the span in which samples are counted. neighbors: jobs without computed metrics, which may
    have had the same nodes.
    """
    counted_ms = (counted_s[0] * 1000, counted_s[1] * 1000)
    seen = survey(db, split_files(paths), counted_ms)
    seen = seen.named(match_days(seen.hosts(), [*jobs, *neighbors]))
    attribution = attribute_jobs(db, jobs, seen, bindings, config, neighbors)
    work = Work(seen.chunks, pa.table({}), options or Options(), counted_ms)
    return with_allocations(db, Prepared(work, pa.table({}), jobs, attribution, seen), config)


def with_allocations(db: duckdb.DuckDBPyConnection, prepared: Prepared, config: Config) -> Prepared:
    """With the allocations of its attribution, and the frame of its jobs."""
    jobs, attribution, seen, work = prepared.given, prepared.attribution, prepared.seen, prepared.work
    allocations = allocation_frame(jobs, attribution, seen, work.options)
    frame = job_frame(jobs, attribution, seen, allocations, config.filters)
    return replace(prepared, work=replace(work, allocations=allocations), jobs=frame)


def compute(
    db: duckdb.DuckDBPyConnection,
    prepared: Prepared,
    config: Config,
    mapper: Mapper = map_partials,
    progress: Progress = silent,
) -> tuple[Results, SummaryCounts]:
    """Metrics of what was prepared. mapper: where the chunks are computed."""
    return complete(db, prepared, mapper(db, prepared.work, progress), config)


def complete(
    db: duckdb.DuckDBPyConnection, prepared: Prepared, partials: Partials, config: Config
) -> tuple[Results, SummaryCounts]:
    """Metrics from the merged partials of all chunks."""
    work = prepared.work
    results = finish(db, partials, work.allocations, model_frame(), prepared.jobs, config)
    samples = prepared.seen.counted
    counts = SummaryCounts(samples=samples, samples_without_job=samples - partials.counted)
    counts.count_jobs(verdicts_of(results.jobs).values())
    return results, counts


def attribute_jobs(
    db: duckdb.DuckDBPyConnection,
    jobs: Sequence[JobRun],
    seen: Survey,
    bindings: Sequence[Binding],
    config: Config,
    neighbors: Sequence[JobRun] = (),
) -> Attribution:
    """Allocations of the jobs, with the exporter's labels where the configuration believes them.

    Neighbors may crowd a job's nodes, or be bound to its GPUs; they get no allocations themselves.
    """
    everyone = [*jobs, *neighbors]
    paths = [path for files in seen.chunks for path in files.paths]
    inventory = replace(seen.inventory(), named=unit_names(db, paths, bindings, seen.nodes))
    shared = shared_jobs(everyone, inventory) if config.bindings.use_labels else []
    labeled = labelled_units(db, everyone, shared, seen, inventory) if shared else {}
    return attribute(everyone, inventory, labeled, bindings).of_first(len(jobs))
