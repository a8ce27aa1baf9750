"""The charts of the site report: figures 1 to 11 of Cankur et al., and nodes in use, powered, and asleep.

The values of the figures come from the tables of `telemetry.characterize`."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from almanac.units import format_count, printable
from reports.job.plots import LINES, SETTINGS, WIDTH_IN, drawable, png
from reports.site.drawing import (
    CLASS_COLORS,
    Row,
    class_label,
    draw_boxes,
    draw_energy,
    draw_matrix,
    heatmap,
    number_plainly,
    size_labels,
)
from reports.site.power import NodeSetPower
from telemetry.characterize.usage import PAPER
from telemetry.power.demand import HOLD_S, NodeCounts

MAX_MIXES, MAX_MODELS = 10, 4
KINDS = {"not preallocated": LINES[0], "cannot be told": "#9aa5b1", "preallocated": LINES[1]}
PIPE_WORDS = {"fp64": "FP64", "fp32": "FP32", "fp16": "FP16", "tensor": "tensor"}


@dataclass(frozen=True)
class Picture:
    """A chart as PNG. alt: a text for readers who do not see it."""

    png: bytes
    alt: str

    @property
    def address(self) -> str:
        """The chart as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


Draw = Callable[[Axes, Sequence[Row]], None]


@dataclass(frozen=True)
class Panel:
    """One chart, from the rows of a table that have the values of `where`; without such rows it is left out."""

    figure: str
    table: str
    alt: str
    draw: Draw
    where: Mapping[str, object] = field(default_factory=dict)
    height_in: float = 2.7
    left_in: float = 0.68
    bottom_in: float = 0.55


def render_site_plots(tables: Mapping[str, pa.Table], panels: Sequence[Panel]) -> dict[str, list[Picture]]:
    """The charts by the name of their figure. The same tables give the same bytes."""
    found: dict[str, list[Picture]] = {}
    # Ignore the matplotlibrc of the caller and of the current folder.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        for panel in panels:
            rows = [row for row in tables[panel.table].to_pylist() if panel.where.items() <= row.items()]
            if any(row.get("jobs", 1) for row in rows):
                found.setdefault(panel.figure, []).append(Picture(_draw(panel, rows), panel.alt))
    return found


def _draw(panel: Panel, rows: Sequence[Row]) -> bytes:
    figure = Figure(figsize=(WIDTH_IN, panel.height_in))
    width, height = figure.get_size_inches()
    box = (panel.left_in / width, panel.bottom_in / height, 1 - (panel.left_in + 0.5) / width,
           1 - (panel.bottom_in + 0.32) / height)  # fmt: skip
    panel.draw(figure.add_axes(box), rows)
    return png(figure)


def _sizes(axes: Axes, rows: Sequence[Row]) -> None:
    jobs = [row["jobs"] for row in rows]
    axes.bar(range(len(rows)), jobs, color=LINES[0])
    if max(jobs) > 30 * min(filter(None, jobs)):
        axes.set_yscale("log")
        number_plainly(axes.yaxis)
    size_labels(axes, rows)
    axes.set_ylabel("jobs")
    axes.set_title("Jobs by size")


def _durations(axes: Axes, rows: Sequence[Row]) -> None:
    draw_boxes(axes, rows, "elapsed_h", LINES[0])
    axes.set_yscale("log")
    number_plainly(axes.yaxis)
    size_labels(axes, rows)
    axes.set_ylabel("hours")
    axes.set_title("Duration by size")


def _utilization(axes: Axes, rows: Sequence[Row]) -> None:
    draw_boxes(axes, rows, "gpu_util_pct", LINES[0])
    size_labels(axes, rows)
    axes.set(ylim=(0, 100), ylabel="mean GPU_UTIL, %")
    axes.set_title("GPU_UTIL by size")


