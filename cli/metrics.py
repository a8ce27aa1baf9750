"""`almanac metrics`: almanac's own metrics, for Prometheus."""

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
    help="Write this .prom file, for the textfile collector of node_exporter. [standard output]",
)
@click.pass_obj
def command(app: App, path: Path | None) -> None:
    """Write almanac's own metrics: reports sent, ingest lag, forecast error, and node power. For operators.

    docs/site-report.md lists them. They name no user and no job.
    """
    from cli.metrics_power import power_metrics
    from reports.self_metrics import collect
    from reports.textfile import exposition
    from telemetry.store.atomic import write_atomically

    app.require_operator("these metrics cover all users' jobs")
    if path and path.suffix != ".prom":
        raise click.BadParameter(
            f"{path} does not end in .prom: node_exporter would not read it", param_hint="--textfile"
        )
    store = app.open_store()
    text = exposition([*collect(store, app.now_s()), *power_metrics(app, store)])
    if not path:
        click.echo(text, nl=False)
        return
    try:
        write_atomically(path, text.encode(), READABLE)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}", "choose a file that you can write") from error
