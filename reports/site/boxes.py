"""Box plots from quantiles. Boxes hold the middle half, and whiskers reach from the 5th to the 95th percentile."""

from __future__ import annotations

from reports import matplotlib_start as matplotlib_start  # before matplotlib itself

# isort: split
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from almanac.units import format_count

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