def _mixes(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each set of pipes, and below it a dot for each pipe of the set."""
    shown = sorted(rows, key=lambda row: -row["jobs"])[:MAX_MIXES]
    heights = [row["jobs"] for row in shown]
    axes.bar(range(len(shown)), heights, color=LINES[0])
    top = max(heights)
    for place, row in enumerate(shown):
        util = "" if row["mean_gpu_util_pct"] is None else f"\n{row['mean_gpu_util_pct']:.0f}%"
        axes.annotate(f"{format_count(row['jobs'])}{util}", (place, row["jobs"]), (0, 2), ha="center", fontsize=7.5,
                      textcoords="offset points")  # fmt: skip
        used = row["pipes"].split("+")
        for line, pipe in enumerate(PIPE_WORDS):
            is_used = pipe in used
            axes.plot(place, -top * (0.1 + 0.1 * line), "o", markersize=6, clip_on=False,
                      color=LINES[0] if is_used else "#d9dee5")  # fmt: skip
    for line, word in enumerate(PIPE_WORDS.values()):
        axes.annotate(word, (-0.6, -top * (0.1 + 0.1 * line)), ha="right", va="center", fontsize=8)
    axes.set(ylim=(-top * 0.46, top * 1.22), xlim=(-0.7, max(len(shown), 6) - 0.3))
    axes.set_yticks([])
    axes.xaxis.set_visible(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title("Pipes used together: jobs and their mean GPU_UTIL")


def _peaks(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each 5% of the capacity, split by preallocation; the line is the share of jobs up to there."""
    edges = sorted({row["hbm_peak_frac_from"] for row in rows})
    counts = {kind: np.zeros(len(edges)) for kind in KINDS}
    for row in rows:
        counts[row["reserved"]][edges.index(row["hbm_peak_frac_from"])] += row["jobs"]
    total = sum(map(np.sum, counts.values()))
    base = np.zeros(len(edges))
    for kind, number in counts.items():
        if number.any():
            axes.bar(np.add(edges, 0.025), number / total, 0.046, bottom=base, color=KINDS[kind], label=kind)
            base += number / total
    axes.legend(frameon=False, fontsize=7.5, loc="upper center")
    axes.set_xlim(0, 1.05)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("HBM peak, share of GPU memory")
    axes.set_ylabel("jobs")
    both = axes.twinx()
    both.plot(np.add(edges, 0.05), np.cumsum(base), color="#c2571a", linewidth=1.4)
    both.set_ylim(0, 1.02)
    both.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("Jobs that asked for the largest tier")


def _intensity(pipe: str) -> Draw:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        """A line for each GPU model, and its ridge as a dashed line; samples left of the ridge are memory-bound."""
        by_model: dict[str, list[Row]] = {}
        for row in rows:
            by_model.setdefault(row["gpu_model"], []).append(row)
        largest = sorted(by_model, key=lambda model: -sum(row["samples"] for row in by_model[model]))[:MAX_MODELS]
        for model, color in zip(largest, LINES, strict=False):
            bins = sorted(by_model[model], key=lambda row: row["intensity_from_flop_per_byte"])
            if bins[0]["share"] is None:
                continue
            edges = [bins[1]["intensity_from_flop_per_byte"] / 10**0.2,
                     *(row["intensity_from_flop_per_byte"] for row in bins[1:])]  # fmt: skip
            shares = [row["share"] for row in bins if row["share"] is not None]
            axes.stairs(shares, [*edges, edges[-1] * 10**0.2], color=color, linewidth=1.3, label=drawable(model))
            ridge = bins[0]["ridge_flop_per_byte"]
            if ridge is not None:
                axes.axvline(ridge, color=color, linestyle=(0, (5, 3)), linewidth=1)
        axes.set_xscale("log")
        number_plainly(axes.xaxis)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("flop per byte of GPU memory traffic (dashed: ridge)")
        axes.set_ylabel("samples")
        axes.legend(frameon=False, fontsize=7.5)
        axes.set_title(f"Arithmetic intensity, {PIPE_WORDS[pipe]}")

    return draw


def _imbalance(word: str, band: str) -> Draw:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        left = [row[f"{word}_imbalance_from"] for row in rows]
        axes.bar(np.add(left, 0.025), [row["share"] for row in rows], 0.046, color=LINES[0])
        axes.set_xlim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel(f"{word} imbalance")
        axes.set_ylabel("jobs")
        axes.set_title(f"GPU_UTIL {band}: {format_count(sum(row['jobs'] for row in rows))} jobs")

    return draw


def _by_pipes(word: str) -> Draw:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        shown = sorted(rows, key=lambda row: -row["jobs"])[:MAX_MIXES]
        draw_boxes(axes, shown, f"{word}_imbalance", LINES[0])
        names = ["\n".join(PIPE_WORDS.get(pipe, pipe) for pipe in row["pipes"].split("+")) for row in shown]
        axes.set_xticks(range(len(shown)), names, fontsize=7.5)
        axes.set(ylim=(0, 1), ylabel=f"{word} imbalance")
        axes.set_title("By pipes used (most jobs first)")

    return draw


def _by_class(word: str) -> Draw:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        for place, row in enumerate(rows):
            draw_boxes(axes, [row], f"{word}_imbalance", CLASS_COLORS[row["class"]], [place])
        axes.set_xticks(range(len(rows)), list(map(class_label, rows)), fontsize=7.5)
        axes.set(ylim=(0, 1), xlim=(-0.6, len(rows) - 0.4), ylabel=f"{word} imbalance")
        axes.set_title("By class")

    return draw


BANDS = {0: "below 30%", 30: "30% to 70%", 70: "from 70%"}
_BY_PAPER = {"rule": PAPER, "pipes_unknown": ""}


def _bands(figure: str, table: str, word: str) -> Iterator[Panel]:
    for low, band in BANDS.items():
        alt = f"Share of jobs by {word} imbalance, among jobs with GPU_UTIL {band}"
        yield Panel(figure, table, alt, _imbalance(word, band), {"gpu_util_from_pct": low})


def _kinds(figure: str, word: str) -> Iterator[Panel]:
    table = f"fig{int(figure):02}_{word}"
    alt = f"Box plots of {word} imbalance by floating-point pipes used"
    yield Panel(figure, f"{table}_by_pipes", alt, _by_pipes(word), _BY_PAPER, bottom_in=0.62)
    alt = f"Box plots of {word} imbalance of compute-bound and memory-bound jobs"
    yield Panel(figure, f"{table}_by_class", alt, _by_class(word))


PANELS: tuple[Panel, ...] = (
    Panel("1", "fig01_job_size", "Number of jobs by number of GPUs", _sizes),
    Panel("1", "fig01_duration", "Box plots of the duration of jobs by number of GPUs", _durations),
    Panel("1", "fig01_gpu_util", "Box plots of the mean GPU_UTIL of jobs by number of GPUs", _utilization),
    Panel("2", "fig02_pipe_mix", "Number of jobs by the floating-point pipes that they use, and their mean GPU_UTIL",
          _mixes, _BY_PAPER, 3.2, bottom_in=0.1),
    Panel("3", "fig03_hbm_peak", "Distribution of HBM peaks of the jobs that asked for the largest tier", _peaks,
          {"is_largest_tier": True}),
    *(Panel("4", "fig04_intensity", f"Distribution of arithmetic intensity of samples, {PIPE_WORDS[pipe]} pipe",
            _intensity(pipe), {"pipe": pipe})
      for pipe in ("fp64", "tensor")),
    Panel("5", "fig05_energy", "Box plots of the energy of compute-bound and memory-bound jobs by GPU-hours",
          draw_energy, {"class_by": "fp64"}, 3.0, 0.85),
    *_bands("6", "fig06_spatial_by_util", "spatial"),
    *_bands("7", "fig07_temporal_by_util", "temporal"),
    *_kinds("8", "spatial"),
    *_kinds("9", "temporal"),
    *(Panel("10", "fig10_heatmap", f"Mean GPU_UTIL by FP64 and DRAM activity of {name}-bound jobs", heatmap(name),
            {"class": name})
      for name in ("compute", "memory")),
    Panel("11", "fig11_spearman", "Matrix of Spearman correlations between the mean counters of jobs", draw_matrix,
          height_in=4.6, left_in=0.9, bottom_in=0.95),
)  # fmt: skip
"""All charts, in the order of the page."""


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
