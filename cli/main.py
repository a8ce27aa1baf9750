"""The command `almanac`. Sub-commands are imported when they are called, so that --help stays quick."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from typing import NoReturn

import click

from almanac import __version__
from almanac.errors import AlmanacError, StoreError
from almanac.units import printable
from cli.app import App

COMMANDS = {
    "ingest": "read jobs and GPU counters into the store",
    "summarize": "compute the metrics of jobs with new data",
    "train": "fit the predictors to what the store holds",
    "evaluate": "say how good the predictions would have been",
    "models": "list the trained versions, and go back to one",
    "advise": "say what to ask for, for one submission",
    "publish": "write the advice files that Slurm's hooks read",
    "backtest": "replay the record: would the advice have held?",
    "reprioritize": "give pending jobs the priority term predicted for them",
    "power": "power nodes down and up for the demand that is forecast",
    "jobs": "list past jobs with what they used",
    "report": "say what a job did with its GPUs, and what to ask for next",
    "mail": "say how often you want reports by mail",
    "characterize": "compare jobs across the site, as the Perlmutter study does",
    "site-report": "report on the whole site: use, waste, cost, and the study's figures",
    "metrics": "write metrics of almanac itself, for Prometheus",
    "doctor": "check configuration, store, Slurm and Prometheus",
    "install-hooks": "put the hooks into Slurm's Lua scripts, or take them out",
    "demo": "show the whole path on a generated site",
}


NO_WRITING = 0o002
"""Added to the umask: no other user writes to anything that a command, or a library that it uses, makes."""


FOLDERS = (
    "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "MPLCONFIGDIR", "DASK_CONFIG",
    "CLUSTERSHELL_CFGDIR", "NETRC",
)  # fmt: skip
"""Where libraries look for settings and keep caches."""


class LazyGroup(click.Group):
    """Imports a command's module only when it is run; the list of commands needs none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


EPILOG = """
Exit codes: 0 done; 1 fault; 2 wrong usage or a submission that cannot be understood; 3 configuration; 4 store;
5 source (Slurm, Prometheus, file); 6 not allowed; 7 nothing trained; 10 no evidence to advise from;
130 stopped by Ctrl-C.
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "config_path", metavar="FILE", help="Configuration. [$ALMANAC_CONFIG, /etc/almanac, ~/.config]"
)
@click.option("--store", "store_path", metavar="DIR", help="Store. [$ALMANAC_STORE, or the configuration's]")
@click.option("-M", "--cluster", "cluster_name", metavar="NAME", help="Slurm cluster, where there are several.")
@click.version_option(__version__, prog_name="almanac")
@click.pass_context
def cli(ctx: click.Context, config_path: str | None, store_path: str | None, cluster_name: str | None) -> None:
    """What GPU jobs really did, used for the next ones: advice at submit time for Slurm clusters."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.obj = App(config_path, store_path, cluster_name)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; every error ends in words and an exit code."""
    _leave_homes_of_others()
    _print_any_text()
    umask = os.umask(0o077)
    os.umask(umask | NO_WRITING)
    try:
        code = cli.main(args=argv, prog_name="almanac", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _stop()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except AlmanacError as error:
        click.echo(f"almanac: {printable(str(error), 1000)}", err=True)
        if error.hint:
            click.echo(f"  to do: {printable(error.hint, 1000)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _stop_full(error)
        if isinstance(error, RuntimeError) and "interrupted" in str(error):  # Ctrl-C within DuckDB
            _stop()
        if os.environ.get("ALMANAC_DEBUG"):
            raise
        click.echo(f"almanac: {type(error).__name__}: {printable(str(error), 1000)}", err=True)
        click.echo("  to do: if this is no matter of rights or space, report it; ALMANAC_DEBUG=1 shows where", err=True)
        sys.exit(1)
    finally:
        os.umask(umask)
    sys.exit(code if isinstance(code, int) else 0)


def _leave_homes_of_others() -> None:
    """Drop the variables that name another user's folders: some `sudo` keep HOME, and libraries would read what that
    user planted there, and write through links. Without HOME, the user database gives the home folder.
    """
    for name in FOLDERS:
        with contextlib.suppress(OSError):
            if (path := os.environ.get(name)) and os.stat(path).st_uid not in (0, os.geteuid()):  # noqa: PTH116
                del os.environ[name]


def _print_any_text() -> None:
    """Print "?" for what the terminal's encoding lacks: one user's job name must not end an operator's command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _stop() -> NoReturn:
    click.echo("almanac: stopped", err=True)
    sys.exit(130)


def _stop_full(error: OSError) -> NoReturn:
    click.echo(f"almanac: {printable(str(error.filename or 'a file'), 1000)}: {error.strerror}", err=True)
    click.echo("  to do: free space on its disk, or raise the quota, and run this again", err=True)
    sys.exit(StoreError.exit_code)


if __name__ == "__main__":
    main()
