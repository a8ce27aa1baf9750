"""A job's report on a terminal, with a row of blocks that shows each GPU over time."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from almanac.units import format_duration, format_gib, printable
from reports.job.context import JobContext
from reports.job.report import Report, report_of
from reports.job.series import Floats, GpuSeries

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "·"
MOST_STRIPS = 16


def render_terminal(context: JobContext, width: int) -> Group:
    """The report as text without markup and control characters. width: columns of the terminal."""
    report = report_of(context)
    parts: list[RenderableType] = [_head(report)]
    if report.conclusions.suggestions:
        parts += [Text("\nWhat to do next time", style="bold"), _suggestions(report)]
    for finding in report.findings:
        parts += [Text(f"\n{finding.title}", style="bold"), Text(finding.text)]
        if context.series is not None:
            parts += _picture(context, finding.picture, context.series, max(20, min(72, width - 30)))
    parts += [Text("\nFigures", style="bold"), _figures(report)]
    return Group(*parts)


def _head(report: Report) -> RenderableType:
    rows = " · ".join(f"{row.value}{f' ({row.about})' if row.about else ''}" for row in report.heading)
    said = report.conclusions.headline
    lines = Group(Text(said[:1].upper() + said[1:], style="bold"), Text(report.conclusions.summary))
    return Panel(lines, title=Text(f"Job {rows}"), title_align="left", padding=(0, 1))


def _figures(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in report.figures:
        table.add_row(Text(row.name, style="dim"), Text(row.value, style="bold"), Text(row.about))
    return table


def _suggestions(report: Report) -> Table:
    table = Table.grid(padding=(0, 1))
    for number, suggestion in enumerate(report.conclusions.suggestions, 1):
        table.add_row(Text(f"{number}."), Text(suggestion.advice, style="bold"))
        table.add_row("", Text(f"Why: {suggestion.reason}", style="dim"))
    return table


def _picture(context: JobContext, name: str, series: GpuSeries, columns: int) -> list[RenderableType]:
    """The chart as rows of blocks, and what a row spans; nothing for the roofline."""
    absent = f"; {MISSING} is not measured" if np.isnan(series.util_pct).any() else ""
    span = f" From left to right: {format_duration(series.bins * series.bin_s)}{absent}"
    used = series.values["hbm_used_mib"]
    if name == "timeline" and np.isfinite(series.util_pct).any():
        names = [printable(unit, 24) for unit in series.units]
        return [_strips(names, series.util_pct, 100.0, columns, _percent), Text(span, style="dim")]
    if name == "memory" and np.isfinite(used).any():
        top = context.metrics.get("hbm_capacity_mib") or float(np.fmax.reduce(used, axis=None))
        return [_strips(["memory"], np.fmax.reduce(used)[None, :], top, columns, _peak)]
    return []


def _strips(names: list[str], values: Floats, top: float, columns: int, said: object) -> RenderableType:
    """A row of blocks for each of the first MOST_STRIPS GPUs, and how many more there are."""
    table = Table.grid(padding=(0, 1))
    for name, row in zip(names[:MOST_STRIPS], values[:MOST_STRIPS], strict=True):
        table.add_row(Text(name), Text(blocks(row, top, columns), style="cyan", no_wrap=True), Text(said(row)))  # type: ignore[operator]
    if len(names) > MOST_STRIPS:
        table.add_row("", Text(f"and {len(names) - MOST_STRIPS} more GPUs (--html shows all)", style="dim"), "")
    return Padding(table, (0, 0, 0, 1))


def blocks(row: Floats, top: float, columns: int) -> str:
    """The values as at most `columns` characters, each the mean of a part of the time, from 0 to top."""
    parts = np.array_split(row, min(columns, len(row)))
    return "".join(_block(part[np.isfinite(part)], top) for part in parts)


def _block(known: Floats, top: float) -> str:
    if not len(known):
        return MISSING
    place = int(float(known.mean()) / top * len(BLOCKS)) if top > 0 else 0
    return BLOCKS[min(max(place, 0), len(BLOCKS) - 1)]


def _percent(row: Floats) -> str:
    known = row[np.isfinite(row)]
    return f"{known.mean():.0f}%" if len(known) else "not measured"


def _peak(row: Floats) -> str:
    known = row[np.isfinite(row)]
    return f"peak {format_gib(float(known.max()))}" if len(known) else "not measured"
