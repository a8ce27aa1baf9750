"""The rows of the tables that the site report shows, as types, so that mypy finds a misspelled column.

They name only the columns that the page and its charts use. A test compares them with the tables, which
docs/characterize.md and docs/site-report.md explain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

BoxRow = Mapping[str, object]
"""A row with quantiles of some value: p5_<value>, p25_<value>, p50_<value>, p75_<value>, p95_<value>, mean_<value>."""


class SizeRow(TypedDict):
    """A size class of jobs; gpus_below: None for the largest."""

    gpus_from: int
    gpus_below: int | None
    jobs: int


class PipesRow(TypedDict):
    """A set of pipes, joined by "+"."""

    pipes: str
    jobs: int


class PipeMixRow(PipesRow):
    """The same, with the jobs' mean GPU_UTIL."""

    mean_gpu_util_pct: float | None


class PeakRow(TypedDict):
    """A bin of HBM peaks, for one kind of preallocation."""

    hbm_peak_frac_from: float
    reserved: str
    jobs: int


class IntensityRow(TypedDict):
    """A bin of arithmetic intensity, for one GPU model. share: None for a model without samples."""

    gpu_model: str
    samples: int
    intensity_from_flop_per_byte: float
    share: float | None
    ridge_flop_per_byte: float | None


class SpatialRow(TypedDict):
    """A bin of spatial imbalance."""

    spatial_imbalance_from: float
    jobs: int
    share: float


class TemporalRow(TypedDict):
    """A bin of temporal imbalance."""

    temporal_imbalance_from: float
    jobs: int
    share: float


ClassRow = TypedDict("ClassRow", {"class": str, "class_by": str, "jobs": int})
"""A roofline class, by one criterion."""

EnergyRow = TypedDict(
    "EnergyRow",
    {
        "class": str,
        "class_by": str,
        "gpu_hours_from": float,
        "gpu_hours_below": float | None,
        "p50_energy_j": float,
    },
)
"""A class within a band of GPU-hours."""


class HeatmapRow(TypedDict):
    """A bin of FP64 and DRAM activity."""

    fp64_active_from_frac: float
    dram_active_from_frac: float
    mean_gpu_util_pct: float


class CorrelationRow(TypedDict):
    """Two counters. place: of counter_a in the order of the matrix."""

    counter_a: str
    counter_b: str
    place: int
    spearman: float | None


class ShareRow(TypedDict):
    """A partition, account, or GPU type."""

    name: str
    jobs: int
    gpu_hours: float
    gpu_hours_share: float | None
    measured_gpu_hours: float
    mean_gpu_util_frac: float | None
    unused_gpu_hours: float | None
    unused_cost: float | None
    energy_kwh: float | None
    energy_cost: float | None
