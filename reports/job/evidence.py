"""The evidence of a job's report, and its figures as texts, compared with other jobs of the site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from advisor.health.checkpoints import CheckpointAdvice
from almanac.hardware import shares_host_memory
from almanac.units import (
    counted,
    format_count,
    format_duration,
    format_gib,
    format_job_id,
    format_moment,
    format_number,
    printable,
)
from reports.job.job_report import FigureRow, GpuRow, GpuSeries, JobRow, MetricsRow, Rank
from reports.job.mfu import MfuFall, mfu_rows
from reports.job.rules import Fact, SiteChoices
from reports.job.slice_energy import energy_row
from telemetry.metrics.data_quality import NOT_SUMMARISED, OK

if TYPE_CHECKING:
    from advisor.packing.decide import PackingAdvice
    from almanac.config import Tier
    from almanac.records import Advice, HostOption

Ranked = Literal["spatial_imbalance", "temporal_imbalance", "mean_gpu_util_pct", "hbm_peak_frac", "energy_j"]
NOT_KNOWN = "not known"
_SOURCES = {"sacct": "Slurm's accounting", "jobstats": "jobstats"}


@dataclass(frozen=True)
class JobContext:
    """One job. job: its last run in the table jobs. metrics: its row of job_metrics; {} if it has none.

    gpus: its rows of gpu_metrics, sorted by host, gpu, and mig. series: None without samples. ranks: by column of
    job_metrics. advice: what `almanac advise` would say now about the same submission; None if the job never started,
    if it was packed, or if other jobs were not read. earlier_runs: earlier rows of the same job id, oldest first, from
    requeues. site: what the site adds to the report.
    is_live: the job still runs, and the figures are those so far. packing: which jobs like this one can share a GPU;
    None: none, or not known. host: options on host memory and CPUs to change. source: "sacct" or "jobstats" if only it
    has figures of the GPUs. mfu_fall: None without one. checkpoints: None for a job that seldom meets a failure.
    """

    cluster: str
    now_s: int
    job: JobRow
    tiers: tuple[Tier, ...]
    metrics: MetricsRow = field(default_factory=MetricsRow)
    gpus: tuple[GpuRow, ...] = ()
    series: GpuSeries | None = None
    ranks: Mapping[str, Rank] = field(default_factory=dict)
    advice: Advice | None = None
    earlier_runs: tuple[JobRow, ...] = ()
    site: SiteChoices = field(default_factory=SiteChoices)
    is_live: bool = False
    packing: PackingAdvice | None = None
    host: tuple[HostOption, ...] = ()
    mfu_fall: MfuFall | None = None
    checkpoints: CheckpointAdvice | None = None
    source: str = ""

    @property
    def job_id(self) -> int:
        return int(self.job["job_id"])

    @property
    def shown_id(self) -> str:
        return format_job_id(self.job)

    @property
    def user(self) -> str:
        return self.job["user"] or ""

    @property
    def is_array(self) -> bool:
        """True for a task of a job array."""
        return self.job["array_job_id"] is not None

    @property
    def data_quality(self) -> str:
        """The column `verdict` of job_metrics, which says whether the job's data can be used, or NOT_SUMMARISED."""
        return self.metrics.get("verdict") or NOT_SUMMARISED

    @property
    def gpu_count(self) -> int:
        """Allocated GPUs; requested GPUs if the job never started, or if its allocation is not known."""
        given = self.job["gpu_count"]
        return (
            given if given is not None and self.job["start_s"] is not None else given or self.job["gpu_count_req"] or 0
        )

    @property
    def unasked_gpus(self) -> int | None:
        """Allocated GPUs that the job did not ask for; None if that is not known."""
        return unasked_gpus(
            *(self.job[name] for name in ("gpu_count", "gpu_count_req", "node_count", "node_count_req"))
        )

    @property
    def elapsed_s(self) -> int | None:
        start_s, end_s = self.job["start_s"], self.job["end_s"]
        known: int | None = self.job["elapsed_s"]
        return end_s - start_s if known is None and start_s is not None and end_s is not None else known

    @property
    def gpu_hours(self) -> float | None:
        return None if self.elapsed_s is None else self.gpu_count * self.elapsed_s / 3600

    @property
    def is_cpu_only(self) -> bool:
        """True for a job that neither asked for a GPU nor got one, nor a part of one."""
        known = [count for name in ("gpu_count", "gpu_count_req") if (count := self.job[name]) is not None]
        return bool(known) and not any(known) and not self.job["gpu_share_count"]

    @property
    def is_whole_node(self) -> bool:
        """True for a job that got far more CPUs than it asked for, as with --exclusive: its options freed nothing.

        Slurm rounds a request up to whole cores of two hardware threads.
        """
        asked, given = self.job["cpu_count_req"], self.job["cpu_count"]
        return bool(asked and given and given > 2 * asked)

    def host_option(self, resource: str) -> HostOption | None:
        """The option to change for a resource, "memory" or "cpus"."""
        return next((each for each in self.host if each.resource == resource and not self.is_whole_node), None)

    @property
    def queue_wait_s(self) -> int | None:
        """Seconds from when it could start to its start; None if it has not started."""
        start_s = self.job["start_s"]
        return None if start_s is None else max(start_s - (self.job["eligible_s"] or self.job["submit_s"]), 0)

    @property
    def cpu_efficiency(self) -> float | None:
        """The share of its CPUs' time that the job used; above 1 where Slurm does not confine jobs to their CPUs."""
        cpu_s, cpus, elapsed_s = self.job["cpu_time_s"], self.job["cpu_count"], self.elapsed_s
        return None if cpu_s is None or not cpus or not elapsed_s else cpu_s / (cpus * elapsed_s)

    @property
    def is_mig(self) -> bool:
        """True if the job had parts of GPUs. The peaks and the memory of a whole GPU do not apply to it then."""
        return bool(self.metrics.get("mig_profile")) or any(row["mig"] for row in self.gpus)


