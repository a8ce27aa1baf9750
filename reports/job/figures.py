"""The figures of a report as texts, and how they compare with other jobs of the site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from almanac.units import counted, format_count, format_duration, format_gib, format_number, printable
from reports.job.context import JobContext
from reports.job.facts import gpus_named, percent
from reports.job.headline_words import busy_pct
from reports.job.host_figures import host_texts
from reports.job.ranks import rank_text


@dataclass(frozen=True)
class FigureRow:
    """A line of the table. about: what the figure means, or how it compares with other jobs; may be empty."""

    name: str
    value: str
    about: str = ""


NOT_KNOWN = "not known"


def figure_rows(context: JobContext) -> list[FigureRow]:
    """Time, GPU-hours, energy, utilization, memory, and imbalance; NOT_KNOWN if a figure is missing."""
    if context.job["start_s"] is None:
        limit_s = context.job["time_limit_s"]
        return [FigureRow("Requested", _gpus(context), f"for {format_duration(limit_s)}" if limit_s else "")]
    return [*_size_rows(context), *_use_rows(context)]


def _size_rows(context: JobContext) -> Iterator[FigureRow]:
    limit_s, elapsed_s = context.job["time_limit_s"], context.elapsed_s
    limit = f"{format_duration(limit_s)} requested" if limit_s else ""
    yield FigureRow("Run time", NOT_KNOWN if elapsed_s is None else format_duration(elapsed_s), limit)
    gpus = _gpus(context)
    nodes = context.job["node_count"]
    if context.unasked_gpus:
        gpus += f" ({gpus_named(context.gpu_count - context.unasked_gpus)} requested)"
    where = f"{gpus} on {format_count(nodes)} node{'s' * (nodes != 1)}" if nodes else gpus
    model = printable(context.metrics.get("gpu_model") or "", 40)
    hours = context.gpu_hours
    yield FigureRow(
        "GPU-hours", NOT_KNOWN if hours is None else real_text(hours), f"{where}, {model}" if model else where
    )
    if context.is_mig:
        yield _slice_row(context)
    energy_j = context.metrics.get("energy_j")
    energy = NOT_KNOWN if energy_j is None else f"{real_text(energy_j / 3.6e6)} kWh"
    power_w = context.metrics.get("energy_power_w")
    yield FigureRow("GPU energy", energy, "" if power_w is None else f"{power_w:.0f} W per GPU on average")


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
    yield _memory_row(context)
    yield from (FigureRow(*texts) for texts in host_texts(context))
    spatial, temporal = metrics.get("spatial_imbalance"), metrics.get("temporal_imbalance")
    if context.gpu_count > 1:
        about = rank_text(ranks, "spatial_imbalance")
        yield FigureRow("Imbalance between GPUs", _imbalance(spatial, "even"), about)
    about = rank_text(ranks, "temporal_imbalance")
    yield FigureRow("Imbalance over time", _imbalance(temporal, "steady"), about)
    coverage = metrics.get("coverage_frac")
    if coverage is not None and coverage < 0.95:
        yield FigureRow("Measured", f"{percent(coverage)} of the run time", "the rest is missing, not idle")


def _gpus(context: JobContext) -> str:
    return counted(context.gpu_count, "MIG slice" if context.is_mig else "GPU")


def _memory_row(context: JobContext) -> FigureRow:
    metrics = context.metrics
    peak_mib = metrics.get("hbm_peak_mib") or metrics.get("hbm_max_mib")
    capacity_mib = metrics.get("hbm_capacity_mib")
    if peak_mib is None:
        return FigureRow("Peak GPU memory", NOT_KNOWN)
    if metrics.get("is_preallocated"):
        about = "reserved by your framework, which hides the real use"
        return FigureRow("Peak GPU memory", format_gib(peak_mib), about)
    of = f" of {format_gib(capacity_mib)}" if capacity_mib else ""
    about = rank_text(context.ranks, "hbm_peak_frac")
    about = "so far: it can still rise" if context.is_live else about
    return FigureRow("Peak GPU memory", f"{format_gib(peak_mib)}{of}", about)


def _imbalance(value: float | None, best: str) -> str:
    return NOT_KNOWN if value is None else f"{value:.2f} (0 is {best})"


def real_text(value: float) -> str:
    """A number with three significant digits; a whole number from 100 on."""
    return format_number(value, 3)


def heading_rows(context: JobContext) -> list[FigureRow]:
    """Which job it was: id, name, how it ended, and where it ran."""
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
