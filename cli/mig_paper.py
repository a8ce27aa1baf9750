"""`almanac mig paper`: the mixes of the MIG paper under its two schemes, beside what the paper reports."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

import click

from cli.output import json_text, show_table

if TYPE_CHECKING:
    from simulator.mig.paper_mixes import MixRow

_COLUMNS = ["mix", "A paper", "A trial", "A ours", "B paper", "B trial", "B ours", "B 5% to 95%"]
_WIDTH = 80


@click.command("paper")
@click.option(
    "--orders", type=click.IntRange(1, 100_000), default=300, show_default=True, help="Random orders of a mixed batch."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(orders: int, as_json: bool) -> None:
    """Run the batches of the MIG paper again, on a simulated A100-40.

    The table shows throughput over one job at a time on the whole GPU: what the paper reports, what an earlier
    simulation gave, and what this one gives. Scheme A sorts jobs by memory; scheme B keeps their order. A mixed batch
    runs in many random orders under scheme B: the table shows their mean, and the range of most.
    """
    from simulator.mig.paper_mixes import mixes_table, not_redone

    rows = mixes_table(orders)
    if as_json:
        click.echo(json_text({"orders": orders, "mixes": [_plain(row) for row in rows], "not_redone": not_redone()}))
        return
    show_table(_COLUMNS, [_cells(row) for row in rows], right=_COLUMNS[1:])
    click.echo()
    for row in rows:
        _say(f"{row.mix.name}, {row.mix.about}", row.mix.note + _with_one_queue(row))
    click.echo("\nNot run again:")
    for what, why in not_redone().items():
        _say(what, why)


def _cells(row: MixRow) -> list[str]:
    mix = row.mix
    spread = "-" if row.least_b == row.greatest_b else f"{row.low_b:.2f} to {row.high_b:.2f}"
    figures = (mix.paper_a, mix.trial_a, row.ours_a, mix.paper_b, mix.trial_b, row.ours_b)
    cells = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
    return [mix.name, f"<= {cells[0]}" if mix.is_at_most else cells[0], *cells[1:], spread]


def _with_one_queue(row: MixRow) -> str:
    return f": {row.ours_a_one_queue:.2f}" if row.mix.is_split else ""


def _say(what: str, why: str) -> None:
    click.echo(textwrap.fill(f"{what}: {why}", _WIDTH - 1, subsequent_indent="  ", break_on_hyphens=False))


def _plain(row: MixRow) -> dict[str, Any]:
    """The row with the number of jobs instead of the jobs."""
    fields = dataclasses.asdict(row)
    mix = fields.pop("mix")
    return {**mix, **fields, "jobs": len(mix["jobs"])}
