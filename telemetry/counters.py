"""The counters that almanac keeps (column, unit, and limits), and the columns of job, step, and GPU metrics.

telemetry/exporters/ has the names that each exporter gives to the counters. docs/formulas.md explains each column.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Counter:
    """A sample outside low..high is beyond its physical limit.

    ceiling: shares up to almost 1% above high are rounding, and count as high.
    feeds: columns of job_metrics that are null without the counter, besides its own mean and coverage.
    """

    column: str
    unit: str
    about: str
    low: float
    high: float
    is_cumulative: bool = False
    feeds: tuple[str, ...] = ()

    @property
    def ceiling(self) -> float:
        return self.high * (1.009 if self.unit in ("%", "fraction") else 1)


def _roofline(pipe: str, *more: str) -> tuple[str, ...]:
    names = ("class", "compute_frac", "compute_sample_frac", "placed_samples", "intensity", "intensity_bins", *more)
    return tuple(f"{name}_{pipe}" for name in names)


_PIPES = ("tensor", "fp16", "fp32", "fp64")
COUNTERS: tuple[Counter, ...] = (
    Counter("gpu_util_pct", "%", "time during which at least one kernel ran", 0, 100,
            feeds=("temporal_imbalance", "spatial_imbalance", "spatial_windows", "has_profiling_fault")),
    Counter("hbm_used_mib", "MiB", "device memory in use", 0, 1 << 20,
            feeds=("hbm_peak_mib", "hbm_peak_frac", "hbm_max_mib", "hbm_peak_ms", "hbm_growth_mib_h",
                   "is_flat", "is_preallocated")),
    Counter("hbm_total_mib", "MiB", "device memory: used, free, and reserved", 1, 1 << 20),
    Counter("gr_engine_active_frac", "fraction", "time during which the graphics or compute engine was busy", 0, 1),
    Counter("sm_active_frac", "fraction", "time at least one warp was active, mean over multiprocessors", 0, 1),
    Counter("fp64_active_frac", "fraction", "cycles the FP64 pipe was active", 0, 1,
            feeds=_roofline("fp64", "flops")),
    Counter("fp32_active_frac", "fraction", "cycles the FP32 and integer pipe was active", 0, 1,
            feeds=_roofline("fp32", "flops")),
    Counter("fp16_active_frac", "fraction", "cycles the FP16 pipe was active", 0, 1,
            feeds=_roofline("fp16", "flops")),
    Counter("tensor_active_frac", "fraction", "cycles the tensor pipe was active", 0, 1,
            feeds=_roofline("tensor", "flops")),
    Counter("dram_active_frac", "fraction", "cycles in which device memory sent or received", 0, 1,
            feeds=("job_class", "hbm_bytes_s", *(name for pipe in _PIPES for name in _roofline(pipe)))),
    Counter("power_w", "W", "power drawn", 0, 2000),
    Counter("energy_mj", "mJ", "energy since the driver was loaded (cumulative)", 0, 1e16,
            is_cumulative=True,
            feeds=("energy_j", "energy_power_w", "energy_measured_frac", "energy_resets",
                   "energy_rejected")),
    Counter("temp_c", "degC", "temperature of the GPU", -20, 150,
            feeds=("max_temp_c",)),
    Counter("nvlink_tx_bytes_s", "bytes/s", "sent over NVLink", 0, 2e12,
            feeds=("nvlink_bytes",)),
    Counter("nvlink_rx_bytes_s", "bytes/s", "received over NVLink", 0, 2e12,
            feeds=("nvlink_bytes",)),
    Counter("pcie_tx_bytes_s", "bytes/s", "sent over PCIe", 0, 2e11,
            feeds=("pcie_bytes",)),
    Counter("pcie_rx_bytes_s", "bytes/s", "received over PCIe", 0, 2e11,
            feeds=("pcie_bytes",)),
    Counter("sm_clock_mhz", "MHz", "clock of the multiprocessors", 0, 10_000,
            feeds=("mfu_frac",)),
    Counter("xid", "number", "last XID error; a gauge keeps it after the job, so that only its changes count", 0, 9999,
            feeds=("gpu_errors",)),
    Counter("ecc_uncorrected", "errors", "memory errors that ECC could not correct, since the driver was loaded",
            0, 1e9, feeds=("gpu_errors",)),
)  # fmt: skip

PARTS: tuple[Counter, ...] = (
    Counter("hbm_free_mib", "MiB", "device memory not in use", 0, 1 << 20),
    Counter("hbm_reserved_mib", "MiB", "device memory that the driver keeps for itself", 0, 1 << 20),
    Counter("hbm_used_pct", "%", "share of the device memory that is in use", 0, 100),
)
"""Counters that are read and not stored: they make up hbm_used_mib and hbm_total_mib."""

LIVE: tuple[Counter, ...] = (
    Counter("throttle_reasons", "bits", "why the clock is held down, by NVML's bits", 0, 2**32),
    Counter("row_remap_failures", "errors", "memory rows that could not be replaced by spare ones", 0, 1e9),
    Counter("xid_changes", "changes", "times that the XID gauge changed, or a count of XIDs by code did", 0, 1e6),
)
"""Counters that only the watch reads, of running jobs: they are not stored."""

HIGHEST = frozenset({"gpu_util_pct", "hbm_used_mib", "hbm_used_pct", "ecc_uncorrected", *(c.column for c in LIVE)})
"""A round of the watch, live or replayed, takes the highest value of these, the last xid, and the mean of others."""

COUNTER_COLUMNS: tuple[str, ...] = tuple(counter.column for counter in COUNTERS)


PIPES = ("fp64", "fp32", "fp16", "tensor")
"""Floating-point pipes; each has a counter <pipe>_active_frac."""

ERRORS = ("xid", "ecc_uncorrected")
"""Counters whose changes say that a GPU failed: telemetry/health reads them."""
AVERAGED = tuple(c for c in COUNTERS if c.column not in ("energy_mj", "hbm_total_mib", *ERRORS))
"""Counters with a useful mean: not the cumulative one, the capacity, or errors."""


def column(name: str, kind: pa.DataType, about: str = "", nullable: bool = True) -> pa.Field[pa.DataType]:
    """A column of a table in the store. about: its unit or meaning."""
    return pa.field(name, kind, nullable=nullable, metadata={"unit": about} if about else None)


_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_HBM = (
    column("gpu_model", _TEXT, "row of almanac/hardware.toml, or the exporter's own name; null: unknown"),
    column("mig_profile", _TEXT, "profile of the MIG instance, such as 1g.10gb; null: a whole GPU, or not named"),
    column(
        "hbm_capacity_mib",
        _REAL,
        "MiB: used + free, or nominal of a known model where that is not measured; null: unknown",
    ),
    column(
        "hbm_peak_mib", _REAL, "MiB, peak GPU memory; for a job the highest GPU, and null unless data quality is ok"
    ),
    column("hbm_peak_frac", _REAL, "share of the capacity"),
    column("hbm_peak_ms", _INT, "ms since 1970, UTC: when the peak was first seen"),
    column("hbm_growth_mib_h", _REAL, "MiB per hour, by least squares"),
    column("is_flat", _FLAG, "whether use stayed near its peak from the first minutes on; null: unknown"),
    column("is_preallocated", _FLAG, "whether the peak is what a framework reserved; null: unknown"),
)
_MEANS = tuple(column(f"mean_{counter.column}", _REAL, counter.unit) for counter in AVERAGED)
_USE = (
    column("temporal_imbalance", _REAL, "0 (steady) to 1; for a job the highest GPU"),
    column("energy_j", _REAL, "J; null also for a MIG instance, which shares its GPU's counter"),
    column("energy_power_w", _REAL, "W per GPU: energy / run time"),
    column("energy_measured_frac", _REAL, "share of the GPUs' time that the energy counter covers; null: no energy"),
    column("energy_resets", _INT, "number of times that the energy counter restarted"),
    column("energy_rejected", _INT, "readings of the energy counter that are physically impossible, or frozen"),
    column("max_temp_c", _REAL, "degC"),
    column("has_profiling_fault", _FLAG, "profiling counters read 0 while GPU_UTIL was high"),
)


def _roofline_columns(pipe: str) -> tuple[pa.Field[pa.DataType], ...]:
    return (
        column(f"class_{pipe}", _TEXT, "compute or memory, by the larger share of the time"),
        column(f"compute_frac_{pipe}", _REAL, "share of time on the roofline that is right of the ridge"),
        column(f"compute_sample_frac_{pipe}", _REAL, "share of samples on the roofline that are right of the ridge"),
        column(f"placed_samples_{pipe}", _INT, "samples on the roofline of this pipe; null: none"),
        column(f"flops_{pipe}", _REAL, "flop/s achieved, sum of all GPUs"),
        column(f"intensity_{pipe}", _REAL, "flop per byte of device memory"),
        column(f"intensity_bins_{pipe}", pa.list_(_INT), "samples below 1e-3, in 30 bins up to 1e3, and above"),
    )


JOB_METRICS = pa.schema(
    [
        column("job_id", _INT, nullable=False),
        column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        column("verdict", _TEXT, "data quality: ok, or why the job is excluded", nullable=False),
        column("reasons", pa.list_(_TEXT), 'reasons of null metrics: "metric: reason"'),
        column("attributed_by", _TEXT, "whole node, label, prolog, or squeue; null: no samples attributed"),
        column("gpus_seen", _INT, "GPUs with samples"),
        column("samples", _INT, "samples attributed"),
        column("expected_samples", _REAL, "GPUs * run time / scrape interval; null: unknown interval"),
        column("coverage_frac", _REAL, "mean over the GPUs of samples / expected samples, each at most 1"),
        *_HBM,
        column("hbm_max_mib", _REAL, "MiB, highest sample of any GPU, for any data quality"),
        *_MEANS,
        *(
            column(
                f"coverage_{counter.column}", _REAL, "mean over the GPUs of known / expected samples, each at most 1"
            )
            for counter in AVERAGED
        ),
        column("coverage_energy", _REAL, "mean over the GPUs of known / expected samples, each at most 1"),
        column("spatial_imbalance", _REAL, "0 (even) to 1"),
        column("spatial_windows", _INT, "windows compared: those with samples of most GPUs"),
        *_USE,
        column("idle_gpus", pa.list_(_TEXT), "GPUs without activity, as host:gpu or host:gpu:mig"),
        column("pipes_used", pa.list_(_TEXT), "floating-point pipes that the job uses"),
        column("main_pipe", _TEXT, "pipe with the highest mean activity"),
        column("mfu_frac", _REAL, "share of the main pipe's peak that was reached, by activity and clock"),
        column("job_class", _TEXT, "roofline class of the main pipe"),
        *(field for pipe in PIPES for field in _roofline_columns(pipe)),
        column("hbm_bytes_s", _REAL, "bytes/s of device memory achieved, sum of all GPUs"),
        column("nvlink_bytes", _REAL, "bytes over NVLink, both directions, all GPUs"),
        column("pcie_bytes", _REAL, "bytes over PCIe, both directions, all GPUs"),
        column(
            "gpu_errors",
            pa.list_(_TEXT),
            "first and last errors of its GPUs: host:gpu:XID 79:s since 1970; null: none seen",
        ),
    ]
)

_STEP_KEY = ("job_id", "submit_s")


def _is_of_step(name: str) -> bool:
    return name == "coverage_frac" or not name.startswith(("coverage_", "intensity_bins_", "gpu_errors"))


STEP_METRICS = pa.schema(
    [
        *(JOB_METRICS.field(name) for name in _STEP_KEY),
        column("step", _TEXT, "0, 1, ..., or 1+0 of a heterogeneous step", nullable=False),
        *(field for field in JOB_METRICS if field.name not in _STEP_KEY and _is_of_step(field.name)),
    ]
)
"""The columns of a job, for one of its steps, without the coverage of each counter, histograms, and errors."""

GPU_METRICS = pa.schema(
    [
        column("job_id", _INT, nullable=False),
        column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        column("host", _TEXT, nullable=False),
        column("gpu", pa.int16(), "GPU index on its host", nullable=False),
        column("mig", _TEXT, "MIG instance id; empty: the whole GPU", nullable=False),
        column("samples", _INT, "samples attributed"),
        column("expected_samples", _REAL, "run time / scrape interval; null: unknown interval"),
        column("coverage_frac", _REAL, "samples / expected samples, at most 1"),
        *_HBM,
        *_MEANS,
        *_USE,
        column("is_idle", _FLAG, "no activity in any sample; null: unknown"),
    ]
)
