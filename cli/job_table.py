"""Past jobs as a table for people: narrow, wide, or with chosen columns."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.units import (
    cell_text,
    format_count,
    format_duration,
    format_gib,
    format_moment,
    format_number,
    format_short_duration,
    printable,
)
from cli.app import App, folded
from cli.output import local_time, show_table

if TYPE_CHECKING:
    from rich.text import Text

    from reports.published.live import LiveJob

JOB_COLUMNS = (
    "job", "job_id", "user", "name", "state", "gpu_count", "elapsed_s", "mean_gpu_util_pct", "hbm_peak_mib",
    "hbm_capacity_mib", "hbm_evidence", "mig_profile", "gpu_share_count",
)  # fmt: skip
"""The columns of a row that `show_jobs` needs."""
_TIMES = ("submit_s", "start_s", "end_s")
_COLORS = {"COMPLETED": "green", "CANCELLED": "yellow", "PREEMPTED": "yellow", "REVOKED": "yellow"}
"""Any other state is a failure, in red."""
SAID = 5
"""Running jobs that get a line about what to do."""
NARROW = 70
"""Terminals with fewer columns have a short title of the last column."""
_FLOORS = (("name", 16), ("user", 8), ("name", 8), ("next time", 12), ("user", 4), ("name", 4), ("next time", 4))
"""Columns that become narrower if a table is too wide, and their least width, in this order."""


def say_published(app: App) -> None:
    """Print to stderr how old the published list is, for users without access to the store."""
    if (published_s := app.caller_jobs.published_s) is not None:
        changed = format_moment(published_s)
        click.echo(f"showing the jobs published for you; the list last changed {changed}", err=True)


def show_jobs(rows: Sequence[dict[str, Any]], steps: Sequence[str], *, has_user: bool) -> None:
    """Print the default table, no wider than the terminal (80 columns if there is none).

    rows: with JOB_COLUMNS. steps: for each row, what to do next; "" for nothing. has_user: show a column of users.
    """
    columns = ["job", "user", "name", "state", "GPUs", "time", "util", "memory", "next time"]
    cells = [[*_job_cells(row), step or "-"] for row, step in zip(rows, steps, strict=True)]
    if not has_user:
        columns.remove("user")
        cells = [[cell for place, cell in enumerate(row) if place != 1] for row in cells]
    width = shutil.get_terminal_size().columns
    gap = 2 if sum(_widths(columns, cells)) + 2 * (len(columns) - 1) <= width else 1
    cells = _fitted(columns, cells, width - gap * (len(columns) - 1))
    titles = [*columns[:-1], "next"] if width < NARROW else columns
    show_table(titles, cells, right=("job", "GPUs", "time", "util", "memory"), gap=gap, is_whole=True)


def _job_cells(row: dict[str, Any]) -> list[str | Text]:
    from rich.text import Text

    state = row["state"]
    return [
        row["job"] or str(row["job_id"]),
        printable(row["user"]),
        printable(row["name"]) or "-",
        Text("OOM" if state == "OUT_OF_MEMORY" else _shortened(printable(state), 9), style=_COLORS.get(state, "red")),
        _gpus(row),
        format_short_duration(row["elapsed_s"]),
        "-" if row["mean_gpu_util_pct"] is None else f"{row['mean_gpu_util_pct']:.0f}%",
        _memory(row),
    ]


def _gpus(row: dict[str, Any]) -> str:
    """ "4", "part" for shards of one, or the MIG slices that the job ran on: "1g.10gb", "2x1g.10gb"."""
    if not row["gpu_count"] and row.get("gpu_share_count"):
        return "part"
    if not row.get("mig_profile"):
        return format_count(row["gpu_count"])
    times = "" if row["gpu_count"] == 1 else f"{format_count(row['gpu_count'])}x"
    return f"{times}{printable(row['mig_profile'], 20)}"


def _memory(row: dict[str, Any]) -> str:
    """ "26/80 GiB": the peak and the memory of the GPU; of a slice with a decimal; of a bound: "<26/80 GiB"."""
    if row["hbm_evidence"] == "preallocated":
        return "reserved"
    if row["hbm_peak_mib"] is None:
        return "-"
    digits = 1 if row.get("mig_profile") else 0
    of = "" if row["hbm_capacity_mib"] is None else f"/{row['hbm_capacity_mib'] / 1024:.{digits}f}"
    bound = "<" if row["hbm_evidence"] == "sacct" and row["gpu_count"] > 1 else ""
    return f"{bound}{row['hbm_peak_mib'] / 1024:.{digits}f}{of} GiB"


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str | Text]]) -> list[int]:
    """The width of each column, in columns of the terminal."""
    from rich.cells import cell_len

    return [max(cell_len(str(cell)) for cell in (name, *column)) for name, *column in zip(columns, *cells, strict=True)]


def _fitted(columns: Sequence[str], cells: list[list[str | Text]], room: int) -> list[list[str | Text]]:
    """The cells, with text shortened so that the columns are at most `room` wide together, as far as _FLOORS go."""
    widths = dict(zip(columns, _widths(columns, cells), strict=True))
    for name, floor in _FLOORS:
        if name in widths:
            excess = sum(widths.values()) - room
            widths[name] = min(widths[name], max(floor, widths[name] - max(excess, 0)))
    return [
        [
            _shortened(cell, widths[name], has_end=name != "next time") if isinstance(cell, str) else cell
            for name, cell in zip(columns, row, strict=True)
        ]
        for row in cells
    ]


def _shortened(text: str, width: int, *, has_end: bool = True) -> str:
    """Text that fits. has_end: without its middle, so that a long name keeps its end: "vit-pre…bs64-v2"."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    head, tail = list(text), ""
    tail_width = (width - 1) // 2 if has_end else 0
    while cell_len(head[-1] + tail) <= tail_width:
        tail = head.pop() + tail
    while cell_len("".join(head)) > width - 1 - cell_len(tail):
        head.pop()
    return f"{''.join(head)}…{tail}"


