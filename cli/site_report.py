"""`almanac site-report`: how jobs used the site's GPUs in a time span, as a page and as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.atomic import write_output
from almanac.errors import StoreError
from almanac.units import format_count
from cli.app import App
from cli.characterize import show_study
from cli.output import json_text, local_time, show_table
from cli.selection import check_span, time_option
from reports.site.power import power_table
from reports.site.report import build_site_report
from reports.site.tables import advice_table, compared_with, faults_table, site_tables, summary_boxes, write_csv
from reports.site.tasks import packing_table, request_tasks, waste_tasks

if TYPE_CHECKING:
    from reports.site.report import SiteReport
    from reports.site.tasks import ToDo
    from reports.site.words import PageTable

MOST_TASKS, MOST_REQUESTS = 5, 2
"""Most entries of the to-do list on the terminal: of waste, and of each kind of request."""


@click.command("site-report")
@click.option("-S", "--starttime", metavar="TIME", help="Use jobs submitted at this time or later. [now-30days]")
@click.option("-E", "--endtime", metavar="TIME", help="Use jobs submitted before this time. [now]")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as one self-contained HTML file.",
)
@click.option(
    "--csv",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write every table to this folder, as CSV that is safe to open in a spreadsheet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the tables of --csv as JSON, without those of the study.")
@click.option("--study", is_flag=True, help="Print the study's figures beside Perlmutter's; --csv also writes Parquet.")
@click.option("--names", is_flag=True, help="Show user names instead of pseudonyms.")
@click.pass_obj
def command(
    app: App,
    starttime: str | None,
    endtime: str | None,
    html_file: Path | None,
    folder: Path | None,
    as_json: bool,
    study: bool,
    names: bool,
) -> None:
    """Report on the whole site: what to do, use, waste, energy, memory tiers, and the study's figures. For operators.

    Prints the to-do list and the totals unless you give --html, --csv, or --json. docs/site-report.md explains
    every figure. With --study, it compares jobs across the site as the Perlmutter study does: size, pipes, memory,
    roofline, energy, imbalance, and correlations (docs/characterize.md).
    """
    if as_json and (html_file or (folder and not study)):
        raise click.UsageError("--json cannot be used with --html or --csv")
    if study and (html_file or names):
        raise click.UsageError("--study goes with -S, -E, --csv, and --json")

    app.require_operator("this report covers all users' jobs")
    now_s = app.now_s()
    span_s = time_option(starttime or "now-30days", now_s) or 0, time_option(endtime, now_s) or now_s
    check_span(span_s[0] if starttime else None, span_s[1])
    if study:
        show_study(app, span_s, folder, as_json)
        return
    report = build_site_report(app.at(now_s), span_s, has_names=names, has_study=bool(html_file or folder))
    if as_json:
        click.echo(json_text({name: table.to_pylist() for name, table in site_tables(report).items()}))
        return
    if html_file:
        _write_page(html_file, report)
    if folder:
        click.echo(f"{len(write_csv(report, folder))} tables written to {folder}")
    if not report.totals.total.jobs:
        click.echo(f"no GPU jobs submitted since {local_time(span_s[0])} have ended; try other -S, -E, or -M")
    elif not (html_file or folder):
        _show(report)


def _write_page(path: Path, report: SiteReport) -> None:
    from reports.site.page import render_site_page

    page = render_site_page(report).encode()
    try:
        write_output(path, page)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}", "choose another file") from error
    click.echo(f"page written to {path} ({format_count(len(page) // 1000)} kB)")


def _show(report: SiteReport) -> None:
    """The to-do list and the totals, within 80 columns."""
    for figure, words, of in summary_boxes(report):
        _wrap(f"{words}: {figure}{f' ({of})' if of else ''}", indent="  ")
    _wrap(compared_with(report))
    _show_tasks("To do", waste_tasks(report, MOST_TASKS))
    _show_table(faults_table(report))
    _show_tasks(
        "Requests larger than needed (no GPU-hours to win, but shorter queues)", request_tasks(report, MOST_REQUESTS)
    )
    _show_part("Advice", advice_table(report))
    _show_part("Sharing GPUs", packing_table(report))
    power = power_table(report.power, report.config)
    _show_part("Node power", power if isinstance(power, str) else power.narrowed("CO2"))
    names = "" if report.has_names else ", --names shows users"
    click.echo(f"\n--html FILE writes the whole report, --csv DIR its tables{names}")


def _show_tasks(title: str, tasks: Sequence[ToDo]) -> None:
    click.echo(f"\n{title}")
    for number, task in enumerate(tasks, 1):
        _wrap(f"{number:>2}. {task.action}", indent="    ")
        _wrap(f"    {task.why}", indent="    ")
    if not tasks:
        click.echo("  nothing that was measured")


def _show_part(name: str, shown: PageTable | str) -> None:
    if not isinstance(shown, str):
        _show_table(shown)
    elif shown:
        click.echo()
        _wrap(f"{name}: {shown}")


def _show_table(table: PageTable) -> None:
    click.echo()
    show_table(table.columns, table.cells, right=table.columns[1:])
    if table.note:
        _wrap(table.note)


def _wrap(text: str, indent: str = "") -> None:
    click.echo(textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False))
