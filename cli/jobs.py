"""`almanac jobs`: past jobs with what they used."""

from __future__ import annotations

import datetime as dt
from typing import Any

import click

from almanac.errors import NotAllowedError
from almanac.units import format_count, format_duration, format_gib, printable
from cli.app import App
from cli.ingest import moment
from cli.output import json_text, show_table, write_separated
from cli.steps import show_steps

COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "name", "name_key", "state",
    "node_count", "gpu_count", "elapsed_s", "tier", "hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence",
    "mean_gpu_util_pct", "coverage_frac", "verdict",
)  # fmt: skip


@click.command("jobs")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs submitted from here on. [now-30days]")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs submitted before. [now]")
@click.option("-u", "--user", metavar="USER", help="Another user's jobs (operators).")
@click.option("-a", "--allusers", is_flag=True, help="Everybody's jobs (operators).")
@click.option("-j", "--job", "job_ids", multiple=True, metavar="ID[,ID]", help="Only these jobs.")
@click.option("-n", "--limit", default=50, show_default=True, help="Newest jobs shown; 0: all.")
@click.option("--steps", is_flag=True, help="The steps of these jobs instead, each with what it used.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-P", "--parsable", is_flag=True, help="Print text separated by '|', as sacct -P.")
@click.pass_obj
def command(
    app: App,
    starttime: str | None,
    endtime: str | None,
    user: str | None,
    allusers: bool,
    job_ids: tuple[str, ...],
    limit: int,
    steps: bool,
    as_json: bool,
    parsable: bool,
) -> None:
    """List past GPU jobs, newest last: size, time, HBM peak, mean utilisation, and whether there is a verdict.

    You see your own jobs; operators see everybody's with -a or -u.
    """
    if allusers and not app.is_operator:
        raise NotAllowedError(f"{app.caller} is no operator, and may see only their own jobs", "leave -a out")
    who = None if allusers and not user else app.visible_user(user)
    since_s = moment(starttime or "now-30days", app.now_s())
    rows = load(app, who, since_s, moment(endtime, app.now_s()), parse_ids(job_ids))
    shown = rows[-limit:] if limit > 0 else rows
    if steps and shown:
        show_steps(app, shown, as_json=as_json, parsable=parsable)
    elif as_json:
        click.echo(json_text(shown))
    elif parsable:
        write_separated(COLUMNS, shown, "|")
    elif not shown:
        since = dt.datetime.fromtimestamp(since_s or 0).strftime("%Y-%m-%d %H:%M")
        click.echo(f"no GPU jobs of {printable(who or 'anybody')} submitted since {since}; see -S, -E, -a, -u, -M")
    else:
        _show(shown, len(rows))


def parse_ids(texts: tuple[str, ...]) -> tuple[int, ...]:
    """Job ids of "12" and "12,13". Raises click.BadParameter."""
    ids = [part for text in texts for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in ids):
        raise click.BadParameter(f"not job ids: {', '.join(texts)} (expected 12 or 12,13; the raw id of an array task)")
    return tuple(map(int, ids))


def load(
    app: App, user: str | None, since_s: int | None, until_s: int | None, job_ids: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """Rows of COLUMNS as plain values, oldest end first; missing values are None."""
    from telemetry.history import load_history

    store = app.open_store()
    frame = load_history(store, app.cluster(store), since_s, until_s, user)
    if job_ids:
        frame = frame[frame["job_id"].isin(job_ids)]
    frame = frame[list(COLUMNS)].astype(object)
    known = frame.where(frame.notna(), None)
    return [dict(zip(COLUMNS, row, strict=True)) for row in known.itertuples(index=False, name=None)]


def _show(rows: list[dict[str, Any]], total: int) -> None:
    cells = [
        [
            str(row["job_id"]),
            row["user"],
            row["name"],
            dt.datetime.fromtimestamp(row["end_s"]).strftime("%Y-%m-%d %H:%M"),
            row["state"],
            format_count(row["gpu_count"]),
            format_duration(row["elapsed_s"]),
            row["tier"] or "-",
            "-" if row["hbm_peak_mib"] is None else format_gib(row["hbm_peak_mib"]),
            "-" if row["mean_gpu_util_pct"] is None else f"{row['mean_gpu_util_pct']:.0f} %",
            "preallocated" if row["hbm_evidence"] == "preallocated" else row["verdict"],
        ]
        for row in rows
    ]
    columns = ["job", "user", "name", "ended", "state", "GPUs", "time", "tier", "HBM peak", "GPU util", "verdict"]
    show_table(columns, cells, right=("job", "GPUs", "time", "HBM peak", "GPU util"))
    if total > len(rows):
        click.echo(f"{format_count(total - len(rows))} older ones are not shown; --limit 0 shows all")
