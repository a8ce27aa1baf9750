"""The charts of a job's report: its GPUs over time, GPU memory with the tiers, and the roofline.

The roofline compares what the GPUs achieved with the limits of the memory and of each pipe.
"""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from almanac.hardware import GpuModel, gpu_models
from almanac.units import format_count, format_duration, printable
from reports.job.job_report import GpuSeries, JobReport, MemoryLevel, MetricsRow

Floats: TypeAlias = npt.NDArray[np.float32]

# A white background keeps a chart readable in a dark mail.
SETTINGS: dict[Any, Any] = {
    "text.parse_math": False, "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titley": 1.0,
    "axes.edgecolor": "#5a6472",
    "text.color": "#1f2733", "axes.labelcolor": "#1f2733", "xtick.color": "#3a4452", "ytick.color": "#3a4452",
}  # fmt: skip
WIDTH_IN, DPI, COLORS = 4.9, 200, 64
MARGIN_IN = 0.62
BUSY = LinearSegmentedColormap.from_list("busy", ["#f6e7c8", "#a9cfa5", "#3f8fa8", "#17335c"])
MISSING = "#d7d7d7"
LINES = ("#1f5fa8", "#c2571a", "#3b7a57", "#8a3f8f", "#8c6d1f", "#2a8f9e", "#a3304a", "#5b5fc7")
NAMED_GPUS, LINED_GPUS, STRIPS_IN = 16, 8, 4.6
"""Most GPUs that get a name, most GPUs that get a line, and the height of all strips in inches."""


def render_plots(report: JobReport) -> dict[str, bytes]:
    """The charts that have data, as PNGs by name (timeline, roofline, memory). The same job gives the same bytes."""
    series, metrics = report.series, report.metrics or {}
    if series is None:
        return {}
    found: dict[str, Figure] = {}
    # Ignore the matplotlibrc of the caller and of the current folder.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        if series.has("gpu_util_pct"):
            found["timeline"] = _timeline(series)
        model = gpu_models().get(metrics.get("gpu_model") or "")
        if model is not None and not report.is_mig and (pipes := placed_pipes(model, metrics, series)):
            found["roofline"] = figure = Figure(figsize=(WIDTH_IN, 2.9))
            draw_roofline(_axes(figure, 0.72, 0.42), model, pipes, series)
        if series.has("hbm_used_mib"):
            found["memory"] = figure = Figure(figsize=(WIDTH_IN, 2.3))
            _draw_memory(_axes(figure, MARGIN_IN, 0.42), series, report.memory_levels)
        return {name: png(figure) for name, figure in found.items()}


def _grid(series: GpuSeries, counter: str) -> Floats:
    """The values of a counter, (n_gpus, n_bins); NaN if not measured."""
    return np.array(series.values[counter], np.float32)