def figure_rows(context: JobContext) -> list[FigureRow]:
    """Request, wait, time, and the use of GPUs, CPUs, and host memory; NOT_KNOWN if a figure is missing.

    A job without GPUs has no row about them.
    """
    if context.job["start_s"] is None:
        return list(_request_rows(context))
    gpus = () if context.is_cpu_only else (*_size_rows(context), *_use_rows(context))
    host = [FigureRow(*texts) for texts in host_texts(context)]
    if context.is_cpu_only and not host:
        host = [FigureRow("CPU efficiency", NOT_KNOWN, "Slurm's accounting has no CPU time of it")]
    return [*_request_rows(context), *_time_rows(context), *gpus, *host, *_coverage_rows(context)]


def _request_rows(context: JobContext) -> Iterator[FigureRow]:
    """Return what the submission asked for, as far as accounting has it, and who pays for it."""
    job = context.job
    nodes, cpus = job["node_count_req"] or job["node_count"], job["cpu_count_req"] or job["cpu_count"]
    gpus = context.gpu_count or None if job["gpu_count_req"] is None else job["gpu_count_req"]
    noun = "MIG slice" if context.is_mig else "GPU"
    whole = counted(gpus, noun) if gpus else _parts(context) or "no GPU"
    asked = [whole] if gpus is not None and not context.is_cpu_only else []
    asked += [counted(cpus, "CPU")] if cpus else []
    limit_s = job["time_limit_s"]
    about = [counted(nodes, "node")] if nodes else []
    about += [f"for {format_duration(limit_s)}"] if limit_s else []
    about += [f"constraint {printable(job['constraints'], 60)}"] if job["constraints"] else []
    yield FigureRow("Requested", ", ".join(asked) or NOT_KNOWN, ", ".join(about))
    if job["account"] or job["qos"]:
        qos = f"QOS {printable(job['qos'], 40)}" if job["qos"] else ""
        yield FigureRow("Account", printable(job["account"] or NOT_KNOWN, 40), qos)