def show_wide_jobs(rows: Sequence[dict[str, Any]]) -> None:
    """Print the wide table. rows: with the columns of cli.jobs.COLUMNS, and job."""
    cells = [
        [
            row["job"] or str(row["job_id"]),
            row["user"],
            row["name"],
            local_time(row["end_s"]),
            row["state"],
            _gpus(row),
            format_duration(row["elapsed_s"]),
            row["tier"] or "-",
            "-" if row["hbm_peak_mib"] is None else format_gib(row["hbm_peak_mib"]),
            "-" if row["mean_gpu_util_pct"] is None else f"{row['mean_gpu_util_pct']:.0f} %",
            f"{_share(row['spatial_imbalance'])}/{_share(row['temporal_imbalance'])}",
            "-" if row["mfu_frac"] is None else f"{100 * row['mfu_frac']:.0f} %",
            "-" if row["job_class"] is None else f"{row['job_class']} {row['main_pipe']}",
            "preallocated" if row["hbm_evidence"] == "preallocated" else row["verdict"],
        ]
        for row in rows
    ]
    columns = [
        "job", "user", "name", "ended", "state", "GPUs", "time", "tier", "peak memory", "GPU util", "imbalance",
        "MFU", "class", "data quality",
    ]  # fmt: skip
    right = ("job", "GPUs", "time", "peak memory", "GPU util", "imbalance", "MFU")
    show_table(columns, cells, right=right, is_whole=True)


def show_live(jobs: Sequence[LiveJob], now_s: int, *, has_user: bool) -> None:
    """Print running jobs, and what to do where the watch found something."""
    columns = ["job", *(["user"] if has_user else []), "name", "GPUs", "time", "util", "memory", "now"]
    cells = [
        [
            printable(job.job, 30), *([printable(job.user, 12)] if has_user else []),
            _shortened(printable(job.name) or "-", 24), format_count(job.gpu_count),
            format_short_duration(max(0, now_s - job.start_s)),
            "-" if job.gpu_util_pct is None else f"{job.gpu_util_pct:.0f}%", _memory_now(job), _now(job),
        ]
        for job in jobs
    ]  # fmt: skip
    show_table(columns, cells, right=("job", "GPUs", "time", "util", "memory"), is_whole=True)
    for job in [job for job in jobs if job.says][:SAID]:
        end = "" if job.cancel_s is None else f" will be cancelled after {local_time(job.cancel_s)}"
        click.echo(folded(f"job {printable(job.job, 30)}{end}: {printable(job.says, 400)}", sys.stdout, "  "))


def _memory_now(job: LiveJob) -> str:
    of = "" if job.hbm_total_mib is None else f"/{job.hbm_total_mib / 1024:.0f}"
    return "-" if job.hbm_used_mib is None else f"{job.hbm_used_mib / 1024:.0f}{of} GiB"


def _now(job: LiveJob) -> str:
    """ "idle 40 min", "2 GPUs idle 40 min", "hang"; "-" if nothing was found, "?" without samples."""
    if not job.kinds:
        return "-" if job.gpus_seen else "?"
    if job.kinds[0] not in ("idle", "unused_gpus"):
        return printable(job.kinds[0], 20).replace("_", " ")
    part = "" if job.idle_gpus in (0, job.gpu_count) else f"{format_count(job.idle_gpus)} GPUs "
    return f"{part}idle {format_duration(job.idle_s)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show_columns(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print the chosen columns under their own names; fractions have four significant digits."""
    cells = [[_text(name, row[name]) for name in names] for row in rows]
    right = [name for name in names if any(isinstance(row[name], int | float) for row in rows)]
    show_table(names, cells, right=right, is_whole=True)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _TIMES:
        return local_time(value)
    if name.endswith("_ms"):
        return local_time(value / 1000)
    if isinstance(value, float):
        return format_number(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and not name.endswith("_id")
    return format_count(value) if is_count else cell_text(value, is_for_spreadsheets=False)
