"""The counters that almanac keeps: column, unit, and limits. telemetry/exporters/ has what each exporter calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """A sample outside low..high is beyond its physical limit.

    ceiling: shares up to almost 1% above high are rounding, and count as high.
    feeds: columns of job_metrics that are null without the counter, beside its own mean and coverage.
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
                   "is_preallocated")),
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
)  # fmt: skip

PARTS: tuple[Counter, ...] = (
    Counter("hbm_free_mib", "MiB", "device memory not in use", 0, 1 << 20),
    Counter("hbm_reserved_mib", "MiB", "device memory that the driver keeps for itself", 0, 1 << 20),
)
"""Counters that are read and not stored: with hbm_used_mib they make up hbm_total_mib."""

COUNTER_COLUMNS: tuple[str, ...] = tuple(counter.column for counter in COUNTERS)
