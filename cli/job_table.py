"""Past jobs as a table for people."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import click

from almanac.units import cell_text, format_count, format_duration, format_gib, format_moment
from cli.app import App
from cli.output import show_table

_TIMES = ("submit_s", "start_s", "end_s")


def local_time(time_s: int) -> str:
    """Seconds since 1970 as "YYYY-MM-DD HH:MM" of the local time zone."""
    return dt.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def say_published(app: App) -> None:
    """Print to stderr how old the published list is, for users without access to the store."""
    if (published_s := app.caller_jobs.published_s) is not None:
        changed = format_moment(published_s)
        click.echo(f"showing the jobs published for you; the list last changed {changed}", err=True)


def show_jobs(rows: Sequence[dict[str, Any]]) -> None:
    """Print the default table. rows: with the columns of cli.jobs.COLUMNS."""
    cells = [
        [
            str(row["job_id"]),
            row["user"],
            row["name"],
            local_time(row["end_s"]),
            row["state"],
            format_count(row["gpu_count"]),
            format_duration(row["elapsed_s"]),
            row["tier"] or "-",
            "-" if row["hbm_peak_mib"] is None else format_gib(row["hbm_peak_mib"]),
            "-" if row["mean_gpu_util_pct"] is None else f"{row['mean_gpu_util_pct']:.0f} %",
            f"{_share(row['spatial_imbalance'])}/{_share(row['temporal_imbalance'])}",
            "-" if row["job_class"] is None else f"{row['job_class']} {row['main_pipe']}",
            "preallocated" if row["hbm_evidence"] == "preallocated" else row["verdict"],
        ]
        for row in rows
    ]
    columns = [
        "job", "user", "name", "ended", "state", "GPUs", "time", "tier", "peak memory", "GPU util", "imbalance",
        "class", "data quality",
    ]  # fmt: skip
    right = ("job", "GPUs", "time", "peak memory", "GPU util", "imbalance")
    show_table(columns, cells, right=right)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show_columns(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print the chosen columns under their own names; numbers have four significant digits."""
    cells = [[_text(name, row[name]) for name in names] for row in rows]
    right = [name for name in names if any(isinstance(row[name], int | float) for row in rows)]
    show_table(names, cells, right=right)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _TIMES:
        return local_time(value)
    return f"{value:.4g}" if isinstance(value, float) else cell_text(value, is_for_spreadsheets=False)
