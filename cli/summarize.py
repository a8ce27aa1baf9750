"""`almanac summarize`: compute the metrics of the jobs that new data can touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cli.app import App
from cli.engines import engine_options, open_engine
from cli.output import json_text, progress
from cli.times import check_span, time_option

if TYPE_CHECKING:
    from telemetry.metrics.summary_counts import SummaryCounts
    from telemetry.store.cluster_store import ClusterStore
    from telemetry.store.retention import Expired


@click.command("summarize")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs that ran after this, instead of those with new data.")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs that ran before this. [now]")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.pass_obj
def command(
    app: App, starttime: str | None, endtime: str | None, engine: str, scheduler: str | None, as_json: bool
) -> None:
    """Compute the metrics of every job that ran on a day (UTC) with new samples, each job as a whole.

    If only records of jobs have changed, it computes these jobs and those that shared their nodes on these days.
    `almanac ingest` does the same when it has read its sources; with --no-summary it leaves this to this command.
    With -S or -E it computes the jobs of that time span instead, changed or not. Without them it then removes the days
    that are older than [retention] keeps.
    """
    since_s, until_s = time_option(starttime, app.now_s()), time_option(endtime, app.now_s())
    check_span(since_s, until_s)
    store = app.cluster_store()
    app.require_operator("job metrics cover all users")
    with open_engine(app, engine, scheduler) as mapper:
        counts = run(app, store, since_s=since_s, until_s=until_s, mapper=mapper)
    removed = [] if since_s is not None or until_s is not None else _remove_expired(app, store)
    if as_json:
        click.echo(json_text({**counts.as_dict(), "retention": [each.as_dict() for each in removed]}))
        return
    if counts.has_changes or starttime or endtime:
        for line in counts.lines():
            click.echo(line)
    else:
        click.echo("metrics: nothing has changed since the last summary; use -S TIME to compute a time span anyway")
    for each in removed:
        click.echo(f"retention: {each.line('removed')}")


def _remove_expired(app: App, store: ClusterStore) -> list[Expired]:
    """Remove what is older than [retention] keeps, after the metrics of newer days are stored."""
    from telemetry.store.retention import remove

    with store.summarizing():
        return remove(store, app.config.retention, app.now_s())


def run(app: App, store: ClusterStore, **arguments: Any) -> SummaryCounts:
    """`telemetry.metrics.summary.summarize` with a progress bar."""
    from telemetry.metrics.summary import summarize

    with progress("job metrics") as advance:
        return summarize(store, app.config, progress=advance, **arguments)
