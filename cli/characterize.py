"""`almanac characterize`, the use of the site (Hu et al.), and `almanac site-report --study`, as Cankur et al. do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count, format_duration, printable
from cli.app import App
from cli.output import COLUMNS, json_text, local_time, show_table
from cli.selection import check_span, time_option
from reports.site.report import pseudonyms, shown_use
from telemetry.characterize.site_use import BY, EVERY_DAY, SiteUse, site_use
from telemetry.characterize.study import characterize, load_population, note_on
from telemetry.characterize.table import csv_content, write_files, write_tables

if TYPE_CHECKING:
    from telemetry.characterize.table import Result

_MOST_ROWS = 30
_HEADINGS = {
    "mean_util": "in use", "median_util": "median", "known_frac": "known", "gpu_jobs_an_hour": "GPU jobs an hour",
    "cpu_jobs_an_hour": "CPU jobs an hour", "one_gpu_jobs": "1 GPU", "multi_gpu_jobs": "more", "cpu_jobs": "no GPU",
    "one_gpu_util": "by 1 GPU", "multi_gpu_util": "by more", "is_partial": "part", "gpus": "GPUs",
    "mean_gpus": "GPUs each", "mean_delay_s": "mean wait", "p50_run_s": "median run", "gpu_time_share": "GPU time",
    "gpus_from": "GPUs from", "cumulative_share": "up to", "cumulative_gpu_time_share": "GPU time up to",
    "delay_h": "waited, h", "delay_share": "of all waiting",
}  # fmt: skip
_TEXTS = ("kind", "outcome", "quantity", "user", "partition", "month")
_HIDDEN = (
    "weekday", "sd_util", "gpu_jobs", "p25_run_s", "p75_run_s", "p95_delay_s", "low_util", "q1_util", "q3_util",
    "high_util", "p50_delay_s", "never_started",
)  # fmt: skip
"""Columns of --csv and --json that the terminal leaves out."""


@click.command("characterize")
@click.option("--by", type=click.Choice(BY), help="Show the tables of this subject. [what the tables imply]")
@click.option("-S", "--starttime", metavar="TIME", help="Use jobs submitted at this time or later. [now-90days]")
@click.option("-E", "--endtime", metavar="TIME", help="Use jobs submitted before this time. [now]")
@click.option(
    "--csv",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write every table to this folder, as CSV that is safe to open in a spreadsheet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all tables, or those of --by, as JSON.")
@click.option("--names", is_flag=True, help="Show user names instead of pseudonyms.")
@click.pass_obj
def command(
    app: App, by: str | None, starttime: str | None, endtime: str | None, folder: Path | None, as_json: bool,
    names: bool,
) -> None:  # fmt: skip
    """Characterize the use of the site by time, partition, user, and final state of jobs. For operators.

    Says what the tables imply and what to set, as the study of Helios does; all jobs count, those without GPUs too.
    docs/characterize.md explains the tables.
    """
    app.require_operator("these tables cover all users' jobs")
    now_s = app.now_s()
    span_s = time_option(starttime or "now-90days", now_s) or 0, time_option(endtime, now_s) or now_s
    check_span(span_s[0] if starttime else None, span_s[1])
    store, config = app.store, app.config
    found = shown_use(
        site_use(store, span_s, config.node_sets, config.site.zone), str if names else pseudonyms(store.root)
    )
    tables = found.of(by) if by else found.tables
    if folder:
        files = write_files(folder, ((f"{name}.csv", csv_content(rows)) for name, rows in tables.items()))
        click.echo(f"{len(files)} tables written to {folder}")
    elif as_json:
        span = {"cluster": store.cluster, "since_s": span_s[0], "until_s": span_s[1], "note": found.note}
        rows = {name: table.to_pylist() for name, table in tables.items()}
        said = [{"by": subject, "says": text} for subject, text in found.implications]
        click.echo(json_text({**span, "implications": said, "tables": rows}))
    else:
        _show_use(found, by, span_s)


def _show_use(found: SiteUse, by: str | None, span_s: tuple[int, int]) -> None:
    if not found.tables["states"].num_rows:
        click.echo(f"no jobs submitted since {local_time(span_s[0])} have ended; try other -S, -E, or -M")
        return
    for subject, text in found.implications:
        if by in (None, subject):
            click.echo(textwrap.fill(f"{subject + ':':<11}{text}", COLUMNS, subsequent_indent=" " * 11))
    for name, table in found.of(by).items() if by else ():
        rows = [row for row in table.to_pylist() if row.get("weekday", EVERY_DAY) == EVERY_DAY]
        columns = [each for each in table.column_names if each not in _HIDDEN]
        click.echo()
        cells = [[_cell(each, row[each]) for each in columns] for row in rows[:_MOST_ROWS]]
        numbers = [_heading(each) for each in columns if each not in _TEXTS]
        show_table([_heading(each) for each in columns], cells, numbers, name.replace("_", " "))
    more = "" if by else f"; --by {'|'.join(BY)} shows tables"
    click.echo(f"\n{textwrap.fill(found.note, COLUMNS)}\n--csv DIR writes all of them{more}")


def _heading(name: str) -> str:
    return _HEADINGS.get(name, name.removesuffix("_s").replace("_", " "))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str):
        return printable(value, 40) or "(none)"
    if name.endswith("_s"):
        return format_duration(value)
    if name.endswith(("frac", "share", "util", "completed_from")):
        return f"{100 * value:.1f}%"
    return format_count(value) if isinstance(value, int) else f"{value:,.1f}"


def show_study(app: App, span_s: tuple[int, int], folder: Path | None, as_json: bool) -> None:
    """Print your site's numbers next to those of the Perlmutter study, or write all tables to a folder."""
    store = app.store
    since_s, until_s = span_s
    population = load_population(store, since_s, until_s)
    results = characterize(population, app.config)
    files = write_tables(results, folder) if folder else []
    if as_json:
        span = {"cluster": store.cluster, "since_s": since_s, "until_s": until_s, "jobs": len(population)}
        click.echo(json_text({**span, "tables": {name: _as_dict(result) for name, result in results.items()}}))
        return
    if len(population):
        _show(results, len(population), note_on(store))
    else:
        click.echo(f"no GPU jobs submitted since {local_time(since_s)}; try other -S, -E, or -M")
    if folder:
        click.echo(f"\n{len(files)} files written to {folder}")
    else:
        click.echo("\n--csv DIR writes these tables as Parquet and CSV")


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "figure": result.table.figure,
        "title": result.table.title,
        "jobs": result.jobs,
        "left_out": dict(result.left_out),
        "why_empty": result.why_empty or None,
        "rows": result.rows.to_pylist(),
    }


