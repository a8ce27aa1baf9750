"""The rows of the store that job reports read, as types, so that mypy finds a misspelt column.

They name only the columns that reports use. docs/tables.md says what each column means.
"""

from __future__ import annotations

from typing import TypedDict


class JobRow(TypedDict):
    """A row of the table jobs, with None for missing values."""

    job_id: int
    submit_s: int
    array_job_id: int | None
    array_task_id: int | None
    user: str | None
    name: str | None
    state: str | None
    partition: str | None
    start_s: int | None
    end_s: int | None
    elapsed_s: int | None
    time_limit_s: int | None
    node_count: int | None
    node_list: str | None
    gpu_count: int | None
    gpu_count_req: int | None
    exit_code: int | None
    exit_signal: int | None
    restarts: int | None


class MetricsRow(TypedDict, total=False):
    """A row of the table job_metrics, with None for missing values; empty for a job without metrics."""

    verdict: str | None
    attributed_by: str | None
    gpus_seen: int | None
    coverage_frac: float | None
    gpu_model: str | None
    hbm_capacity_mib: float | None
    hbm_peak_mib: float | None
    hbm_peak_frac: float | None
    hbm_max_mib: float | None
    is_preallocated: bool | None
    mean_gpu_util_pct: float | None
    mean_gr_engine_active_frac: float | None
    mean_tensor_active_frac: float | None
    mean_dram_active_frac: float | None
    spatial_imbalance: float | None
    temporal_imbalance: float | None
    energy_j: float | None
    energy_power_w: float | None
    has_profiling_fault: bool | None
    idle_gpus: list[str] | None
    pipes_used: list[str] | None
    main_pipe: str | None
    job_class: str | None


class GpuRow(TypedDict):
    """A row of the table gpu_metrics, with None for missing values."""

    host: str
    gpu: int
    mig: str
    expected_samples: float | None
    mean_gpu_util_pct: float | None