def _time_rows(context: JobContext) -> Iterator[FigureRow]:
    job, wait_s, elapsed_s = context.job, context.queue_wait_s, context.elapsed_s
    if wait_s is not None:
        before_s = (job["eligible_s"] or 0) - job["submit_s"]
        held = f"; before, {format_duration(before_s)} not eligible to start" if before_s >= 60 else ""
        yield FigureRow("Queue wait", format_duration(wait_s), f"started {format_moment(job['start_s'] or 0)}{held}")
    limit_s = job["time_limit_s"]
    limit = f"{format_duration(limit_s)} requested" if limit_s else ""
    yield FigureRow("Run time", NOT_KNOWN if elapsed_s is None else format_duration(elapsed_s), limit)


def _size_rows(context: JobContext) -> Iterator[FigureRow]:
    gpus = _parts(context) or counted(context.gpu_count, "MIG slice" if context.is_mig else "GPU")
    nodes = context.job["node_count"]
    if context.unasked_gpus:
        gpus += f" ({gpus_named(context.gpu_count - context.unasked_gpus)} requested)"
    where = f"{gpus} on {format_count(nodes)} node{'s' * (nodes != 1)}" if nodes else gpus
    model = printable(context.metrics.get("gpu_model") or "", 40)
    hours = None if _parts(context) else context.gpu_hours
    yield FigureRow(
        "GPU-hours", NOT_KNOWN if hours is None else real_text(hours), f"{where}, {model}" if model else where
    )
    if context.is_mig:
        yield _slice_row(context)
    yield energy_row(context.metrics) or FigureRow("GPU energy", NOT_KNOWN)


def _parts(context: JobContext) -> str:
    """ "2 parts of a GPU" for a job with shards; "" for any other."""
    parts = None if context.gpu_count else context.job["gpu_share_count"]
    return f"{counted(parts, 'part')} of a GPU" if parts else ""


def _slice_row(context: JobContext) -> FigureRow:
    """The MIG slices that the job ran on, with the memory that they really have: "1g.10gb, 9.5 GiB"."""
    rows = [row for row in context.gpus if row["mig"]]
    texts = dict.fromkeys(slice_text(row.get("mig_profile"), row.get("hbm_capacity_mib")) for row in rows)
    if not texts:
        texts = {slice_text(context.metrics.get("mig_profile"), context.metrics.get("hbm_capacity_mib")): None}
    return FigureRow("MIG slice" if len(rows) < 2 else "MIG slices", "; ".join(texts))


def slice_text(profile: str | None, capacity_mib: float | None) -> str:
    """Profile and real capacity of a slice: "1g.10gb, 9.5 GiB"; what is not known is said."""
    memory = "memory not measured" if capacity_mib is None else format_gib(capacity_mib)
    return f"{printable(profile, 40) if profile else 'profile not known'}, {memory}"


def _use_rows(context: JobContext) -> Iterator[FigureRow]:
    metrics, ranks = context.metrics, context.ranks
    util_pct = metrics.get("mean_gpu_util_pct") if context.is_mig else busy_pct(metrics)
    util = NOT_KNOWN if util_pct is None else f"{util_pct:.0f}%"
    if context.is_mig and util_pct is not None:
        yield FigureRow("GPU activity", util, "mean of its MIG slices")
    else:
        yield FigureRow("GPU utilization", util, rank_text(ranks, "mean_gpu_util_pct"))
    yield from mfu_rows(metrics, context.mfu_fall) if context.data_quality == OK else ()
    yield _memory_row(context)
    spatial, temporal = metrics.get("spatial_imbalance"), metrics.get("temporal_imbalance")
    if context.gpu_count > 1:
        about = rank_text(ranks, "spatial_imbalance")
        yield FigureRow("Imbalance between GPUs", _imbalance(spatial, "even"), about)
    about = rank_text(ranks, "temporal_imbalance")
    yield FigureRow("Imbalance over time", _imbalance(temporal, "steady"), about)


