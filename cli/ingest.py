"""`almanac ingest`: read jobs and GPU counters into the store, then compute the metrics of the jobs they touch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from almanac.errors import BusyError
from almanac.units import format_count, format_duration, printable
from cli.app import App
from cli.output import json_text, progress, show_counts
from cli.selection import check_span, time_option
from cli.summarize import run as summarize
from telemetry.ingest import SourceName, SourceSpan, configured_spans, ingest_all
from telemetry.sources.files import FileSource

if TYPE_CHECKING:
    from telemetry.ingest import IngestResult
    from telemetry.metrics.summary import SummaryCounts
    from telemetry.store.store import ClusterStore

FOREVER_S = 2**40


@click.command("ingest")
@click.option("-S", "--starttime", metavar="TIME", help="Read from here, instead of where the last run stopped.")
@click.option("-E", "--endtime", metavar="TIME", help="Read up to here. [now]")
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Choice(get_args(SourceName)),
    help="Read only this source. [all configured]",
)
@click.option(
    "--jobs", "job_files", multiple=True, type=click.Path(path_type=Path), help="Import a job trace (Parquet, CSV)."
)
@click.option(
    "--telemetry",
    "telemetry_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Import GPU counters (Parquet, CSV).",
)
@click.option("--no-summary", is_flag=True, help="Do not compute job metrics afterwards.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.pass_obj
def command(
    app: App,
    starttime: str | None,
    endtime: str | None,
    sources: tuple[SourceName, ...],
    job_files: tuple[Path, ...],
    telemetry_files: tuple[Path, ...],
    no_summary: bool,
    as_json: bool,
) -> int:
    """Read jobs (sacct) and GPU counters (Prometheus) into the store, from where the last run stopped.

    You can read the same time span again: nothing changes. Unchanged telemetry files are skipped. If a source fails,
    the others are still read, and the exit code is 5. A source that gives nothing is a warning.
    """
    since_s, until_s = time_option(starttime, app.now_s()), time_option(endtime, app.now_s())
    check_span(since_s, until_s)
    if job_files or telemetry_files:
        cluster = app.cluster_name or app.config.site.cluster or "imported"
        app = app.but(store=app.open_store(create=True).of(cluster))
        if sources:
            raise click.UsageError("--source applies to servers: leave it out when you import files")
        spans = list(_file_spans(app, job_files, telemetry_files, since_s, until_s))
    else:
        app.create_store()
        spans = live_spans(app, sources, since_s, until_s)
    results = run(app.store, spans)
    summary = None if no_summary else _summarize(app)
    show(results, summary, as_json)
    return 5 if any(result.error for result in results.values()) else 0


def _file_spans(
    app: App,
    job_files: tuple[Path, ...],
    telemetry_files: tuple[Path, ...],
    since_s: int | None,
    until_s: int | None,
) -> Iterator[SourceSpan]:
    span = (-FOREVER_S if since_s is None else since_s, FOREVER_S if until_s is None else until_s)
    for path in job_files:
        yield SourceSpan(FileSource(path, "jobs", tiers=app.config.tiers), *span)
    for path in telemetry_files:
        yield SourceSpan(FileSource(path, "telemetry"), *span)


def live_spans(
    app: App, names: tuple[SourceName, ...], since_s: int | None = None, until_s: int | None = None
) -> list[SourceSpan]:
    """Return `telemetry.ingest.configured_spans`; print its warnings on stderr."""
    return list(configured_spans(app, names, since_s, until_s, lambda text: click.echo(f"warning: {text}", err=True)))


def run(store: ClusterStore, spans: list[SourceSpan]) -> dict[str, IngestResult]:
    """Run `telemetry.ingest.ingest_all` with a progress bar for each source."""
    return ingest_all(store, spans, lambda name: progress(f"ingest {name}"))


def _summarize(app: App) -> SummaryCounts | None:
    """Compute the metrics of the jobs that new rows can touch; None without such jobs, or while another run does it."""
    try:
        counts = summarize(app)
    except BusyError as error:
        click.echo(f"{error}: the metrics of the new rows are left to the next run", err=True)
        return None
    return counts if counts.has_changes else None


def show(results: dict[str, IngestResult], summary: SummaryCounts | None, as_json: bool) -> None:
    if as_json:
        click.echo(json_text({"sources": {name: result.as_dict() for name, result in results.items()},
                              "metrics": None if summary is None else summary.as_dict()}))  # fmt: skip
        return
    for name, result in results.items():
        unit = "values" if "telemetry" in result.written else "records"
        if result.is_skipped:
            click.echo(f"{name}: unchanged, {format_count(result.counts.kept)} values were imported before")
        else:
            show_counts(name, result.counts, unit)
        for table, written in result.written.items():
            click.echo(
                f"  {table}: {format_count(written.added)} added, {format_count(written.replaced)} changed, "
                f"{format_count(written.unchanged)} known, in {format_duration(result.wall_s)}"
            )
        if result.left_out:
            click.echo(f"  {format_count(result.left_out)} rows not stored: their files are damaged", err=True)
        if result.warning:
            todo = "run almanac doctor, unless no job ran or the nodes were powered down"
            click.echo(f"  warning: {printable(result.warning)}", err=True)
            click.echo(f"  try: {'see the reasons above' if result.counts.seen else todo}", err=True)
        if result.error:
            click.echo(f"  failed: {printable(str(result.error), 1000)}", err=True)
            click.echo(f"  try: {printable(result.error.hint, 1000)}", err=True)
    if summary is not None:
        for line in summary.lines():
            click.echo(line)
