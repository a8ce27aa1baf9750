"""The policies of `almanac simulate` as one chart: completion times, queueing delays, use of GPUs, and the queue."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from almanac.units import DAY_S, HOUR_S, printable
from reports.backtest_plot import GRAY, SETTINGS, UNDATED

Floats = npt.NDArray[np.float64]
_COLORS = (
    "#1f5fa8", "#b3261e", "#3b7a57", "#b8860b", "#7b4fa0", "#2a9d9d", "#8c564b", "#d1669a", "#6b6b6b", "#9aa52a",
)  # fmt: skip
_STYLES = ("-", "--", ":", "-.")
_TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", HOUR_S: "1 h", 10 * HOUR_S: "10 h", DAY_S * 4: "4 d",
          DAY_S * 40: "40 d"}  # fmt: skip
_POINTS = 1000


@dataclass(frozen=True)
class PolicyCurves:
    """What one policy's lines show. jct_s, delay_s: of the jobs that started. edges_s: of the bins of the others.

    used, fragmented: shares of all GPUs that are busy, and that are free on partly used nodes.
    """

    policy: str
    jct_s: Floats
    delay_s: Floats
    edges_s: Floats
    used: Floats
    fragmented: Floats
    waiting_jobs: Floats


def render_simulation_plot(title: str, policies: Sequence[PolicyCurves], kind: str) -> bytes:
    """The content of a file of that kind (a key of UNDATED). The same curves give the same bytes."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        figure = Figure(figsize=(11.0, 8.4), layout="constrained")
        figure.suptitle(_drawable(title, 100), fontsize=11)
        (jct, delay), (used, fragmented), (waiting, unused) = figure.subplots(3, 2, height_ratios=(1.4, 1, 1))
        unused.set_axis_off()
        _draw_shares(jct, "job completion time", [each.jct_s for each in policies])
        _draw_shares(delay, "queueing delay (0 s is drawn at 1 s)", [each.delay_s for each in policies])
        for axes, label, name in (
            (used, "busy GPUs", "used"),
            (fragmented, "free on partly used nodes", "fragmented"),
            (waiting, "waiting jobs", "waiting_jobs"),
        ):
            _draw_time(axes, label, [(each.edges_s, getattr(each, name)) for each in policies])
        for axes in (used, fragmented):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        names = [_drawable(each.policy, 40) for each in policies]
        unused.legend(jct.get_lines(), names, loc="center", ncol=2, frameon=False, title="policy")
        content = BytesIO()
        figure.savefig(content, format=kind, dpi=130, metadata=UNDATED[kind])
        return content.getvalue()


def _drawable(text: str, limit: int) -> str:
    """A text in ASCII: matplotlib warns about letters that its font lacks."""
    return printable(text, limit).encode("ascii", "replace").decode()


def _draw_shares(axes: Axes, label: str, values: Sequence[Floats]) -> None:
    """Cumulative shares of jobs."""
    longest = max([60.0, *(float(each.max(initial=0)) for each in values)])
    shares = np.linspace(0, 1, _POINTS)
    for place, each in enumerate(values):
        times = np.maximum(np.quantile(each, shares, method="inverted_cdf"), 1) if len(each) else np.array([])
        axes.plot(times, shares[: len(times)], drawstyle="steps-post", **_line(place))
    axes.set_xscale("log")
    axes.set_xlim(1, 1.2 * longest)
    axes.set_ylim(0, 1.01)
    ticks = [tick for tick in _TICKS if tick <= 1.2 * longest]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([_TICKS[tick] for tick in ticks])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(color=GRAY, alpha=0.2, linewidth=0.5)
    axes.set_xlabel(label)
    axes.set_ylabel("share of jobs")


def _draw_time(axes: Axes, label: str, series: Sequence[tuple[Floats, Floats]]) -> None:
    for place, (edges_s, values) in enumerate(series):
        axes.stairs(values, (edges_s - edges_s[0]) / DAY_S, baseline=None, **_line(place))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(color=GRAY, alpha=0.2, linewidth=0.5)
    axes.set_xlabel("days since the first scored job")
    axes.set_ylabel(label)


def _line(place: int) -> dict[str, Any]:
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": _STYLES[place // len(_COLORS) % len(_STYLES)],
        "linewidth": 1.2,
    }