def _coverage_rows(context: JobContext) -> Iterator[FigureRow]:
    coverage = context.metrics.get("coverage_frac")
    if source := _SOURCES.get(context.source):
        yield FigureRow("GPUs measured", f"only by {source}", "no imbalance, no roofline")
    elif coverage is not None and coverage < 0.95:
        yield FigureRow("GPUs measured", f"{percent(coverage)} of the run time", "the rest is missing, not idle")


def _memory_row(context: JobContext) -> FigureRow:
    metrics = context.metrics
    peak_mib = metrics.get("hbm_peak_mib") or metrics.get("hbm_max_mib")
    capacity_mib = metrics.get("hbm_capacity_mib")
    least_mib, most_mib = context.job["sacct_hbm_least_mib"], context.job["sacct_hbm_peak_mib"]
    least = format_gib(least_mib) if least_mib is not None and most_mib is not None and least_mib < most_mib else ""
    if peak_mib is None and least:
        about = "of the busiest GPU: Slurm records the sum of all GPUs of a task"
        return FigureRow("Peak GPU memory", f"at least {least}", about)
    if peak_mib is None:
        return FigureRow("Peak GPU memory", NOT_KNOWN)
    if metrics.get("is_preallocated"):
        about = "reserved by your framework, which hides the real use"
        return FigureRow("Peak GPU memory", format_gib(peak_mib), about)
    of = f" of {format_gib(capacity_mib)}" if capacity_mib else ""
    about = rank_text(context.ranks, "hbm_peak_frac")
    about = "the host may use a part of it" if shares_host_memory(metrics.get("gpu_model")) else about
    about = "so far: it can still rise" if context.is_live else about
    if context.source == "sacct" and least:
        return FigureRow("Peak GPU memory", f"at most {format_gib(peak_mib)}{of}", f"at least {least}")
    return FigureRow("Peak GPU memory", f"{format_gib(peak_mib)}{of}", about)


def _imbalance(value: float | None, best: str) -> str:
    return NOT_KNOWN if value is None else f"{value:.2f} (0 is {best})"


def real_text(value: float) -> str:
    """A number with three significant digits; a whole number from 100 on."""
    return format_number(value, 3)


def heading_rows(context: JobContext) -> list[FigureRow]:
    """Return the rows that identify the job: id, name, how it ended, and on which nodes."""
    job = context.job
    rows = [
        FigureRow("Job", context.shown_id),
        FigureRow("Name", printable(job["name"] or NOT_KNOWN)),
        FigureRow("State", printable(job["state"] or NOT_KNOWN, 40), _restarts(context)),
        FigureRow("Partition", printable(job["partition"] or NOT_KNOWN, 60)),
    ]
    if job["node_list"]:
        rows.append(FigureRow("Nodes", printable(job["node_list"], 120)))
    return rows


def _restarts(context: JobContext) -> str:
    earlier = len(context.earlier_runs) or context.job["restarts"] or 0
    if not earlier:
        return ""
    return f"requeued {format_count(earlier)} time{'s' * (earlier != 1)}; last run shown"


ONE_TASK_SHARE = 0.9
"""A task with so much of its job's memory is named as the job: the rest is the batch script's shell."""


