"""The site that a command works on, with what concerns its caller: warnings, and which jobs they may see."""

from __future__ import annotations

import importlib.util
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from almanac.errors import NotAllowedError
from almanac.units import printable, valid_unicode
from telemetry.site import Site

if TYPE_CHECKING:
    from reports.published.caller import CallerJobs
    from telemetry.store.partitions import Stray

COUNT = click.IntRange(min=0)
"""The type of an option that limits a number of rows; 0 stands for all."""
WIDEST = 100
"""Longest line of folded text."""
_STRAYS_NAMED = 5


def has_libraries() -> bool:
    """Return True if more than slurm-almanac-client is installed on this host."""
    return importlib.util.find_spec("duckdb") is not None


def folded(text: str, stream: TextIO, indent: str = "") -> str:
    """The text in lines of a terminal's width, of whole words; one line if the stream is no terminal, for scripts."""
    if not stream.isatty():
        return text
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class CommandGroup(click.Group):
    """A group whose help lists each command with the whole first sentence of its help; click's cuts it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(each)) for name, each in found.items() if each])


def first_sentence(command: click.Command) -> str:
    return command.get_short_help_str(limit=1000)


@dataclass
class App(Site):
    """The site that the options before the command's name choose."""

    are_strays_named: bool = True
    """Name skipped files of the store on stderr. A command that lists them itself sets this to False."""
    damaged_files: set[Path] = field(default_factory=set)
    """Damaged files of the store that the command left out: `cli.main` then exits with 4."""

    def name_strays(self, strays: Sequence[Stray]) -> None:
        strays = [stray for stray in strays if stray.path not in self.damaged_files]
        self.damaged_files |= {stray.path for stray in strays if stray.is_damaged}
        if not self.are_strays_named:
            return
        for stray in strays[:_STRAYS_NAMED]:
            said = printable(f"{stray.path}: {stray.reason}", 1000)
            click.echo(f"warning: {'left out' if stray.is_damaged else 'skipped in the store'}: {said}", err=True)
        if len(strays) > _STRAYS_NAMED:
            click.echo(
                f"warning: {len(strays) - _STRAYS_NAMED} more skipped; run `almanac doctor` to list them", err=True
            )

    @cached_property
    def caller_jobs(self) -> CallerJobs:
        """The jobs that the caller may see: in the store, or published for them.

        Raises ConfigError, and StoreError if the caller names a store that they cannot read.
        """
        from reports.published.caller import PublishedJobs, StoreJobs

        if self.may_read_store and has_libraries():
            return StoreJobs(self, None if self.is_operator else self.caller)
        if self.store_path or os.environ.get("ALMANAC_STORE"):
            self.open_store()
        return PublishedJobs(Path(self.config.hooks.advice_dir), os.getuid())

    def check_rules(self) -> None:
        """Give operators a faulty rules.toml as an error, because they can correct it, and others a warning."""
        # Without such a file, a published report needs nothing of the rules.
        path = Path(self.config.source).parent / "rules.toml" if self.config.source else None
        if path is None or not (path.exists() or path.is_symlink()):
            return
        from reports.job.rules import choices_of

        fault = choices_of(self.config).rules_fault
        if fault and self.is_operator:
            raise fault
        if fault:
            click.echo(f"warning: this report leaves out the site's own rules: {fault}", err=True)

    def visible_user(self, asked: str | None) -> str:
        """The user whose jobs the command shows. Raises NotAllowedError if the caller may not see them."""
        if asked is None or asked == self.caller:
            return self.caller
        if not self.is_operator:
            raise NotAllowedError(f"{asked} is another user, and {self.caller} is not an operator", "leave out --user")
        return valid_unicode(asked)
