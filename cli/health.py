"""`almanac health`: nodes that fail far more jobs than others, failures by cause, and MTTF by number of GPUs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from almanac.units import counted, format_count, format_duration, number_text, printable
from cli.app import App, folded
from cli.output import json_text, show_table

if TYPE_CHECKING:
    from advisor.health.checkpoints import Mttf
    from advisor.health.record import SiteHealth


@click.command("health")
@click.option("--days", type=click.IntRange(1, 3660), default=30, show_default=True, help="Days of the record to use.")
@click.option("--json", "as_json", is_flag=True, help="Print the rates and all failures as JSON.")
@click.pass_obj
def command(app: App, days: int, as_json: bool) -> None:
    """Show which nodes fail far more jobs than others, why, and the mean time to failure by GPUs. For operators.

    Counts jobs that a node ended: Slurm says so, or they failed within minutes of a GPU error that is no program's
    (docs/health.md). For a node that fails jobs at over five times the rate of the others, it prints the command that
    drains it. It drains nothing itself.
    """
    app.require_operator("failures name all users' jobs")
    from advisor.health.record import NODE_COLUMNS, site_health  # late: root loads no library before it must

    found = site_health(app.store, app.now_s(), days)
    if as_json:
        click.echo(json_text({"cluster": app.store.cluster, **found.as_dict()}))
        return
    for line in _lines(found):
        click.echo(folded(line, sys.stdout, "  "))
    if rows := found.rows():
        show_table(NODE_COLUMNS, rows, right=NODE_COLUMNS[1:])
    show_table(
        ["GPUs", "failures", "MTTF", "95% interval"],
        [_size_cells(size) for size in found.sizes],
        right=["GPUs", "failures", "MTTF", "95% interval"],
    )


def _lines(found: SiteHealth) -> Iterator[str]:
    from advisor.health.record import drain_command

    for node in found.lemons:
        yield f"look at {printable(node.node, 80)}: {printable(drain_command(node), 400)}"
        yield f"  why: {printable(found.evidence(node), 1000)}"
    days = round((found.until_s - found.since_s) / 86400)
    standing = "1 node stands out" if len(found.lemons) == 1 else f"{len(found.lemons) or 'no'} nodes stand out"
    yield f"{counted(len(found.failures), 'job')} failed by a node in {counted(days, 'day')}; {standing}"


def _size_cells(size: Mttf) -> list[str]:
    gpus = str(size.to_gpus) if size.from_gpus == size.to_gpus else f"{size.from_gpus} to {size.to_gpus}"
    high = f"to {format_duration(3600 * size.high_h)}" if size.high_h < math.inf else "or more"
    mttf = format_duration(3600 * size.mttf_h) if size.mttf_h is not None else number_text(None, "")
    return [gpus, format_count(size.failures), mttf, f"{format_duration(3600 * size.low_h)} {high}"]