def host_texts(context: JobContext) -> Iterator[tuple[str, str, str]]:
    """Name, value, and meaning of each line; no line for what Slurm's accounting did not gather."""
    efficiency, cpus = context.cpu_efficiency, context.job["cpu_count"]
    if efficiency is not None and cpus:
        asked = context.job["cpu_count_req"]
        unasked = f"; {format_count(asked)} requested" if asked and asked < cpus else ""
        about = f"{busy_cpus_text(efficiency * cpus)} of {counted(cpus, 'CPU')} busy on average{unasked}"
        yield "CPU efficiency", percent(efficiency), about
    peak_mib, task_mib = context.job["host_mem_peak_mib"], context.job["host_mem_task_peak_mib"]
    if peak_mib is not None:
        alloc_mib = context.job["host_mem_alloc_mib"]
        share = percent(peak_mib / alloc_mib) if alloc_mib else ""
        is_one_task = task_mib is None or task_mib >= ONE_TASK_SHARE * peak_mib
        if is_one_task:
            about = f"{share} of what the job was given" if share else ""
        else:
            about = f"{f'{share} ' if share else ''}at most; the largest task used {_gib(task_mib or 0)}"
        yield "Host memory", f"{_gib(peak_mib)}{f' of {_gib(alloc_mib)}' if alloc_mib else ''}", about


def busy_cpus_text(cpus: float) -> str:
    """ "0.35", "3.5", or "128" CPUs; "less than 0.01" of one, and "none"."""
    if cpus < 0.01:
        return "less than 0.01" if cpus > 0 else "none"
    return f"{cpus:.2g}" if cpus < 10 else f"{cpus:,.0f}"


def _gib(mib: float) -> str:
    """As on GPUs; without decimals from 100 GiB on."""
    return format_gib(mib) if mib < 100 * 1024 else f"{mib / 1024:,.0f} GiB"


_PHRASES: Mapping[Ranked, tuple[str, str]] = {
    "mean_gpu_util_pct": ("use their GPUs less", "use their GPUs more"),
    "hbm_peak_frac": ("use a smaller share", "use a larger share"),
    "spatial_imbalance": ("are more even", "are less even"),
    "temporal_imbalance": ("are steadier", "are less steady"),
}
"""Phrases for jobs with a lower and with a higher figure."""


def rank_text(ranks: Mapping[str, Rank], name: Ranked) -> str:
    """ "70% of 3,340 jobs here use their GPUs more": the larger side; "" without a rank."""
    rank = ranks.get(name)
    if rank is None:
        return ""
    share, side = max((rank.below, 0), (rank.above, 1))
    if share < 0.5:
        return f"in the middle of {format_count(rank.jobs)} jobs here"
    shown = "more than 99%" if share > 0.99 else f"{share:.0%}"  # the job itself is one of them: never all
    return f"{shown} of {format_count(rank.jobs)} jobs here {_PHRASES[name][side]}"


def unasked_gpus(
    given: int | None, asked: int | None, nodes: int | None = None, nodes_asked: int | None = None
) -> int | None:
    """Return the GPUs given and not asked for; None if the job has none, or if it is not known what it asked for.

    A job that got more nodes than the fewest it asked for gets the GPUs that it asked for on each of them.
    """
    if not given or asked is None:
        return None
    more_nodes = max(nodes / nodes_asked, 1) if nodes and nodes_asked else 1
    return max(given - math.ceil(asked * more_nodes), 0)


def busy_pct(row: GpuRow | MetricsRow) -> float | None:
    """Mean utilization of a GPU or a job in percent; without it, the graphics engine's, but not on MIG."""
    util_pct, engine = row.get("mean_gpu_util_pct"), row.get("mean_gr_engine_active_frac")
    if util_pct is not None or row.get("mig") or row.get("mig_profile"):
        return util_pct
    return None if engine is None else 100 * engine


def percent(value: Fact) -> str:
    """A share as "12%"; a small share above zero as "less than 1%"; "" if it is not known."""
    if not isinstance(value, int | float) or math.isnan(value):
        return ""
    return "less than 1%" if 0 < value < 0.005 else f"{100 * value:.0f}%"


def gpus_named(number: Fact) -> str:
    """ "no GPU", "1 GPU", or "4 GPUs"; "" if it is not known."""
    return "no GPU" if number == 0 else counted(number, "GPU") if isinstance(number, int) else ""
