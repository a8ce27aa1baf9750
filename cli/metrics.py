"""`almanac metrics`: what almanac says of itself, for Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from almanac.errors import StoreError
from cli.app import App

READABLE = 0o644
"""node_exporter runs as another user."""


@click.command("metrics")
@click.option(
    "--textfile",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replace this file, for node_exporter's textfile collector; its name ends in .prom. [standard output]",
)
@click.pass_obj
def command(app: App, path: Path | None) -> None:
    """Write metrics of almanac itself: reports sent, ingest lag, forecast error, node power (operators).

    docs/site-report.md lists them. They name no user and no job.
    """
    from cli.metrics_power import power_metrics
    from reports.self_metrics import collect
    from reports.textfile import exposition
    from telemetry.store.atomic import write_atomically

    app.require_operator("these metrics are of everybody's jobs")
    if path and path.suffix != ".prom":
        raise click.BadParameter(f"{path}: node_exporter reads only names that end in .prom", param_hint="--textfile")
    store = app.open_store()
    text = exposition([*collect(store, app.now_s()), *power_metrics(app, store)])
    if not path:
        click.echo(text, nl=False)
        return
    try:
        write_atomically(path, text.encode(), READABLE)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}", "name a file that you may write") from error
