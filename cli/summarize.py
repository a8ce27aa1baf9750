"""`almanac summarize`: compute the metrics of jobs from what the store holds."""

from __future__ import annotations

import click

from cli.app import App
from cli.engines import engine_options, open_engine
from cli.ingest import FOREVER_S, moment
from cli.output import progress


@click.command("summarize")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs that ran at or after this time. [all]")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs that ran before this time. [all]")
@engine_options
@click.pass_obj
def command(app: App, starttime: str | None, endtime: str | None, engine: str, scheduler: str | None) -> None:
    """Compute the metrics of every ended GPU job of a span."""
    from telemetry.summary import summarize

    since_s, until_s = moment(starttime, app.now_s()), moment(endtime, app.now_s())
    span = (-FOREVER_S if since_s is None else since_s, FOREVER_S if until_s is None else until_s)
    store = app.open_store()
    with progress("job metrics") as advance, open_engine(app, engine, scheduler) as mapper:
        counts = summarize(store, app.cluster(store), app.config, *span, progress=advance, mapper=mapper)
    for line in counts.lines():
        click.echo(line)
