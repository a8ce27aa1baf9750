"""The charts of node power in the site report: nodes in use, powered, and asleep over the last days of its span."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from almanac.units import format_count, printable
from reports.job.plots import LINES, SETTINGS, WIDTH_IN, drawable, png
from reports.site.plots import Picture
from reports.site.power import NodeSetPower
from telemetry.nodes.counts import NodeCounts
from telemetry.nodes.use import HOLD_S

SHOWN_DAYS = 7
MOST_SETS = 8
"""Most node sets with a chart; the table has all."""
POWERED, ACTIVE, ASLEEP = "#5a6472", LINES[0], LINES[1]


def render_power_plots(found: Sequence[NodeSetPower], until_s: int) -> list[Picture]:
    """A chart for each of the first node sets with counts in the last SHOWN_DAYS. Equal counts give equal bytes."""
    pictures: list[Picture] = []
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        for each in found:
            counts = each.use.counts if each.use else None
            if counts is None or not (counts.time_s >= until_s - SHOWN_DAYS * 86_400).any():
                continue
            if len(pictures) < MOST_SETS:
                pictures.append(Picture(_drawn(each.name, counts, until_s), _alt(each.name, counts)))
    return pictures


def _alt(name: str, counts: NodeCounts) -> str:
    levels = counts.active, counts.total - counts.asleep, counts.asleep
    active, powered, asleep = (format_count(int(values[-1])) for values in levels)
    return (
        f"Nodes of {printable(name, 64)} over the last {SHOWN_DAYS} days. "
        f"At the end {active} are in use, {powered} are powered, and {asleep} are asleep."
    )


def _drawn(name: str, counts: NodeCounts, until_s: int) -> bytes:
    figure = Figure(figsize=(WIDTH_IN, 2.5))
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.55 / width, 0.6 / height, 1 - 0.75 / width, 1 - 0.95 / height))
    since_s = until_s - SHOWN_DAYS * 86_400
    for values, color, label in (
        (counts.total - counts.asleep, POWERED, "powered"),
        (counts.active, ACTIVE, "in use"),
        (counts.asleep, ASLEEP, "asleep"),
    ):
        times, level = _steps(counts.time_s, values, since_s, until_s)
        axes.plot(times, level, color=color, linewidth=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(*np.array([since_s, until_s]).astype("datetime64[s]"))
    _label(axes)
    axes.set_title(f"{drawable(name)}: nodes")
    return png(figure)


def _label(axes: Axes) -> None:
    axes.set_ylabel("nodes")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis_date()
    dates = ConciseDateFormatter(axes.xaxis.get_major_locator())  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(dates)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=3, frameon=False, fontsize=8)


def _steps(time_s: np.ndarray, values: np.ndarray, since_s: int, until_s: int) -> tuple[np.ndarray, np.ndarray]:
    """A level from each count to the next, for at most HOLD_S. After that comes a gap, because nothing is known."""
    is_shown = (time_s >= since_s) & (time_s < until_s)
    begin, level = time_s[is_shown], values[is_shown].astype(np.float64)
    end = np.minimum(np.append(begin[1:], until_s), begin + HOLD_S)
    times = np.column_stack([begin, end, end]).ravel()
    return times.astype("datetime64[s]"), np.column_stack([level, level, _break(begin, end, level)]).ravel()


def _break(begin: np.ndarray, end: np.ndarray, level: np.ndarray) -> np.ndarray:
    return np.where(np.append(begin[1:], -1) == end, level, np.nan)