def _show(results: Mapping[str, Result], total: int, note: str) -> None:
    *tables, headline = results.values()
    reasons = [f"{format_count(jobs)} {why.removeprefix('verdict: ')}" for why, jobs in headline.left_out.items()]
    excluded = f"; excluded: {', '.join(reasons)}" if reasons else ""
    click.echo(f"{format_count(total)} GPU jobs, {format_count(headline.jobs)} with usable data{excluded}\n")
    _show_findings(headline)
    if note:
        click.echo(click.wrap_text(note, 100))
    click.echo()
    shown = [
        [
            result.table.name,
            result.table.figure,
            result.table.title,
            format_count(result.jobs),
            format_count(sum(result.left_out.values())),
            result.why_empty or format_count(result.rows.num_rows),
        ]
        for result in tables
    ]
    show_table(["table", "figure", "title", "jobs", "excluded", "rows"], shown, right=("jobs", "excluded", "rows"))


def _show_findings(headline: Result) -> None:
    findings = [
        [
            row["finding"],
            "-" if row["site_value"] is None else f"{row['site_value']:.3f}",
            "-" if row["published_value"] is None else f"{row['published_value']:.3f}",
            format_count(row["jobs"]),
            row["why_null"] or "",
        ]
        for row in headline.rows.to_pylist()
        if row["is_main"]
    ]
    columns = ["finding", "here", "published", "jobs", "note"]
    show_table(columns, findings, right=columns[1:4], title="Your site beside Perlmutter in March 2025")
