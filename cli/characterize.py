"""`almanac characterize`: the cross-job tables behind the figures of perlmutter-telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, show_table
from cli.times import check_span, local_time, time_option

if TYPE_CHECKING:
    from telemetry.characterize import Result


@click.command("characterize")
@click.option("-S", "--starttime", metavar="TIME", help="Use jobs submitted at this time or later. [now-30days]")
@click.option("-E", "--endtime", metavar="TIME", help="Use jobs submitted before this time. [now]")
@click.option(
    "--out",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write every table to this folder, as Parquet and CSV. Replaces files of the same name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every table as JSON.")
@click.pass_obj
def command(app: App, starttime: str | None, endtime: str | None, folder: Path | None, as_json: bool) -> None:
    """Compare jobs across the site: size, pipes, memory, roofline, energy, imbalance, correlations. For operators.

    Prints your site's numbers beside those of the Perlmutter study. The tables are those behind its figures 1 to 11;
    docs/characterize.md explains them.
    """
    from telemetry.characterize import characterize, load_population, write_tables
    from telemetry.characterize.headline import note_on

    app.require_operator("these tables cover all users' jobs")
    store = app.cluster_store()
    since_s, until_s = time_option(starttime or "now-30days", app.now_s()), time_option(endtime, app.now_s())
    check_span(since_s if starttime else None, until_s)
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
        click.echo(f"no GPU jobs submitted since {local_time(since_s or 0)}; try other -S, -E, or -M")
    if folder:
        click.echo(f"\n{len(files)} files written to {folder}")
    else:
        click.echo("\n--out DIR writes these tables as Parquet and CSV")


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
