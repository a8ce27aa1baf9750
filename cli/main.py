"""The command `almanac`. Sub-commands are imported when they are called, so that --help stays quick."""

from __future__ import annotations

import codecs
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
from cli.app import App, folded, has_libraries
from cli.old_spellings import renewed

SECTIONS = {
    "Your jobs": {
        "jobs": "list past jobs and what they used",
        "report": "report what a job did with its GPUs, and what to ask for",
        "advise": "get advice for one submission",
        "mail": "choose how often you get reports by mail",
    },
    "Every day": {
        "run": "start the tasks that are due: what a timer calls each minute",
        "ingest": "read jobs and GPU counters into the store",
        "summarize": "compute job metrics for days with new data",
        "train": "train the predictors on the jobs in the store",
        "models": "list the trained versions, or switch to another",
        "publish": "write the advice files that Slurm's hooks read",
        "watch": "find running jobs that idle, hang, or are about to fail",
        "waits": "estimate how long a job would wait now, by GPU type",
        "reprioritize": "set the site factor of pending jobs",
        "place": "choose the GPU type of jobs that accept any",
        "changes": "show which pending jobs almanac changed",
        "power": "power nodes down and up, following the demand forecast",
        "mig": "change MIG layouts to what recent jobs ask for",
        "health": "show nodes that fail jobs, and the mean time to failure",
        "site-report": "report on the whole site: use, waste, and cost",
        "characterize": "show use by time, partition, user, and state",
        "metrics": "write almanac's own metrics for Prometheus",
    },
    "Set up": {
        "doctor": "check configuration, store, Slurm, and Prometheus",
        "install-hooks": "install the Slurm hooks, or remove them",
        "forget": "remove everything that is kept of a user",
        "trial": "judge what to switch on at this site",
        "demo": "run everything on a generated site",
    },
    "Studies": {
        "evaluate": "replay past predictions and score them",
        "backtest": "replay past jobs: check memory advice and node power",
        "simulate": "simulate scheduling policies on a trace of jobs",
    },
}
"""The commands with one line about each, in the sections of --help."""
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}

MODULES = {
    **dict.fromkeys(("reprioritize", "place", "changes"), "job_changes"),
    "doctor": "doctor.main",
    "evaluate": "backtest",
}
"""Modules with several commands, or in a folder: the command has its own name there, and is `command` in others."""

CLIENT_COMMANDS = ("advise", "jobs", "report", "mail", "doctor", "install-hooks")
"""Commands of the package slurm-almanac-client alone, which, for users or with some options, need no library
but click and rich."""
CLIENT_HINT = f"use here: {', '.join(CLIENT_COMMANDS)}; operators can install slurm-almanac for the others"


PLAIN_ASCII = "almanac_ascii"
NO_WRITING = 0o002
"""Added to the umask: other users cannot write to any file that a command, or a library that it uses, creates."""


FOLDERS = (
    "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "MPLCONFIGDIR", "DASK_CONFIG",
    "CLUSTERSHELL_CFGDIR", "NETRC",
)  # fmt: skip
"""Folders in which libraries look for settings and keep caches."""


class LazyGroup(click.Group):
    """Imports a command's module only when it is run; the list of commands needs none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS if has_libraries() else CLIENT_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"cli.{MODULES.get(name, name)}")
        command: click.Command = getattr(module, name if name in MODULES else "command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args, warned = renewed(args)
            for warning in warned:
                click.echo(f"warning: {warning}", err=True)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but answer an unknown command with similar ones. Raises click.UsageError."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            guess = did_you_mean(name, COMMANDS)
            said = f"there is no command {printable(name, 80)!r}; {guess}`almanac --help` lists the commands"
            raise click.UsageError(said, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = self.list_commands(ctx)
        width = max(map(len, shown))
        for title, section in SECTIONS.items():
            if rows := [(name.ljust(width), line) for name, line in section.items() if name in shown]:
                with formatter.section(title):
                    formatter.write_dl(rows)


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
        _show_usage(error)
        sys.exit(error.exit_code)
    except AlmanacError as error:
        _complain(str(error), error.hint)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not has_libraries():
            _complain(
                "this command runs on almanac's host: this one has the package slurm-almanac-client alone", CLIENT_HINT
            )
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
        click.echo(_folded(f"warning: {printable(str(message), 1000)}"), err=True)
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
    """Print "?" or a look-alike for what the terminal lacks: one user's job name must not end an operator's command.

    In the locales C and POSIX, all is ASCII. Python itself writes UTF-8 there, and sets LC_CTYPE to C.UTF-8 (PEP 538).
    """
    codecs.register_error("almanac-look-alike", _look_alike)
    codecs.register(lambda name: _plain_ascii() if name == PLAIN_ASCII else None)
    names = [os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if not names[0] and names[1] == "C.UTF-8":
        del names[1]
    is_ascii = next(filter(None, names), "C") in ("C", "POSIX")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=PLAIN_ASCII if is_ascii else None, errors="almanac-look-alike")


def _plain_ascii() -> codecs.CodecInfo:
    """ASCII by another name: click takes a stream of that name for misconfigured, and writes UTF-8 to it."""
    known = codecs.lookup("ascii")
    parts = (known.encode, known.decode, known.streamreader, known.streamwriter)
    return codecs.CodecInfo(*parts, known.incrementalencoder, known.incrementaldecoder, name=PLAIN_ASCII)


def _look_alike(error: UnicodeError) -> tuple[str, int]:
    """The error handler of codecs that writes lines and blocks in ASCII, a character for each."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_ASCII), error.end


class _AsciiTable(dict[int, str]):
    """For str.translate: "?" for what has no look-alike."""

    def __missing__(self, key: int) -> str:
        return "?"


_ASCII = _AsciiTable(zip(map(ord, "▁▂▃▄▅▆▇█·…│─╭╮╰╯"), "_.-:=+*#.~|-++++", strict=True))


def _complain(message: str, hint: str) -> None:
    click.echo(_folded(f"error: {printable(message, 1000)}"), err=True)
    if hint:
        click.echo(_folded(f"try: {printable(hint, 1000)}"), err=True)


def _folded(text: str) -> str:
    return folded(text, sys.stderr, "  ")


def _show_usage(error: click.ClickException) -> None:
    """Show it as click does, but no wider than the terminal."""
    said = _folded(f"Error: {error.format_message()}").removeprefix("Error: ")
    vars(error)["format_message"] = lambda: said
    error.show()


def _stop() -> NoReturn:
    click.echo("stopped", err=True)
    sys.exit(130)


def _stop_full(error: OSError) -> NoReturn:
    hint = "free disk space or raise the quota, then run this again"
    _complain(f"{error.filename or 'a file'}: {error.strerror}", hint)
    sys.exit(StoreError.exit_code)


if __name__ == "__main__":
    main()