def png(figure: Figure) -> bytes:
    """The figure as PNG with a palette, which cuts its size to a third without visible loss."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()  # type: ignore[no-untyped-call]
    drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    picture = Image.fromarray(drawn).convert("RGB")
    content = BytesIO()
    picture.quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(content, "PNG")
    return content.getvalue()


def drawable(name: str, limit: int = 24) -> str:
    """A name in ASCII: matplotlib warns about letters that its font lacks."""
    return printable(name, limit).encode("ascii", "replace").decode()


def _axes(figure: Figure, left_in: float, bottom_in: float, right_in: float = 0.28, top_in: float = 0.3) -> Axes:
    """Add one panel with fixed margins. The automatic layout would draw everything twice."""
    width, height = figure.get_size_inches()
    box = (left_in / width, bottom_in / height, 1 - (left_in + right_in) / width, 1 - (bottom_in + top_in) / height)
    return figure.add_axes(box)


def _timeline(series: GpuSeries) -> Figure:
    """One strip for each GPU, gray and hatched if nothing was measured."""
    gpus, util_pct = len(series.units), _grid(series, "gpu_util_pct")
    strips_in = min(0.24 * gpus, STRIPS_IN)
    left_in = 0.3 + 0.062 * max(len(name) for name in _labels(series.units).values())
    figure = Figure(figsize=(WIDTH_IN, 0.92 + strips_in))
    axes = _axes(figure, left_in, 0.62, 0.5, 0.3)
    axes.set_facecolor(MISSING)
    if np.isnan(util_pct).any():
        axes.patch.set(hatch="////", edgecolor="#b9b9b9")
    end_s = series.span_s
    shown = np.ma.masked_invalid(util_pct)
    picture = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=BUSY, vmin=0, vmax=100,
                          extent=(0, end_s, gpus, 0))  # fmt: skip
    if gpus <= NAMED_GPUS:
        axes.hlines(range(1, gpus), 0, end_s, color="white", linewidth=1.2)
        for row, mean in enumerate(_means(util_pct)):
            text = "?" if np.isnan(mean) else f"{mean:.0f}%"
            axes.annotate(text, (1, row + 0.5), (4, 0), xycoords=("axes fraction", "data"), va="center",
                          textcoords="offset points", annotation_clip=False)  # fmt: skip
    labels = _labels(series.units)
    axes.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in labels]))
    axes.set_yticks([row + 0.5 for row in labels], list(labels.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_title("How busy each GPU was over time")
    time_axis(axes, end_s)
    _busy_legend(figure, picture)
    return figure


def _busy_legend(figure: Figure, picture: Any) -> None:
    width, height = figure.get_size_inches()
    bar = figure.colorbar(picture, cax=figure.add_axes((1 - 1.75 / width, 0.2 / height, 1.0 / width, 0.09 / height)),
                          orientation="horizontal")  # fmt: skip
    bar.set_ticks([])
    bar.outline.set_visible(False)
    for at, text, align in ((1 - 1.8 / width, "idle", "right"), (1 - 0.7 / width, "busy", "left")):
        figure.text(at, 0.245 / height, text, ha=align, va="center", fontsize=8.5)


def _labels(units: Sequence[str]) -> dict[int, str]:
    """Row and name of labeled GPUs: all if they are few, else the first of each host, at most NAMED_GPUS."""
    if len(units) <= NAMED_GPUS:
        return {row: drawable(unit) for row, unit in enumerate(units)}
    first: dict[str, int] = {}
    for row, unit in enumerate(units):
        first.setdefault(unit.partition(":")[0], row)
    step = -(-len(first) // NAMED_GPUS)
    return {row: drawable(host) for host, row in list(first.items())[::step]}


def _means(values: Floats) -> Floats:
    """Mean of each row's known values; NaN if there are none."""
    known = np.isfinite(values)
    number = known.sum(axis=1)
    total = np.where(known, values, 0).sum(axis=1)
    means: Floats = np.divide(total, number, out=np.full(len(values), np.nan), where=number > 0).astype(np.float32)
    return means


