"""Writes the man pages and the shells' completions of `almanac` into two folders below FOLDER: man1/, completions/."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from click_man.core import write_man_pages

from almanac import __version__
from cli.app import first_sentence
from cli.main import COMMANDS, EPILOG, cli

COMPLETIONS = {"bash": "almanac", "zsh": "_almanac"}
"""Shells and the names under which they look for a command's completion."""


def whole_group() -> click.Group:
    """The command line with every sub-command loaded, which click-man looks for."""
    group = copy.copy(cli)
    context = click.Context(group, info_name="almanac")
    group.commands = {name: command for name in COMMANDS if (command := cli.get_command(context, name))}
    _set_short_help(group)
    return group


def _set_short_help(command: click.Command) -> None:
    """Keep click-man from cutting the first sentence of the help in the line NAME, which `man -k` shows."""
    command.short_help = first_sentence(command).removesuffix(".")
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _set_short_help(each)


def write_manual(folder: Path) -> None:
    """One page per command; its date is $SOURCE_DATE_EPOCH's day, or today."""
    folder.mkdir(parents=True, exist_ok=True)
    write_man_pages("almanac", whole_group(), version=__version__, target_dir=str(folder))
    statuses = ".br\n".join(f"{part.strip()}\n" for part in EPILOG.replace("Exit codes:", "").split(";"))
    files = "/etc/almanac/almanac.toml\n.br\n/var/lib/almanac\n"
    with (folder / "almanac.1").open("a", encoding="utf-8") as page:
        page.write(f".SH EXIT STATUS\n{statuses}.SH FILES\n{files}.SH SEE ALSO\nsbatch\\-almanac(1)\n")


def write_completions(folder: Path) -> None:
    """Scripts that ask `almanac` itself what may come next."""
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in COMPLETIONS.items():
        script = get_completion_class(shell)
        if script is None:
            raise SystemExit(f"click has no completion for {shell}")
        # Not source(), which asks the bash of this machine for its version.
        found = script(cli, {}, "almanac", "_ALMANAC_COMPLETE")
        (folder / name).write_text(found.source_template % found.source_vars(), encoding="utf-8")


if __name__ == "__main__":
    write_manual(Path(sys.argv[1]) / "man1")
    write_completions(Path(sys.argv[1]) / "completions")
