"""From the store's jobs and telemetry to its job_metrics and gpu_metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from almanac.config import Config, Filters
from almanac.errors import ConfigError, StoreError
from almanac.hardware import find_gpu_model
from almanac.units import format_count
from telemetry.attribution import Attribution, Binding, Inventory, Job, attribute, parse_hosts, shared_jobs
from telemetry.metrics.inventory import Intervals, Survey, labelled_units, survey
from telemetry.metrics.merge import Results, merge
from telemetry.metrics.partials import day_partials
from telemetry.metrics.preallocation import steady_span_ms
from telemetry.store import Store

Progress = Callable[[int, int, str], None]
"""Called with days done, days in all, and a word on what came of them."""

DAY_S = 86_400


@dataclass
class SummaryCounts:
    """What one run looked at. samples_without_job: in the span, and of no ended job whose GPUs are known."""

    jobs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    attributed_by: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    samples_without_job: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For a person: jobs by verdict, and samples that belong to no job."""
        verdicts = ", ".join(f"{format_count(number)} {verdict}" for verdict, number in self.verdicts.most_common())
        return [
            f"metrics: {format_count(self.jobs)} jobs" + (f": {verdicts}" if verdicts else ""),
            f"  samples: {format_count(self.samples)} read, {format_count(self.samples_without_job)} of no job",
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
            results, counts = compute(db, files, jobs, bindings, config, progress=progress)
        except duckdb.Error as error:
            raise StoreError(
                f"{store.root}: telemetry cannot be read: {error}", "move the file away and ingest its span again"
            ) from error
    store.write("gpu_metrics", cluster, results.gpus)
    store.write("job_metrics", cluster, results.jobs)
    return counts


def compute(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    jobs: Sequence[Job],
    bindings: Sequence[Binding],
    config: Config,
    *,
    progress: Progress | None = None,
) -> tuple[Results, SummaryCounts]:
    """Metrics of jobs from telemetry files, day by day."""
    seen = survey(db, files) if files else Survey.empty()
    attribution = attribute_jobs(db, files, jobs, seen.inventory(), bindings, config)
    parts = []
    days = range(min(job.start_s for job in jobs) // DAY_S, (max(job.end_s for job in jobs) - 1) // DAY_S + 1)
    claims = with_steady_spans(attribution.claims, jobs)
    by_day = _by_day(files)
    for done, day in enumerate(days, 1):
        if day in by_day:
            parts.append(day_partials(db, by_day[day], claims, day * DAY_S * 1000, (day + 1) * DAY_S * 1000))
        if progress:
            progress(done, len(days), f"{format_count(sum(part.num_rows for part in parts))} GPU runs")
    return None