def time_axis(axes: Axes, end_s: float) -> None:
    """Label the axis with the time since the job's start, in seconds, minutes, hours, or days."""
    unit_s, unit = next(((s, u) for s, u in ((86_400, "d"), (3600, "h"), (60, "min")) if end_s >= 3 * s), (1, "s"))
    ticks = MaxNLocator(6, steps=[1, 2, 3, 5, 6, 10]).tick_values(0, end_s / unit_s)
    axes.set_xlim(0, end_s)
    axes.xaxis.set_major_locator(FixedLocator([tick * unit_s for tick in ticks if tick * unit_s <= end_s]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value / unit_s:g} {unit}"))


def _draw_memory(axes: Axes, series: GpuSeries, levels: Sequence[MemoryLevel]) -> None:
    """Draw each bin's highest use, by GPU; for many GPUs, draw the range from the lowest to the highest."""
    used = _grid(series, "hbm_used_mib") / np.float32(1024)
    time_s = (np.arange(used.shape[1]) + 0.5) * series.bin_s
    if len(used) <= LINED_GPUS:
        for row, color in zip(used, LINES, strict=False):
            axes.plot(time_s, row, color=color, linewidth=1.2)
    else:
        low, high = np.fmin.reduce(used), np.fmax.reduce(used)
        axes.fill_between(time_s, low, high, color="#9fc3e6", linewidth=0)
        axes.plot(time_s, high, color=LINES[0], linewidth=1.2)
    axes.set_title("GPU memory in use, GiB" + _whose(series.units))
    time_axis(axes, series.span_s)
    peak = float(np.fmax.reduce(used, axis=None))
    _draw_tiers(axes, {each.capacity_mib / 1024: drawable(each.name) for each in levels}, peak)


def _whose(units: Sequence[str]) -> str:
    if len(units) == 1:
        return ""
    if len(units) <= LINED_GPUS:
        return f" (one line for each of {len(units)} GPUs)"
    return f" ({format_count(len(units))} GPUs, lowest to highest)"


def _draw_tiers(axes: Axes, levels: Mapping[float, str], peak: float) -> None:
    top = max([peak, *levels]) * 1.12 or 1.0
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 4, 5, 10]))
    last = -np.inf
    for level, name in sorted(levels.items()):
        axes.axhline(level, color="#8b1e1e", linestyle=(0, (5, 3)), linewidth=1)
        # The names of two tiers of similar size would overlap.
        if level - last > 0.08 * top:
            axes.annotate(f"{name}: {level:.0f} GiB", (1, level), (-3, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize=8, color="#8b1e1e")  # fmt: skip
            last = level


# isort: split


MAX_PIPES, MAX_POINTS, MIN_SPAN = 2, 2500, 300.0
PIPE_COLORS = {"fp64": "#1f5fa8", "fp32": "#3b7a57", "fp16": "#8a3f8f", "tensor": "#c2571a"}
NAMES = {"fp64": "FP64", "fp32": "FP32", "fp16": "FP16", "tensor": "tensor cores"}


def placed_pipes(model: GpuModel, metrics: MetricsRow, series: GpuSeries) -> list[str]:
    """The pipes to draw, most active first: at most MAX_PIPES with a known peak and with points."""
    by_pipe: Mapping[str, Any] = metrics
    names = metrics.get("pipes_used") or () if model.hbm_bytes_per_s else ()
    used = [pipe for pipe in names if getattr(model, f"{pipe}_flops", None)]
    used.sort(key=lambda pipe: -(by_pipe.get(f"mean_{pipe}_active_frac") or 0.0))
    return [pipe for pipe in used if len(points(model, pipe, series)[0])][:MAX_PIPES]


def points(model: GpuModel, pipe: str, series: GpuSeries) -> tuple[Floats, Floats]:
    """Intensity (flop/byte) and flop/s of one GPU, for each bin where both are known and above zero."""
    if not {f"{pipe}_active_frac", "dram_active_frac"} <= series.values.keys():
        return np.array([], np.float32), np.array([], np.float32)
    active, memory = _grid(series, f"{pipe}_active_frac"), _grid(series, "dram_active_frac")
    is_placed = (active > 0) & (memory > 0) & (active <= 1) & (memory <= 1)
    flops = active[is_placed].astype(np.float64) * getattr(model, f"{pipe}_flops")
    return (flops / (memory[is_placed] * _bandwidth(model))).astype(np.float32), flops.astype(np.float32)


def _bandwidth(model: GpuModel) -> float:
    return model.hbm_bytes_per_s or np.nan


def draw_roofline(axes: Axes, model: GpuModel, pipes: Sequence[str], series: GpuSeries) -> None:
    """Draw the roofline on logarithmic axes. The ridge of a pipe is where its roof meets the memory's."""
    drawn = {pipe: points(model, pipe, series) for pipe in pipes}
    peaks = {pipe: float(getattr(model, f"{pipe}_flops")) for pipe in pipes}
    bandwidth = _bandwidth(model)
    all_x = np.concatenate([x for x, _ in drawn.values()])
    all_y = np.concatenate([y for _, y in drawn.values()])
    low_x = min(float(np.quantile(all_x, 0.005)), min(peaks.values()) / bandwidth) / 8
    high_x = max(float(np.quantile(all_x, 0.995)), max(peaks.values()) / bandwidth) * 5
    low_x = min(low_x, high_x / MIN_SPAN)  # at least two powers of ten, so that the axis has labels
    low_y = min(float(np.quantile(all_y, 0.005)), min(peaks.values()) / 100) / 2
    for pipe, (x, y) in drawn.items():
        step = -(-len(x) * len(drawn) // MAX_POINTS)
        axes.plot(x[::step], y[::step], "o", color=PIPE_COLORS[pipe], markersize=2.6, alpha=0.35, markeredgewidth=0)
        _draw_roof(axes, pipe, peaks[pipe], bandwidth, low_x, high_x)
    axes.set(xscale="log", yscale="log", xlim=(low_x, high_x), ylim=(low_y, max(peaks.values()) * 3))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _rate(value)))
    axes.set_xlabel("flop per byte of GPU memory", labelpad=1)
    axes.set_ylabel("flop/s of one GPU", labelpad=1)
    axes.set_title(f"Roofline, {model.name}: one dot is one GPU for {format_duration(series.bin_s)}")


def _draw_roof(axes: Axes, pipe: str, peak: float, bandwidth: float, low_x: float, high_x: float) -> None:
    ridge = peak / bandwidth
    axes.plot([low_x, ridge, high_x], [low_x * bandwidth, peak, peak], color=PIPE_COLORS[pipe], linewidth=1.4)
    axes.plot([ridge], [peak], "D", color=PIPE_COLORS[pipe], markersize=4)
    axes.annotate(f"ridge {ridge:.3g}", (ridge, peak), (4, -10), textcoords="offset points", fontsize=7.5,
                  color=PIPE_COLORS[pipe])  # fmt: skip
    axes.annotate(NAMES[pipe], (high_x, peak), (-2, 3), textcoords="offset points", ha="right", fontsize=8,
                  color=PIPE_COLORS[pipe])  # fmt: skip


def _rate(value: float) -> str:
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:g} {letter}"
    return f"{value:g}"
