"""`almanac site-report --study`: the cross-job tables behind the figures of Cankur et al."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, local_time, show_table
from telemetry.characterize.study import characterize, load_population, note_on
from telemetry.characterize.table import write_tables

if TYPE_CHECKING:
    from telemetry.characterize.table import Result


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
