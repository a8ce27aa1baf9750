"""Color maps of the site report: GPU_UTIL by compute and memory activity, and the matrix of correlations."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter

from reports.job.plots import BUSY
from reports.site.boxes import Row

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
