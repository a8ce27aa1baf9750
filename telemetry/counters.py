"""The counters that almanac reads, as data: our column, its unit and limits, and each exporter's name for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """`scale` turns an exporter's value into ours. A sample outside low..high is beyond its physical limit.

    default_on: whether dcgm-exporter's own default CSV switches it on. dcgm_about: what its field shows, where that is
    not what `about` says. feeds: columns of job_metrics that are null without the counter, beside its own mean and
    coverage.
    """

    column: str
    unit: str
    about: str
    low: float
    high: float
    dcgm: str
    dcgm_scale: float = 1.0
    default_on: bool = True
    jobstats: str = ""
    jobstats_scale: float = 1.0
    is_cumulative: bool = False
    dcgm_about: str = ""
    feeds: tuple[str, ...] = ()

    @property
    def is_profiling(self) -> bool:
        """Whether DCGM takes it from the GPU's profiling counters, and not from the driver."""
        return "_PROF_" in self.dcgm


def _roofline(pipe: str, *more: str) -> tuple[str, ...]:
    names = ("class", "compute_frac", "compute_sample_frac", "placed_samples", "intensity", "intensity_bins", *more)
    return tuple(f"{name}_{pipe}" for name in names)


_PIPES = ("tensor", "fp16", "fp32", "fp64")
MIB = 1 / 2**20
COUNTERS: tuple[Counter, ...] = (
    Counter("gpu_util_pct", "%", "time during which at least one kernel ran", 0, 100,
            "DCGM_FI_DEV_GPU_UTIL", jobstats="nvidia_gpu_duty_cycle",
            feeds=("temporal_imbalance", "spatial_imbalance", "spatial_windows", "has_profiling_fault")),
    Counter("hbm_used_mib", "MiB", "device memory in use", 0, 1 << 20,
            "DCGM_FI_DEV_FB_USED", jobstats="nvidia_gpu_memory_used_bytes", jobstats_scale=MIB,
            feeds=("hbm_peak_mib", "hbm_peak_frac", "hbm_max_mib", "hbm_peak_ms", "hbm_growth_mib_h",
                   "is_preallocated")),
    Counter("hbm_total_mib", "MiB", "device memory, used and free", 1, 1 << 20,
            "DCGM_FI_DEV_FB_FREE", jobstats="nvidia_gpu_memory_total_bytes", jobstats_scale=MIB,
            dcgm_about="device memory not in use"),
    Counter("gr_engine_active_frac", "fraction", "time during which the graphics or compute engine was busy", 0, 1,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE", jobstats="nvidia_gpu_graphics_util_percent"),
    Counter("sm_active_frac", "fraction", "time at least one warp was active, mean over multiprocessors", 0, 1,
            "DCGM_FI_PROF_SM_ACTIVE", default_on=False),
    Counter("fp64_active_frac", "fraction", "cycles the FP64 pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP64_ACTIVE", default_on=False,
            feeds=_roofline("fp64", "flops")),
    Counter("fp32_active_frac", "fraction", "cycles the FP32 and integer pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP32_ACTIVE", default_on=False,
            feeds=_roofline("fp32", "flops")),
    Counter("fp16_active_frac", "fraction", "cycles the FP16 pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP16_ACTIVE", default_on=False,
            feeds=_roofline("fp16", "flops")),
    Counter("tensor_active_frac", "fraction", "cycles the tensor pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            feeds=_roofline("tensor", "flops")),
    Counter("dram_active_frac", "fraction", "cycles in which device memory sent or received", 0, 1,
            "DCGM_FI_PROF_DRAM_ACTIVE",
            feeds=("job_class", "hbm_bytes_s", *(name for pipe in _PIPES for name in _roofline(pipe)))),
    Counter("power_w", "W", "power drawn", 0, 2000,
            "DCGM_FI_DEV_POWER_USAGE", jobstats="nvidia_gpu_power_usage_milliwatts", jobstats_scale=1e-3),
    Counter("energy_mj", "mJ", "energy since the driver was loaded (cumulative)", 0, 1e16,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", is_cumulative=True,
            feeds=("energy_j", "energy_power_w", "energy_measured_frac", "energy_resets",
                   "energy_rejected")),
    Counter("temp_c", "degC", "temperature of the GPU", -20, 150,
            "DCGM_FI_DEV_GPU_TEMP", jobstats="nvidia_gpu_temperature_celsius",
            feeds=("max_temp_c",)),
    Counter("nvlink_tx_bytes_s", "bytes/s", "sent over NVLink", 0, 2e12,
            "DCGM_FI_PROF_NVLINK_TX_BYTES", default_on=False,
            feeds=("nvlink_bytes",)),
    Counter("nvlink_rx_bytes_s", "bytes/s", "received over NVLink", 0, 2e12,
            "DCGM_FI_PROF_NVLINK_RX_BYTES", default_on=False,
            feeds=("nvlink_bytes",)),
    Counter("pcie_tx_bytes_s", "bytes/s", "sent over PCIe", 0, 2e11,
            "DCGM_FI_PROF_PCIE_TX_BYTES",
            feeds=("pcie_bytes",)),
    Counter("pcie_rx_bytes_s", "bytes/s", "received over PCIe", 0, 2e11,
            "DCGM_FI_PROF_PCIE_RX_BYTES",
            feeds=("pcie_bytes",)),
)  # fmt: skip

COUNTER_COLUMNS: tuple[str, ...] = tuple(counter.column for counter in COUNTERS)
