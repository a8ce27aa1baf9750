"""`almanac ingest`: read jobs and GPU counters into the store, then compute the metrics of the jobs they touch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import AlmanacError, BusyError, ConfigError
from almanac.units import format_count, format_duration, printable
from cli.app import App
from cli.output import json_text, progress, show_counts
from cli.times import time_option

if TYPE_CHECKING:
    from telemetry.ingest import IngestResult
    from telemetry.metrics.summary_counts import SummaryCounts
    from telemetry.sources.base import Source
    from telemetry.store.store import Store

FOREVER_S = 2**40
SOURCES = ("sacct", "prometheus", "prolog", "squeue")


@dataclass(frozen=True)
class Job:
    """One source and the span to read of it."""

    source: Source
    since_s: int
    until_s: int


@click.command("ingest")
@click.option("-S", "--starttime", metavar="TIME", help="Read from here, instead of where the last run stopped.")
@click.option("-E", "--endtime", metavar="TIME", help="Read up to here. [now]")
@click.option("--source", "sources", multiple=True, type=click.Choice(SOURCES), help="Only these. [all configured]")
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
@click.option("--layout", metavar="NAME", help="Layout of the imported files. [found from their columns]")
@click.option("--no-summary", is_flag=True, help="Do not compute job metrics afterwards.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.pass_obj
def command(
    app: App,
    starttime: str | None,
    endtime: str | None,
    sources: tuple[str, ...],
    job_files: tuple[Path, ...],
    telemetry_files: tuple[Path, ...],
    layout: str | None,
    no_summary: bool,
    as_json: bool,
) -> int:
    """Read jobs (sacct) and GPU counters (Prometheus) into the store, from where the last run stopped.

    Reading the same span again changes nothing. A source that fails is named, the others are read all the same,
    and the exit code is 5.
    """
    since_s, until_s = time_option(starttime, app.now_s()), time_option(endtime, app.now_s())
    store = app.open_store(create=True)
    if layout and job_files and telemetry_files:
        raise click.UsageError("--layout is of one kind of file: import jobs and telemetry one after another")
    if job_files or telemetry_files:
        cluster = app.cluster_name or app.config.site.cluster or "imported"
        if sources:
            raise click.UsageError("--source names servers to read: leave it out when files are imported")
        jobs = list(_file_jobs(app, job_files, telemetry_files, layout, since_s, until_s))
    else:
        cluster = app.cluster(store, is_new=True)
        jobs = list(live_jobs(app, store, cluster, sources, since_s, until_s))
    outcome = run(store, cluster, jobs)
    summary = None if no_summary else summarise(app, store, cluster)
    show(outcome, summary, as_json)
    return 5 if any(item["error"] for item in outcome.values()) else 0


def _file_jobs(
    app: App,
    job_files: tuple[Path, ...],
    telemetry_files: tuple[Path, ...],
    layout: str | None,
    since_s: int | None,
    until_s: int | None,
) -> Iterator[Job]:
    from telemetry.sources.files import FileSource

    span = (-FOREVER_S if since_s is None else since_s, FOREVER_S if until_s is None else until_s)
    for path in job_files:
        yield Job(FileSource(path, "jobs", layout, tiers=app.config.tiers), *span)
    for path in telemetry_files:
        yield Job(FileSource(path, "telemetry", layout), *span)


def live_jobs(
    app: App, store: Store, cluster: str, names: tuple[str, ...], since_s: int | None, until_s: int | None
) -> Iterator[Job]:
    """The sources of these names, else all that are configured, each from where it was read last or from since_s."""
    from telemetry.ingest import span

    config, now_s = app.config, app.now_s()
    for name in names or configured_sources(app):
        source = live_source(app, name, store, cluster)
        lookback_days = config.prometheus.lookback_days if name == "prometheus" else config.slurm.lookback_days
        delay_s = config.prometheus.delay_s if name == "prometheus" else 0
        _read_again(store, name, cluster, now_s, lookback_days)
        start_s, end_s = span(store, name, cluster, now_s, lookback_days * 86400, delay_s)
        yield Job(source, start_s if since_s is None else since_s, end_s if until_s is None else min(until_s, end_s))


def _read_again(store: Store, name: str, cluster: str, now_s: int, lookback_days: int) -> None:
    """Undo a watermark that a clock left in the future: what lies before it was never read."""
    ahead_s = store.pull_back_watermark(name, cluster, now_s, now_s - lookback_days * 86400)
    if ahead_s:
        said = f"almanac: the watermark of {name} was {format_duration(ahead_s)} in the future: a clock was ahead;"
        click.echo(f"{said} the last {lookback_days} days are read again", err=True)


def configured_sources(app: App) -> tuple[str, ...]:
    """The sources that a plain `almanac ingest` reads; bindings first, since they are gone soonest."""
    config = app.config
    wanted = {
        "squeue": config.bindings.use_squeue,
        "prolog": bool(config.bindings.prolog_dir),
        "sacct": True,
        "prometheus": bool(config.prometheus.url),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def live_source(app: App, name: str, store: Store, cluster: str) -> Source:
    """The source of this name. Raises ConfigError where what it needs is not configured."""
    config = app.config
    if name == "sacct":
        from telemetry.history import open_jobs
        from telemetry.sources.sacct import SacctSource

        return SacctSource(
            app.commands, cluster, config.tiers, config.slurm, app.now_s, open_jobs=lambda: open_jobs(store, cluster)
        )
    if name == "prometheus":
        if not config.prometheus.url:
            raise ConfigError("no Prometheus is configured", "set prometheus.url")
        from telemetry.sources.prometheus import PrometheusSource

        return PrometheusSource(config.prometheus)
    from telemetry.sources.bindings import PrologSource, SqueueSource

    if name == "squeue":
        return SqueueSource(app.commands, clock=app.now_s, cluster=cluster)
    if not config.bindings.prolog_dir:
        raise ConfigError("no folder of prolog records is configured", "set bindings.prolog_dir")
    return PrologSource(Path(config.bindings.prolog_dir), cluster)


def run(store: Store, cluster: str, jobs: list[Job]) -> dict[str, dict[str, Any]]:
    """Read every source; by its name the result and the error that stopped it, if one did."""
    from telemetry.ingest import IngestResult, ingest

    outcome: dict[str, dict[str, Any]] = {}
    for number, job in enumerate(jobs):
        name = job.source.name if job.source.name not in outcome else f"{job.source.name} {number + 1}"
        result = IngestResult(job.source.name, job.since_s, job.until_s)
        outcome[name] = {"result": result, "error": None}
        started = time.monotonic()
        with progress(f"ingest {name}") as advance:
            try:
                ingest(job.source, store, cluster, job.since_s, job.until_s, result, _advance(result, advance))
            except AlmanacError as error:
                outcome[name]["error"] = error
        outcome[name]["wall_s"] = time.monotonic() - started
    return outcome


def _advance(result: IngestResult, advance: Any) -> Any:
    rows = 0

    def step(added: int, reached_s: int) -> None:
        nonlocal rows
        rows += added
        advance(reached_s - result.since_s, result.until_s - result.since_s, f"{format_count(rows)} rows")

    return step


def summarise(app: App, store: Store, cluster: str) -> SummaryCounts | None:
    """Compute the metrics of the jobs that new rows can touch; None where there are none, or another run does it."""
    from cli.summarize import run as summarize

    try:
        counts = summarize(app, store, cluster)
    except BusyError as error:
        click.echo(f"{error}: what is new here is left to the next run", err=True)
        return None
    return counts if counts.days else None


def show(outcome: dict[str, dict[str, Any]], summary: SummaryCounts | None, as_json: bool) -> None:
    if as_json:
        click.echo(json_text({"sources": {name: _as_dict(item) for name, item in outcome.items()},
                              "metrics": None if summary is None else summary.as_dict()}))  # fmt: skip
        return
    for name, item in outcome.items():
        unit = "values" if "telemetry" in item["result"].written else "records"
        show_counts(name, item["result"].counts, unit)
        for table, written in item["result"].written.items():
            click.echo(
                f"  {table}: {format_count(written.added)} added, {format_count(written.replaced)} changed, "
                f"{format_count(written.unchanged)} known, in {format_duration(item['wall_s'])}"
            )
        if item["error"]:
            click.echo(f"  failed: {printable(str(item['error']), 1000)}", err=True)
            click.echo(f"  to do: {printable(item['error'].hint, 1000)}", err=True)
    if summary is not None:
        for line in summary.lines():
            click.echo(line)


def _as_dict(item: dict[str, Any]) -> dict[str, Any]:
    result: IngestResult = item["result"]
    return {
        "since_s": result.since_s,
        "until_s": result.until_s,
        "seen": result.counts.seen,
        "kept": result.counts.kept,
        "dropped": dict(result.counts.dropped),
        "notes": dict(result.counts.notes),
        "written": {table: vars(written) for table, written in result.written.items()},
        "error": str(item["error"]) if item["error"] else None,
    }
