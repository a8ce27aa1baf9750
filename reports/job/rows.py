"""The rows of the store that reports read, with every column, so that mypy finds a misspelled one.

A test compares them with the tables. docs/tables.md says what each column means. Missing values are None.
"""

from __future__ import annotations

from typing import TypedDict


class JobRow(TypedDict):
    """A row of the table jobs."""

    job_id: int
    submit_s: int
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    het_offset: int | None
    user: str | None
    account: str | None
    partition: str | None
    partition_req: str | None
    qos: str | None
    name: str | None
    name_key: str | None
    script_key: str | None
    refuses_mail: bool | None
    is_packed: bool | None
    state: str | None
    eligible_s: int | None
    start_s: int | None
    end_s: int | None
    elapsed_s: int | None
    time_limit_s: int | None
    node_count: int | None
    node_list: str | None
    cpu_count: int | None
    gpu_count: int | None
    gpu_count_req: int | None
    gpu_share_count: int | None
    cpu_count_req: int | None
    node_count_req: int | None
    gpu_type: str | None
    gpu_type_req: str | None
    constraints: str | None
    tier: str | None
    exit_code: int | None
    exit_signal: int | None
    restarts: int | None
    jobstats_hbm_peak_mib: float | None
    jobstats_hbm_total_mib: float | None
    jobstats_gpu_util_pct: float | None
    used_mem_mib: float | None
    cpu_time_s: float | None
    host_mem_alloc_mib: float | None
    host_mem_peak_mib: float | None
    host_mem_task_peak_mib: float | None


class _MeasuredRow(TypedDict, total=False):
    """Columns of both job_metrics and gpu_metrics."""

    job_id: int
    submit_s: int
    samples: int | None
    expected_samples: float | None
    coverage_frac: float | None
    gpu_model: str | None
    mig_profile: str | None
    hbm_capacity_mib: float | None
    hbm_peak_mib: float | None
    hbm_peak_frac: float | None
    hbm_peak_ms: int | None
    hbm_growth_mib_h: float | None
    is_preallocated: bool | None
    mean_gpu_util_pct: float | None
    mean_hbm_used_mib: float | None
    mean_gr_engine_active_frac: float | None
    mean_sm_active_frac: float | None
    mean_fp64_active_frac: float | None
    mean_fp32_active_frac: float | None
    mean_fp16_active_frac: float | None
    mean_tensor_active_frac: float | None
    mean_dram_active_frac: float | None
    mean_power_w: float | None
    mean_temp_c: float | None
    mean_nvlink_tx_bytes_s: float | None
    mean_nvlink_rx_bytes_s: float | None
    mean_pcie_tx_bytes_s: float | None
    mean_pcie_rx_bytes_s: float | None
    temporal_imbalance: float | None
    energy_j: float | None
    energy_power_w: float | None
    energy_measured_frac: float | None
    energy_resets: int | None
    energy_rejected: int | None
    max_temp_c: float | None
    has_profiling_fault: bool | None


class MetricsRow(_MeasuredRow, total=False):
    """A row of the table job_metrics; empty for a job without metrics."""

    verdict: str
    reasons: list[str] | None
    attributed_by: str | None
    gpus_seen: int | None
    hbm_max_mib: float | None
    coverage_gpu_util_pct: float | None
    coverage_hbm_used_mib: float | None
    coverage_gr_engine_active_frac: float | None
    coverage_sm_active_frac: float | None
    coverage_fp64_active_frac: float | None
    coverage_fp32_active_frac: float | None
    coverage_fp16_active_frac: float | None
    coverage_tensor_active_frac: float | None
    coverage_dram_active_frac: float | None
    coverage_power_w: float | None
    coverage_temp_c: float | None
    coverage_nvlink_tx_bytes_s: float | None
    coverage_nvlink_rx_bytes_s: float | None
    coverage_pcie_tx_bytes_s: float | None
    coverage_pcie_rx_bytes_s: float | None
    coverage_energy: float | None
    spatial_imbalance: float | None
    spatial_windows: int | None
    idle_gpus: list[str] | None
    pipes_used: list[str] | None
    main_pipe: str | None
    job_class: str | None
    class_fp64: str | None
    compute_frac_fp64: float | None
    compute_sample_frac_fp64: float | None
    placed_samples_fp64: int | None
    flops_fp64: float | None
    intensity_fp64: float | None
    intensity_bins_fp64: list[int] | None
    class_fp32: str | None
    compute_frac_fp32: float | None
    compute_sample_frac_fp32: float | None
    placed_samples_fp32: int | None
    flops_fp32: float | None
    intensity_fp32: float | None
    intensity_bins_fp32: list[int] | None
    class_fp16: str | None
    compute_frac_fp16: float | None
    compute_sample_frac_fp16: float | None
    placed_samples_fp16: int | None
    flops_fp16: float | None
    intensity_fp16: float | None
    intensity_bins_fp16: list[int] | None
    class_tensor: str | None
    compute_frac_tensor: float | None
    compute_sample_frac_tensor: float | None
    placed_samples_tensor: int | None
    flops_tensor: float | None
    intensity_tensor: float | None
    intensity_bins_tensor: list[int] | None
    hbm_bytes_s: float | None
    nvlink_bytes: float | None
    pcie_bytes: float | None


class GpuRow(_MeasuredRow):
    """A row of the table gpu_metrics."""

    host: str
    gpu: int
    mig: str
    is_idle: bool | None
