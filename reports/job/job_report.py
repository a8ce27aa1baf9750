"""A job's report as one value: the terminal, pages, mails, `--json`, and the published copy are forms of it.

Rows are of the store's tables; docs/tables.md describes their columns. Missing values are None. Nothing here needs a
library, so that the client package reads published reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from almanac.units import printable

MAX_NAME = 40


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
    framework: str | None
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
    failed_node: str | None
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
    sacct_hbm_peak_mib: float | None
    sacct_hbm_least_mib: float | None
    sacct_gpu_util_pct: float | None
    gpu_memory_mib: float | None
    used_mem_mib: float | None
    cpu_time_s: float | None
    host_mem_alloc_mib: float | None
    host_mem_peak_mib: float | None
    host_mem_task_peak_mib: float | None
    node_cpu_count: int | None
    node_gpu_count: int | None
    node_memory_mib: int | None
    node_threads: int | None


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
    mean_sm_clock_mhz: float | None
    temporal_imbalance: float | None
    energy_j: float | None
    energy_power_w: float | None
    has_profiling_fault: bool | None


class MetricsRow(_MeasuredRow, total=False):
    """A row of the table job_metrics; empty for a job without metrics. Only jobs on MIG slices have the estimates."""

    verdict: str
    attributed_by: str | None
    gpus_seen: int | None
    hbm_max_mib: float | None
    coverage_sm_active_frac: float | None
    coverage_dram_active_frac: float | None
    spatial_imbalance: float | None
    idle_gpus: list[str] | None
    gpu_errors: list[str] | None
    pipes_used: list[str] | None
    main_pipe: str | None
    mfu_frac: float | None
    power_estimate_w: float
    energy_estimate_j: float
    job_class: str | None
    intensity_fp64: float | None


class GpuRow(_MeasuredRow):
    """A row of the table gpu_metrics."""

    host: str
    gpu: int
    mig: str
    is_idle: bool | None


@dataclass(frozen=True)
class Suggestion:
    """A suggestion for the next job (advice) and why (reason), as plain text without control characters.

    rule: the name of the rule that says it.
    """

    rule: str
    advice: str
    reason: str


@dataclass(frozen=True)
class ChartFinding:
    """A section of the report. picture: the name of its chart. alt: what the chart shows, in words."""

    picture: Literal["timeline", "roofline", "memory"]
    title: str
    text: str
    alt: str


@dataclass(frozen=True)
class FigureRow:
    """A line of the table. about: what the figure means, or how it compares with other jobs; may be empty."""

    name: str
    value: str
    about: str = ""


@dataclass(frozen=True)
class Rank:
    """A job's rank. below, above: the shares of the site's jobs with a lower and a higher figure, without equal ones.

    jobs: how many jobs have the figure, with this one.
    """

    below: float
    above: float
    jobs: int


@dataclass(frozen=True)
class ReportLink:
    """A link of the site, filled for this job."""

    name: str
    url: str


@dataclass(frozen=True)
class MemoryLevel:
    """A line of the memory chart: a tier of the site, or the job's own GPU."""

    name: str
    capacity_mib: float


@dataclass(frozen=True)
class GpuSeries:
    """A job's counters over time. units: host:gpu or host:gpu:mig, one for each row.

    bin_s: seconds of a bin. values: by counter, a row of bins for each GPU. A bin has the mean of its samples, or the
    highest sample of hbm_used_mib. gpu_util_pct is the graphics engine's activity where GPU_UTIL is not measured.
    """

    units: tuple[str, ...]
    bin_s: float
    values: Mapping[str, tuple[tuple[float | None, ...], ...]]

    def __post_init__(self) -> None:
        """Raise ValueError for rows that do not fit together."""
        if not self.units or self.bin_s <= 0 or any(len(rows) != len(self.units) for rows in self.values.values()):
            raise ValueError("series: rows do not fit the GPUs")
        if len({len(row) for rows in self.values.values() for row in rows}) > 1:
            raise ValueError("series: rows differ in length")

    @property
    def span_s(self) -> float:
        return self.bin_s * max((len(rows[0]) for rows in self.values.values()), default=0)

    def has(self, counter: str) -> bool:
        return any(value is not None for row in self.values.get(counter, ()) for value in row)


@dataclass(frozen=True)
class JobReport:
    """The content of a report, in whatever form it is shown.

    job: its last run in the table jobs. earlier_runs: those of the same job id before it was requeued. metrics, gpus:
    its rows of job_metrics and gpu_metrics. headline: what happened and what to do, in a few words. verdict: the
    summary. rules: the names of all rules that hold. figures: the table; heading: the rows that identify the job.
    ranks: by column of job_metrics. advice, packing: as JSON of `almanac advise`. still_running: the figures are those
    so far. series: None without samples. A new field needs a default, so that copies of the release before can be read.
    """

    job_id: int
    shown_id: str
    cluster: str
    still_running: bool
    job: JobRow
    earlier_runs: tuple[JobRow, ...]
    headline: str
    verdict: str
    rules: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    findings: tuple[ChartFinding, ...]
    heading: tuple[FigureRow, ...]
    figures: tuple[FigureRow, ...]
    gpu_count: int
    elapsed_s: int | None
    gpu_hours: float | None
    metrics: MetricsRow | None
    gpus: tuple[GpuRow, ...]
    ranks: Mapping[str, Rank]
    advice: Mapping[str, Any] | None
    packing: Mapping[str, Any] | None
    memory_levels: tuple[MemoryLevel, ...]
    links: tuple[ReportLink, ...]
    help_url: str
    series: GpuSeries | None = None

    @property
    def is_mig(self) -> bool:
        """True if the job had parts of GPUs."""
        return bool((self.metrics or {}).get("mig_profile")) or any(row["mig"] for row in self.gpus)

    @property
    def title(self) -> str:
        """The first line: the job's name, what happened, and what to do."""
        name = printable(self.job["name"] or "", MAX_NAME).strip()
        return f"{name or f'Job {self.shown_id}'}: {self.headline}"


def unit_name(host: str, gpu: int, mig: str) -> str:
    """host:gpu, or host:gpu:mig, as in the column idle_gpus."""
    return f"{host}:{gpu}" + (f":{mig}" if mig else "")
