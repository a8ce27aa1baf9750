"""The charts of replayed jobs: memory advice by group, powered nodes over time, and policies of `almanac simulate`."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from advisor.memory.backtest import TierScores
from advisor.power.backtest import OURS, PAPER, PowerBacktest
from advisor.power.forecast import HORIZON, QUANTILE, STEP_MIN
from advisor.trial import Verdict
from almanac.units import DAY_S, HOUR_S, format_count
from reports.job.plots import drawable
from telemetry.power.series import NodeSeries

# SVG and PDF keep text as text, no text becomes a formula, and the same scores give the same bytes.
SETTINGS: dict[Any, Any] = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "almanac", "pdf.fonttype": 42, "font.size": 9.0,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
UNDATED: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
WIDTH_IN, HEAD_IN, ROW_IN = 11.0, 1.9, 0.28
BLUE, RED, GREEN, GRAY = "#1f5fa8", "#b3261e", "#3b7a57", "#6b6b6b"


def plotted(size_in: tuple[float, float], title: str, draw: Callable[[Figure], None], kind: str, dpi: int) -> bytes:
    """The content of a file of that kind (a key of UNDATED), the same for the same drawing."""
    # Ignore the matplotlibrc of the caller and of the current folder.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        figure = Figure(figsize=size_in, layout="constrained")
        figure.suptitle(title, fontsize=11)
        draw(figure)
        content = BytesIO()
        figure.savefig(content, format=kind, dpi=dpi, metadata=UNDATED[kind])
        return content.getvalue()


def render_tier_plot(cluster: str, risk: float, scores: Sequence[TierScores], kind: str) -> bytes:
    """A file of that kind (a key of UNDATED), the same for the same scores.

    scores: from score_tiers, drawn from the top; the first covers all submissions. risk: the accepted risk, a fraction.
    Without any advice, the chart has only a text that says so.
    """
    everything = scores[0]
    title = (
        f"{drawable(cluster, 60)}: memory advice replayed on {format_count(everything.jobs)} jobs, "
        f"{format_count(everything.advised)} advised"
    )

    def draw(figure: Figure) -> None:
        if everything.advised:
            _draw_tiers(figure, risk, scores)
        else:
            figure.text(0.5, 0.5, "no scores: no job would have been advised", ha="center", color=GRAY)

    return plotted((WIDTH_IN, HEAD_IN + ROW_IN * len(scores)), title, draw, kind, 150)


def _draw_tiers(figure: Figure, risk: float, scores: Sequence[TierScores]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_rates(left, risk, scores)
    _draw_gains(right, scores)
    left.set_yticks(range(len(scores)), [drawable(score.group, 60) for score in scores])
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


def render_power_plot(name: str, series: NodeSeries, outcome: PowerBacktest, kind: str) -> bytes:
    """A file of that kind (a key of UNDATED): nodes in use, powered, forecast, and asleep."""
    title = f"{drawable(name, 60)}: powered nodes, replayed over {outcome.days:.1f} days"

    def draw(figure: Figure) -> None:
        rows = slice(outcome.spans.score, outcome.spans.end)
        times, total = series.times()[rows], np.where(series.is_usable[rows], series.total[rows], np.nan)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        upper.plot(times, total, color=GRAY, linewidth=1, label="all nodes")
        for controller, color, width in ((PAPER, RED, 1.0), (OURS, BLUE, 1.4)):
            powered = outcome.timeline[controller]
            shown = np.where(np.isnan(total), np.nan, powered)
            upper.plot(times, shown, color=color, linewidth=width, label=f"on: {controller}")
            lower.plot(times, total - powered, color=color, linewidth=1)
        hours = HORIZON * STEP_MIN // 60
        label = f"forecast peak of the next {hours} h (quantile {QUANTILE:g})"
        upper.plot(times[::STEP_MIN], outcome.forecast, color=BLUE, linewidth=0.7, linestyle=":", label=label)
        active = np.where(np.isnan(total), np.nan, series.active[rows])
        upper.plot(times, active, color=GREEN, linewidth=0.8, label="in use")
        upper.set_ylabel("nodes")
        upper.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncol=5, frameon=False, fontsize=8)
        lower.set_ylabel("nodes asleep")
        lower.set_ylim(bottom=0)
        lower.xaxis_date()
        dates = ConciseDateFormatter(lower.xaxis.get_major_locator())  # type: ignore[no-untyped-call]
        lower.xaxis.set_major_formatter(dates)

    return plotted((11.0, 6.4), title, draw, kind, 130)


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
    """The lines of one policy. jct_s, delay_s: of the jobs that started. edges_s: of the bins of the others.

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
    """The content of a file of that kind (a key of backtest_plot.UNDATED). The same curves give the same bytes."""

    def draw(figure: Figure) -> None:
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
        names = [drawable(each.policy, 40) for each in policies]
        unused.legend(jct.get_lines(), names, loc="center", ncol=2, frameon=False, title="policy")

    return plotted((11.0, 8.4), drawable(title, 100), draw, kind, 130)


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


def render_trial_plot(verdicts: Sequence[Verdict], kind: str) -> bytes:
    """A file of that kind (a key of UNDATED): each subject's gains by week over the site and over its best control."""
    shown = [each for each in verdicts if each.result.gains]

    def draw(figure: Figure) -> None:
        if not shown:
            figure.text(0.5, 0.5, "no subject has enough data", ha="center", color=GRAY)
            return
        for axes, verdict in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            _draw_gains_by_week(axes, verdict)

    return plotted((max(4.5, 3.6 * len(shown)), 3.4), "almanac's gain by week", draw, kind, 150)


def _draw_gains_by_week(axes: Axes, verdict: Verdict) -> None:
    """One dot for each week, and the mean with its interval."""
    gains = verdict.result.gains
    assert gains is not None
    rng = np.random.default_rng(1)
    for place, (gain, color) in enumerate(((gains.site, BLUE), (gains.best_control, RED))):
        weeks = np.array(gain.by_week)
        axes.plot(place + rng.uniform(-0.12, 0.12, len(weeks)), weeks, "o", color=color, alpha=0.5, markersize=4)
        axes.errorbar(
            place + 0.25, gain.mean, [[gain.mean - gain.low], [gain.high - gain.mean]], fmt="s", color=color, capsize=4
        )
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set_xlim(-0.5, 1.6)
    names = (gains.site.over, gains.best_control.over)
    axes.set_xticks((0.1, 1.1), [f"over {drawable(name, 40)}".replace(", ", ",\n") for name in names], fontsize=7)
    axes.set_ylabel(drawable(gains.measure, 60))
    axes.set_title(f"{drawable(verdict.result.subject, 40)}: {verdict.answer}", fontsize=10)
