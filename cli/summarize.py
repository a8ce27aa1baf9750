"""`almanac summarize`: compute the metrics of the jobs that new data can touch, here, on Dask, or in Slurm jobs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import ConfigError
from almanac.units import printable
from cli.app import App
from cli.output import json_text, progress
from cli.selection import check_span, time_option
from telemetry.metrics.summary import summarize
from telemetry.retention import remove

if TYPE_CHECKING:
    from telemetry.metrics.dask_engine import Workers
    from telemetry.metrics.partials import Mapper
    from telemetry.metrics.summary import SummaryCounts
    from telemetry.retention import Expired


LOCAL, SLURM = "local", "slurm"
EXTRA = ("cryptography", "dask", "dask_jobqueue", "distributed")


@contextlib.contextmanager
def open_engine(app: App, engine: str) -> Iterator[Mapper]:
    """The function that maps the summary's chunks. Workers start with the first work, and end with the context.

    engine: LOCAL, SLURM, or the address of a Dask scheduler. Raises ConfigError if the extra is not installed.
    """
    if engine not in (LOCAL, SLURM) and "://" not in engine:
        said = f"--engine {printable(engine, 80)}: expected local, slurm, or the address of a Dask scheduler"
        raise click.UsageError(f"{said}, such as tls://host:8786")
    if engine == LOCAL:
        from telemetry.metrics.partials import map_partials

        yield map_partials
        return
    with _needs_extra():
        from telemetry.metrics.dask_engine import DaskMapper

        manager = _workers(app, None if engine == SLURM else engine)
    with contextlib.ExitStack() as stack:
        # A stopped timer, a login node that shuts down, or a lost terminal must not leave jobs behind.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                former = signal.signal(number, lambda number, _frame: sys.exit(128 + number))
                stack.callback(signal.signal, number, former)
        yield DaskMapper(lambda: stack.enter_context(manager))


def _workers(app: App, scheduler: str | None) -> contextlib.AbstractContextManager[Workers]:
    section = app.config.dask
    if scheduler:
        from telemetry.metrics.dask_engine import scheduler_workers

        return scheduler_workers(scheduler, section)
    from telemetry.metrics.slurm_workers import slurm_workers

    shared = Path(section.shared_directory) if section.shared_directory else app.store_root / "workers"
    return slurm_workers(section, app.commands, shared.absolute(), app.config.slurm.bin_dir)


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        import cryptography  # noqa: F401  (Dask asks for it only when it makes keys)

        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        raise ConfigError(
            f"this engine needs {error.name}, which is not installed", "pip install 'slurm-almanac[cluster]'"
        ) from error


@click.command("summarize")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs that ran after this, instead of those with new data.")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs that ran before this. [now]")
@click.option("--engine", metavar="local|slurm|ADDRESS", default=LOCAL, show_default=True,
              help="Compute here, in Slurm jobs, or on a Dask scheduler, such as tls://host:8786.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.pass_obj
def command(app: App, starttime: str | None, endtime: str | None, engine: str, as_json: bool) -> None:
    """Compute the metrics of every job that ran on a day (UTC) with new samples, each job as a whole.

    If only records of jobs have changed, it computes these jobs and those that shared their nodes on these days.
    `almanac ingest` does the same when it has read its sources; with --no-summary it leaves this to this command.
    With -S or -E it computes the jobs of that time span instead, changed or not. Without them it then removes the days
    that are older than [retention] keeps.
    """
    since_s, until_s = time_option(starttime, app.now_s()), time_option(endtime, app.now_s())
    check_span(since_s, until_s)
    app.require_operator("job metrics cover all users")
    with open_engine(app, engine) as mapper:
        counts = run(app, since_s=since_s, until_s=until_s, mapper=mapper)
    removed = [] if since_s is not None or until_s is not None else _remove_expired(app)
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


def _remove_expired(app: App) -> list[Expired]:
    """Remove what is older than [retention] keeps, after the metrics of newer days are stored."""
    with app.store.summarizing():
        return remove(app.store, app.config.retention, app.now_s())


def run(app: App, **arguments: Any) -> SummaryCounts:
    """Run `telemetry.metrics.summary.summarize` with a progress bar."""
    with progress("job metrics") as advance:
        return summarize(app.store, app.config, progress=advance, **arguments)
