"""`almanac jobs --steps`: the steps of jobs, each with what it used."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import click

from almanac.units import format_count, format_duration, format_gib, format_number
from cli.app import App
from cli.output import json_text, show_table, write_separated
from telemetry.metrics.steps import stored_steps

COLUMNS = (
    "job_id", "submit_s", "step", "state", "start_s", "end_s", "node_count", "node_list", "gpu_count", "exit_code",
    "exit_signal", "verdict", "gpus_seen", "coverage_frac", "hbm_peak_mib", "hbm_peak_frac", "mean_gpu_util_pct",
    "spatial_imbalance", "temporal_imbalance", "energy_j", "job_class",
)  # fmt: skip


def show_steps(app: App, jobs: Sequence[Mapping[str, Any]], *, as_json: bool, separator: str) -> None:
    """Print the steps of jobs that the caller may see (rows with job_id, submit_s, and job).

    separator: between the values of a line, ',' for spreadsheets; empty: a table for people.
    """
    store = app.store
    runs = [(job["job_id"], job["submit_s"]) for job in jobs]
    rows = stored_steps(store, runs, COLUMNS)
    if as_json:
        click.echo(json_text(rows))
    elif separator:
        write_separated(COLUMNS, rows, separator, is_for_spreadsheets=separator == ",")
    elif not rows:
        click.echo("no steps of these jobs are stored: srun was not used in them, or slurm.read_steps is off")
    else:
        shown = {(job["job_id"], job["submit_s"]): job["job"] for job in jobs}
        _show([{**row, "job": shown[row["job_id"], row["submit_s"]] or row["job_id"]} for row in rows])


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        [
            f"{row['job']}.{row['step']}",
            "-" if row["start_s"] is None else dt.datetime.fromtimestamp(row["start_s"]).strftime("%Y-%m-%d %H:%M:%S"),
            _time(row),
            row["state"] or "-",
            row["node_list"] or "-",
            _or_dash(row["gpu_count"], format_count),
            _or_dash(row["hbm_peak_mib"], format_gib),
            _or_dash(row["mean_gpu_util_pct"], lambda value: f"{value:.0f} %"),
            _or_dash(row["energy_j"], lambda value: f"{format_number(value / 3.6e6)} kWh"),
            row["verdict"] or "not measured: the only step",
        ]
        for row in rows
    ]
    columns = ["step", "started", "time", "state", "nodes", "GPUs", "HBM peak", "GPU util", "energy", "verdict"]
    show_table(columns, cells, right=("time", "GPUs", "HBM peak", "GPU util", "energy"))


def _time(row: Mapping[str, Any]) -> str:
    known = row["start_s"] is not None and row["end_s"] is not None
    return format_duration(row["end_s"] - row["start_s"]) if known else "-"


def _or_dash(value: Any, shown: Any) -> str:
    return "-" if value is None else str(shown(value))
