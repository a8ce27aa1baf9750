"""Box plots from quantiles, and color maps, as the charts of the site report use them.

Boxes hold the middle half of the values, and whiskers reach from the 5th to the 95th percentile."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from almanac.units import format_count
from reports.job.plots import BUSY

Row = dict[str, Any]
"""A row of a table of `telemetry.characterize`."""
CLASS_COLORS = {"compute": "#c2571a", "memory": "#1f5fa8"}


def draw_boxes(
    axes: Axes,
    rows: Sequence[Row],
    value: str,
    color: str,
    places: Sequence[float] | None = None,
    width: float = 0.6,
) -> None:
    """Draw a box for each row that has quantiles of `value`, with a dot at the mean."""
    spots = range(len(rows)) if places is None else places
    known = [(row, spot) for row, spot in zip(rows, spots, strict=True) if row[f"p50_{value}"] is not None]
    stats: list[dict[str, Any]] = [
        {"whislo": row[f"p5_{value}"], "q1": row[f"p25_{value}"], "med": row[f"p50_{value}"], "q3": row[f"p75_{value}"],
         "whishi": row[f"p95_{value}"], "mean": row[f"mean_{value}"], "fliers": []}
        for row, _ in known
    ]  # fmt: skip
    if not stats:
        return
    axes.bxp(
        stats,
        positions=[spot for _, spot in known],
        widths=width,
        patch_artist=True,
        showmeans=True,
        showfliers=False,
        boxprops={"facecolor": color, "alpha": 0.55, "linewidth": 0.8},
        medianprops={"color": "#111827", "linewidth": 1.4},
        meanprops={"marker": "o", "markersize": 3, "markerfacecolor": "#a3304a", "markeredgewidth": 0},
        whiskerprops={"linewidth": 0.8},
        capprops={"linewidth": 0.8},
    )


def size_labels(axes: Axes, rows: Sequence[Row]) -> None:
    """Label the rows, which are at 0, 1, ..., with their size classes: "5-8", ">512"."""
    names = [
        f">{row['gpus_from'] - 1}" if row["gpus_below"] is None else f"{row['gpus_from']}-{row['gpus_below'] - 1}"
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), names, fontsize=7, rotation=30 if len(rows) > 6 else 0)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("GPUs of the job", labelpad=1)


def class_label(row: Row) -> str:
    """The class, its criterion (by FP64 as in the paper, or by main pipe), and its number of jobs, in three lines."""
    by = "FP64" if row["class_by"] == "fp64" else "main pipe"
    return f"{row['class']}\nby {by}\n{format_count(row['jobs'])} jobs"


def number_plainly(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: matplotlib's own labels are formulas, which reports do not parse."""
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def draw_energy(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw two boxes for each band of GPU-hours: compute-bound jobs on the left, memory-bound jobs on the right."""
    bands = sorted({(row["gpu_hours_from"], row["gpu_hours_below"]) for row in rows}, key=lambda band: band[0])
    place = {first: number for number, (first, _) in enumerate(bands)}
    for name, shift in (("compute", -0.2), ("memory", 0.2)):
        chosen = [row for row in rows if row["class"] == name]
        places = [place[row["gpu_hours_from"]] + shift for row in chosen]
        draw_boxes(axes, chosen, "energy_j", CLASS_COLORS[name], places, 0.34)
    names = [f">{first:g}" if below is None else f"{first:g}-{below:g}" for first, below in bands]
    axes.set_xticks(range(len(bands)), names, fontsize=7, rotation=30)
    axes.set_xlim(-0.6, len(bands) - 0.4)
    axes.set_yscale("log")
    number_plainly(axes.yaxis)
    axes.set_xlabel("GPU-hours of the job", labelpad=1)
    axes.set_ylabel("energy (J)")
    patches = [Patch(color=color, alpha=0.55, label=f"{name}-bound") for name, color in CLASS_COLORS.items()]
    axes.legend(handles=patches, frameon=False, fontsize=7.5)
    axes.set_title("Energy of a job by GPU-hours and class (FP64)")


ANNOTATED_RHO = 0.7
SHORT = {
    "mean_gpu_util_pct": "GPU_UTIL", "energy_power_w": "GPU_POWER", "mean_power_w": "power sensor",
    "mean_temp_c": "GPU_TEMP", "mean_sm_active_frac": "SM_ACTV", "mean_dram_active_frac": "DRAM_ACTV",
    "mean_fp64_active_frac": "FP64_ACTV", "mean_fp32_active_frac": "FP32_ACTV", "mean_fp16_active_frac": "FP16_ACTV",
    "mean_tensor_active_frac": "TNSR_ACTV", "mean_hbm_used_mib": "HBM_USED", "mean_gr_engine_active_frac": "GR_ENGINE",
    "mean_nvlink_tx_bytes_s": "NVLINK_TX", "mean_nvlink_rx_bytes_s": "NVLINK_RX", "mean_pcie_tx_bytes_s": "PCIE_TX",
    "mean_pcie_rx_bytes_s": "PCIE_RX",
}  # fmt: skip
"""The paper's short names of counters (table I)."""


def heatmap(name: str) -> Callable[[Axes, Sequence[Row]], None]:
    def draw(axes: Axes, rows: Sequence[Row]) -> None:
        """Color the bins by the mean GPU_UTIL of their jobs; white bins have no jobs."""
        grid = np.full((20, 20), np.nan)
        for row in rows:
            place = round(row["dram_active_from_frac"] * 20), round(row["fp64_active_from_frac"] * 20)
            grid[place] = row["mean_gpu_util_pct"]
        picture = axes.imshow(np.ma.masked_invalid(grid), origin="lower", extent=(0, 1, 0, 1), cmap=BUSY, vmin=0,
                              vmax=100, aspect="auto")  # fmt: skip
        axes.figure.colorbar(picture, ax=axes, fraction=0.05, pad=0.03)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("mean FP64_ACTV")
        axes.set_ylabel("mean DRAM_ACTV")
        axes.set_title(f"Mean GPU_UTIL (%), {name}-bound")

    return draw


def draw_matrix(axes: Axes, rows: Sequence[Row]) -> None:
    """Sort the counters by their correlation with GPU_UTIL; write numbers for strong correlations only."""
    order = sorted({row["counter_a"]: row["place"] for row in rows}.items(), key=lambda item: item[1])
    place = {counter: number for number, (counter, _) in enumerate(order)}
    grid = np.full((len(place), len(place)), np.nan)
    for row in rows:
        grid[place[row["counter_a"]], place[row["counter_b"]]] = (
            math.nan if row["spearman"] is None else row["spearman"]
        )
    axes.set_facecolor("#e3e3e3")
    picture = axes.imshow(np.ma.masked_invalid(grid), cmap="RdBu_r", vmin=-1, vmax=1)
    for (line, column), rho in np.ndenumerate(grid):
        if abs(rho) >= ANNOTATED_RHO:
            axes.annotate(f"{rho:.1f}", (column, line), ha="center", va="center", fontsize=5.5,
                          color="white" if abs(rho) > 0.8 else "black")  # fmt: skip
    names = [SHORT.get(counter, counter) for counter in place]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.figure.colorbar(picture, ax=axes, fraction=0.04, pad=0.03)
    axes.set_title("Spearman's rho (gray: not known)")
