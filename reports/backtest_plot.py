"""The scores of `almanac backtest tier` as one chart: risk and benefit of the advice, by group."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from advisor.evaluation.tier import TierScores
from almanac.units import format_count, printable

# SVG and PDF keep text as text, no text becomes a formula, and the same scores give the same bytes.
SETTINGS: dict[Any, Any] = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "almanac", "pdf.fonttype": 42, "font.size": 9.0,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
UNDATED: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
WIDTH_IN, HEAD_IN, ROW_IN = 11.0, 1.9, 0.28
BLUE, RED, GREEN, GRAY = "#1f5fa8", "#b3261e", "#3b7a57", "#6b6b6b"


def render_tier_plot(cluster: str, risk: float, scores: Sequence[TierScores], kind: str) -> bytes:
    """The content of a file of that kind (a key of UNDATED), the same for the same scores.

    scores: from score_tiers, drawn from the top; the first covers all submissions. risk: the accepted risk, a fraction.
    Without any advice, the chart has only a text that says so.
    """
    # Ignore the matplotlibrc of the caller and of the current folder.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        figure = Figure(figsize=(WIDTH_IN, HEAD_IN + ROW_IN * len(scores)), layout="constrained")
        everything = scores[0]
        figure.suptitle(
            f"{_drawable(cluster)}: memory advice replayed on {format_count(everything.jobs)} jobs, "
            f"{format_count(everything.advised)} advised",
            fontsize=11,
        )
        if everything.advised:
            _draw(figure, risk, scores)
        else:
            figure.text(0.5, 0.5, "no scores: no job would have been advised", ha="center", color=GRAY)
        content = BytesIO()
        figure.savefig(content, format=kind, dpi=150, metadata=UNDATED[kind])
        return content.getvalue()


def _drawable(name: str) -> str:
    """A name in ASCII: matplotlib warns about letters that its font lacks."""
    return printable(name, 60).encode("ascii", "replace").decode()


def _draw(figure: Figure, risk: float, scores: Sequence[TierScores]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_rates(left, risk, scores)
    _draw_gains(right, scores)
    left.set_yticks(range(len(scores)), [_drawable(score.group) for score in scores])
    left.set_ylim(len(scores) - 0.5, -0.5)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        for row in range(0, len(scores), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="#f2f2f2", zorder=0)


def _draw_rates(axes: Axes, risk: float, scores: Sequence[TierScores]) -> None:
    """Draw the shares of exceeded bounds. Intervals wider than the panel end in an arrow."""
    rates = [score.exceeded_bound for score in scores]
    end = min(1.0, max([4 * risk, *(1.2 * rate.share for rate in rates if rate.jobs)]))
    for row, rate in enumerate(rates):
        if not rate.jobs:
            axes.text(end / 100, row, "too few", va="center", color=GRAY, style="italic")
            continue
        axes.hlines(row, rate.low, min(rate.high, end), color=BLUE, linewidth=1.5)
        axes.plot(rate.share, row, "o", color=BLUE, markersize=5, clip_on=False, zorder=3)
        if rate.high > end:
            axes.plot(end, row, ">", color=BLUE, markersize=5, clip_on=False)
    axes.axvline(risk, color=RED, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"accepted risk {risk:.2%}", (risk, 1), (3, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=RED,
    )  # fmt: skip
    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("share of advised jobs above their memory bound\nwith 95% interval (arrow: it extends further)")


def _draw_gains(axes: Axes, scores: Sequence[TierScores]) -> None:
    freed = [score.freed_gpu_hours for score in scores]
    axes.barh(range(len(scores)), freed, height=0.6, color=GREEN, zorder=2)
    for row, score in enumerate(scores):
        axes.annotate(
            f"{format_count(round(score.freed_gpu_hours))} GPU-h, {format_count(score.moved_down)} jobs",
            (1, row), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set_xlim(0, 1.05 * max(freed) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda value, position: format_count(round(value)))
    axes.set_xlabel("time freed on the larger tier (GPU-hours),\nand jobs moved to a smaller tier")
