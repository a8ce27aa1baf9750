"""Where `almanac summarize` computes: in this process, on Dask, or in jobs of the site's Slurm."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from almanac.errors import ConfigError
from cli.app import App

if TYPE_CHECKING:
    from telemetry.metrics.chunks import Mapper
    from telemetry.metrics.workers import Workers

ENGINES = ("local", "dask", "slurm")
EXTRA = ("cryptography", "dask", "dask_jobqueue", "distributed")
Command = TypeVar("Command", bound=Callable[..., object])


def engine_options(command: Command) -> Command:
    """--engine and --scheduler, which arrive as `engine` and `scheduler`."""
    where = "Compute in this process, on a Dask scheduler's workers, or on workers in Slurm jobs. [local]"
    address = "Running scheduler for --engine dask, such as tls://host:8786."
    command = click.option("--scheduler", metavar="ADDRESS", help=address)(command)
    return click.option("--engine", type=click.Choice(ENGINES), default="local", help=where)(command)


@contextlib.contextmanager
def open_engine(app: App, engine: str, scheduler: str | None = None) -> Iterator[Mapper]:
    """The function that maps the summary's chunks. Workers start with the first work, and end with the context.

    Raises ConfigError if the extra is not installed.
    """
    if bool(scheduler) != (engine == "dask"):
        raise click.UsageError(
            "--engine dask and --scheduler ADDRESS need each other; --engine local uses all cores here"
        )
    if engine == "local":
        from telemetry.metrics.chunks import map_partials

        yield map_partials
        return
    with _needs_extra():
        from telemetry.metrics.dask_engine import DaskMapper

        manager = _workers(app, scheduler)
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
        from telemetry.metrics.workers import scheduler_workers

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
