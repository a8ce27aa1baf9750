"""Print tables for people, JSON and separated text for programs, and progress on a terminal."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

from almanac.records import Counts
from almanac.units import cell_text, format_count, printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


WIDTH = 1000
"""Columns of a table that is not shortened: enough for any table."""


class Advance(Protocol):
    """Moves a progress bar: `done` of `total`, with an optional note."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def json_text(data: Any) -> str:
    """JSON in ASCII, so that no terminal or parser sees a raw control or bidi character."""
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    right: Sequence[str] = (),
    title: str = "",
    *,
    gap: int = 2,
    is_whole: bool = False,
) -> None:
    """Print a table for people; control characters in cells are escaped.

    gap: blanks between columns. is_whole: do not shorten cells, even if lines are then longer than the terminal's.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table: Table = Table(
        box=None,
        header_style="bold",
        title=title or None,
        title_justify="left",
        pad_edge=False,
        padding=(0, gap, 0, 0),
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() and not is_whole else WIDTH)
    console.print(table)


def write_separated(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], delimiter: str, *, is_for_spreadsheets: bool = False
) -> None:
    """Print separated text with a header; cells are quoted if needed, and missing values are empty.

    is_for_spreadsheets: escape text that a spreadsheet would take for a formula.
    """
    writer = csv.writer(sys.stdout, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([cell_text(row[column], is_for_spreadsheets=is_for_spreadsheets) for column in columns])


def show_counts(what: str, counts: Counts, unit: str = "records") -> None:
    """Print how many records were read, kept, and dropped, with one example of each reason."""
    click.echo(f"{what}: {format_count(counts.seen)} {unit} read, {format_count(counts.kept)} kept")
    said = [(reason, number, "") for reason, number in sorted(counts.dropped.items())]
    said += [(note, number, "kept ") for note, number in sorted(counts.notes.items())]
    for reason, number, kept in said:
        example = counts.examples.get(reason, "")
        click.echo(
            f"  {format_count(number)} {kept}{printable(reason)}"
            + (f", such as: {printable(example)}" if example else "")
        )


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """Show a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=printable(note))
