"""The command `almanac`. Sub-commands are imported when they are called, so that --help stays quick."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import warnings
from typing import NoReturn, TextIO

import click

from almanac import __version__
from almanac.errors import AlmanacError, DamageWarning, StoreError
from almanac.units import counted, did_you_mean, printable
from cli.app import App, has_libraries

COMMANDS = {
    "ingest": "read jobs and GPU counters into the store",
    "summarize": "compute job metrics for days with new data",
    "train": "train the predictors on the jobs in the store",
    "evaluate": "replay past predictions and score them",
    "models": "list the trained versions, or switch to another",
    "advise": "get advice for one submission",
    "publish": "write the advice files that Slurm's hooks read",
    "backtest": "replay past jobs: check memory advice and node power",
    "simulate": "simulate scheduling policies on a trace of jobs",
    "reprioritize": "set the site factor of pending jobs",
    "waits": "estimate how long a job would wait now, by GPU type",
    "power": "power nodes down and up, following the demand forecast",
    "mig": "change MIG layouts to what recent jobs ask for",
    "place": "choose the GPU type of jobs that accept any",
    "jobs": "list past jobs and what they used",
    "report": "report what a job did with its GPUs, and what to ask for",
    "mail": "choose how often you get reports by mail",
    "characterize": "compare jobs across the site, as in the Perlmutter study",
    "site-report": "report on the whole site: use, waste, and cost",
    "metrics": "write almanac's own metrics for Prometheus",
    "run": "start the tasks that are due: what a timer calls each minute",
    "doctor": "check configuration, store, Slurm, and Prometheus",
    "forget": "remove everything that is kept of a user",
    "install-hooks": "install the Slurm hooks, or remove them",
    "demo": "run everything on a generated site",
}

CLIENT_COMMANDS = ("advise", "mail", "doctor", "install-hooks")
"""What the package slurm-almanac-client offers alone: commands that, for users or with some options, need no library
but click."""
CLIENT_HINT = f"install slurm-almanac on this host; slurm-almanac-client has {', '.join(CLIENT_COMMANDS)}"


NO_WRITING = 0o002
"""Added to the umask: other users cannot write to any file that a command, or a library that it uses, creates."""


FOLDERS = (
    "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "MPLCONFIGDIR", "DASK_CONFIG",
    "CLUSTERSHELL_CFGDIR", "NETRC",
)  # fmt: skip
"""Where libraries look for settings and keep caches."""


class LazyGroup(click.Group):
    """Imports a command's module only when it is run; the list of commands needs none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS if has_libraries() else CLIENT_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """What click does, but an unknown command is answered with similar ones. Raises click.UsageError."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            guess = did_you_mean(name, COMMANDS)
            said = f"there is no command {printable(name, 80)!r}; {guess}`almanac --help` lists the commands"
            raise click.UsageError(said, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


EPILOG = """
Exit codes: 0 success; 1 failure; 2 wrong usage or unreadable submission; 3 configuration; 4 store; 5 source (Slurm,
Prometheus, file); 6 not allowed; 7 nothing trained; 10 no evidence for advice; 130 stopped by Ctrl-C.
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "config_path", metavar="FILE", help="Configuration file. [$ALMANAC_CONFIG, /etc/almanac, ~/.config]"
)
@click.option("--store", "store_path", metavar="DIR", help="Folder of the store. [$ALMANAC_STORE, or store.path]")
@click.option("-M", "--cluster", "cluster_name", metavar="NAME", help="Slurm cluster, if the store holds several.")
@click.version_option(__version__, prog_name="almanac")
@click.pass_context
def cli(ctx: click.Context, config_path: str | None, store_path: str | None, cluster_name: str | None) -> None:
    """Advise GPU jobs on Slurm clusters from what past jobs really used."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.obj = App(config_path, store_path, cluster_name)


@cli.result_callback()
@click.pass_obj
def _name_damage(app: App, /, code: object, **_: object) -> object:
    """Say that damaged files were left out, and exit with 4, unless the command itself failed."""
    if not app.damaged_files or not app.are_strays_named:
        return code
    files = counted(len(app.damaged_files), "damaged file")
    click.echo(f"error: {files} of the store left out: what you see is not complete", err=True)
    click.echo("try: almanac doctor, which names each of them and says what to do", err=True)
    return code or StoreError.exit_code


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Every error prints what happened and what to try, and sets the exit code."""
    _leave_homes_of_others()
    _print_any_text()
    warnings.showwarning = _show_warning
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
        _complain(str(error), error.hint)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not has_libraries():
            _complain(f"this needs {error.name}, which comes with the package slurm-almanac", CLIENT_HINT)
            sys.exit(1)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _stop_full(error)
        if isinstance(error, RuntimeError) and "interrupted" in str(error):  # Ctrl-C within DuckDB
            _stop()
        if os.environ.get("ALMANAC_DEBUG"):
            raise
        hint = "if this is not a permission or disk-space problem, report it with the output of ALMANAC_DEBUG=1"
        _complain(f"{type(error).__name__}: {error}", hint)
        sys.exit(1)
    finally:
        os.umask(umask)
    sys.exit(code if isinstance(code, int) else 0)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """Print our own warnings as a line of text, and those of libraries as Python does."""
    if issubclass(category, DamageWarning):
        click.echo(f"warning: {printable(str(message), 1000)}", err=True)
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


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


def _complain(message: str, hint: str) -> None:
    click.echo(f"error: {printable(message, 1000)}", err=True)
    if hint:
        click.echo(f"try: {printable(hint, 1000)}", err=True)


def _stop() -> NoReturn:
    click.echo("stopped", err=True)
    sys.exit(130)


def _stop_full(error: OSError) -> NoReturn:
    hint = "free disk space or raise the quota, then run this again"
    _complain(f"{error.filename or 'a file'}: {error.strerror}", hint)
    sys.exit(StoreError.exit_code)


if __name__ == "__main__":
    main()
