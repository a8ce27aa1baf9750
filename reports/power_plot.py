"""The replay of `almanac backtest power` as one chart: nodes in use, powered, forecast, and asleep."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from io import BytesIO

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

from advisor.demand.features import STEP_MIN
from advisor.demand.forecast import HORIZON
from advisor.evaluation.power import OURS, PAPER, PowerBacktest
from almanac.units import printable
from reports.backtest_plot import BLUE, GRAY, GREEN, RED, SETTINGS, UNDATED
from telemetry.nodes.series import NodeSeries


def render_power_plot(name: str, series: NodeSeries, outcome: PowerBacktest, kind: str) -> bytes:
    """The content of a file of that kind (a key of UNDATED). The same outcome gives the same bytes."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        figure = Figure(figsize=(11.0, 6.4), layout="constrained")
        shown = printable(name, 60).encode("ascii", "replace").decode()
        figure.suptitle(f"{shown}: powered nodes, replayed over {outcome.days:.1f} days", fontsize=11)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _draw_nodes(upper, series, outcome)
        _draw_asleep(lower, series, outcome)
        content = BytesIO()
        figure.savefig(content, format=kind, dpi=130, metadata=UNDATED[kind])
        return content.getvalue()


def _draw_nodes(axes: Axes, series: NodeSeries, outcome: PowerBacktest) -> None:
    rows = slice(outcome.spans.score, outcome.spans.end)
    times, usable = series.times()[rows], series.is_usable[rows]
    axes.plot(times, np.where(usable, series.total[rows], np.nan), color=GRAY, linewidth=1, label="all nodes")
    axes.plot(times, np.where(usable, outcome.timeline[PAPER], np.nan), color=RED, linewidth=1, label=f"on: {PAPER}")
    axes.plot(times, np.where(usable, outcome.timeline[OURS], np.nan), color=BLUE, linewidth=1.4, label=f"on: {OURS}")
    hours = HORIZON * STEP_MIN // 60
    label = f"forecast peak of the next {hours} h (quantile {1 - outcome.settings.tail:g})"
    axes.plot(times[::STEP_MIN], outcome.forecast, color=BLUE, linewidth=0.7, linestyle=":", label=label)
    axes.plot(times, np.where(usable, series.active[rows], np.nan), color=GREEN, linewidth=0.8, label="in use")
    axes.set_ylabel("nodes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncol=5, frameon=False, fontsize=8)


def _draw_asleep(axes: Axes, series: NodeSeries, outcome: PowerBacktest) -> None:
    rows = slice(outcome.spans.score, outcome.spans.end)
    times, usable = series.times()[rows], series.is_usable[rows]
    for name, color in ((PAPER, RED), (OURS, BLUE)):
        axes.plot(
            times, np.where(usable, series.total[rows] - outcome.timeline[name], np.nan), color=color, linewidth=1
        )
    axes.set_ylabel("nodes asleep")
    axes.set_ylim(bottom=0)
    axes.xaxis_date()
    figure_dates = ConciseDateFormatter(axes.xaxis.get_major_locator())  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(figure_dates)
