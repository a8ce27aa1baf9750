"""The roofline of a job: what its GPUs achieved, compared with the limits of the memory and of each pipe."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from almanac.hardware import GpuModel
from almanac.units import format_duration
from reports.job.rows import MetricsRow
from reports.job.series import Floats, GpuSeries

MAX_PIPES, MAX_POINTS, MIN_SPAN = 2, 2500, 300.0
COLORS = {"fp64": "#1f5fa8", "fp32": "#3b7a57", "fp16": "#8a3f8f", "tensor": "#c2571a"}
NAMES = {"fp64": "FP64", "fp32": "FP32", "fp16": "FP16", "tensor": "tensor cores"}


def placed_pipes(model: GpuModel | None, metrics: MetricsRow, series: GpuSeries) -> list[str]:
    """The pipes to draw, most active first: at most MAX_PIPES with a known peak and with points."""
    if model is None:
        return []
    by_pipe: Mapping[str, Any] = metrics
    used = [pipe for pipe in metrics.get("pipes_used") or () if getattr(model, f"{pipe}_flops", None)]
    used.sort(key=lambda pipe: -(by_pipe.get(f"mean_{pipe}_active_frac") or 0.0))
    return [pipe for pipe in used if len(points(model, pipe, series)[0])][:MAX_PIPES]


def points(model: GpuModel, pipe: str, series: GpuSeries) -> tuple[Floats, Floats]:
    """Intensity (flop/byte) and flop/s of one GPU, for each bin where both are known and above zero."""
    active, memory = series.values[f"{pipe}_active_frac"], series.values["dram_active_frac"]
    is_placed = (active > 0) & (memory > 0) & (active <= 1) & (memory <= 1)
    flops = active[is_placed].astype(np.float64) * getattr(model, f"{pipe}_flops")
    return (flops / (memory[is_placed] * model.hbm_bytes_per_s)).astype(np.float32), flops.astype(np.float32)


def draw_roofline(axes: Axes, model: GpuModel, pipes: Sequence[str], series: GpuSeries) -> None:
    """Draw the roofline on logarithmic axes. The ridge of a pipe is where its roof meets the memory's."""
    drawn = {pipe: points(model, pipe, series) for pipe in pipes}
    peaks = {pipe: float(getattr(model, f"{pipe}_flops")) for pipe in pipes}
    bandwidth = model.hbm_bytes_per_s
    all_x = np.concatenate([x for x, _ in drawn.values()])
    all_y = np.concatenate([y for _, y in drawn.values()])
    low_x = min(float(np.quantile(all_x, 0.005)), min(peaks.values()) / bandwidth) / 8
    high_x = max(float(np.quantile(all_x, 0.995)), max(peaks.values()) / bandwidth) * 5
    low_x = min(low_x, high_x / MIN_SPAN)  # at least two powers of ten, so that the axis has labels
    low_y = min(float(np.quantile(all_y, 0.005)), min(peaks.values()) / 100) / 2
    for pipe, (x, y) in drawn.items():
        step = -(-len(x) * len(drawn) // MAX_POINTS)
        axes.plot(x[::step], y[::step], "o", color=COLORS[pipe], markersize=2.6, alpha=0.35, markeredgewidth=0)
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
    axes.plot([low_x, ridge, high_x], [low_x * bandwidth, peak, peak], color=COLORS[pipe], linewidth=1.4)
    axes.plot([ridge], [peak], "D", color=COLORS[pipe], markersize=4)
    axes.annotate(f"ridge {ridge:.3g}", (ridge, peak), (4, -10), textcoords="offset points", fontsize=7.5,
                  color=COLORS[pipe])  # fmt: skip
    axes.annotate(NAMES[pipe], (high_x, peak), (-2, 3), textcoords="offset points", ha="right", fontsize=8,
                  color=COLORS[pipe])  # fmt: skip


def _rate(value: float) -> str:
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:g} {letter}"
    return f"{value:g}"
