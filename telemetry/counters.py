"""The counters that almanac reads, as data: our column, its unit and limits, and each exporter's name for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """`scale` turns an exporter's value into ours. A sample outside low..high is beyond its physical limit.

    default_on: whether dcgm-exporter's own default CSV switches it on. high_per: "hbm" where the limit is the
    GPU's own capacity.
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


MIB = 1 / 2**20
COUNTERS: tuple[Counter, ...] = (
    Counter("gpu_util_pct", "%", "time during which at least one kernel ran", 0, 100,
            "DCGM_FI_DEV_GPU_UTIL", jobstats="nvidia_gpu_duty_cycle"),
    Counter("hbm_used_mib", "MiB", "device memory in use", 0, 1 << 20,
            "DCGM_FI_DEV_FB_USED", jobstats="nvidia_gpu_memory_used_bytes", jobstats_scale=MIB),
    Counter("hbm_total_mib", "MiB", "device memory, used and free", 1, 1 << 20,
            "DCGM_FI_DEV_FB_FREE", jobstats="nvidia_gpu_memory_total_bytes", jobstats_scale=MIB),
    Counter("gr_engine_active_frac", "fraction", "time during which the graphics or compute engine was busy", 0, 1,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    Counter("sm_active_frac", "fraction", "time at least one warp was active, mean over multiprocessors", 0, 1,
            "DCGM_FI_PROF_SM_ACTIVE", default_on=False),
    Counter("fp64_active_frac", "fraction", "cycles the FP64 pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP64_ACTIVE", default_on=False),
    Counter("fp32_active_frac", "fraction", "cycles the FP32 and integer pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP32_ACTIVE", default_on=False),
    Counter("fp16_active_frac", "fraction", "cycles the FP16 pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_FP16_ACTIVE", default_on=False),
    Counter("tensor_active_frac", "fraction", "cycles the tensor pipe was active", 0, 1,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
    Counter("dram_active_frac", "fraction", "cycles in which device memory sent or received", 0, 1,
            "DCGM_FI_PROF_DRAM_ACTIVE"),
    Counter("power_w", "W", "power drawn", 0, 2000,
            "DCGM_FI_DEV_POWER_USAGE", jobstats="nvidia_gpu_power_usage_milliwatts", jobstats_scale=1e-3),
    Counter("energy_mj", "mJ", "energy since the driver was loaded (cumulative)", 0, 1e16,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"),
    Counter("temp_c", "degC", "temperature of the GPU", -20, 150,
            "DCGM_FI_DEV_GPU_TEMP", jobstats="nvidia_gpu_temperature_celsius"),
    Counter("nvlink_tx_bytes_s", "bytes/s", "sent over NVLink", 0, 2e12,
            "DCGM_FI_PROF_NVLINK_TX_BYTES", default_on=False),
    Counter("nvlink_rx_bytes_s", "bytes/s", "received over NVLink", 0, 2e12,
            "DCGM_FI_PROF_NVLINK_RX_BYTES", default_on=False),
    Counter("pcie_tx_bytes_s", "bytes/s", "sent over PCIe", 0, 2e11,
            "DCGM_FI_PROF_PCIE_TX_BYTES"),
    Counter("pcie_rx_bytes_s", "bytes/s", "received over PCIe", 0, 2e11,
            "DCGM_FI_PROF_PCIE_RX_BYTES"),
)  # fmt: skip

COUNTER_COLUMNS: tuple[str, ...] = tuple(counter.column for counter in COUNTERS)
