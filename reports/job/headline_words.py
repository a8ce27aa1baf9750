"""Short words of a job's figures, for headlines: "40 GB", "peak 26 of 80 GiB", "all 4 GPUs"."""

from __future__ import annotations

from advisor.explain import shell_option
from almanac.config import Tier
from almanac.records import Advice
from almanac.units import format_count, printable
from reports.job.context import JobContext
from reports.job.rows import GpuRow, MetricsRow

UNEVEN_PCT = 5.0
"""Two GPUs that differ by less than this have no range of utilization, percentage points."""


def headline_words(context: JobContext, *, smaller: Tier | None, larger: Tier | None) -> dict[str, str]:
    """Words by name, without control characters, "" if not known. smaller, larger: tiers beside the job's own GPU."""
    advice = context.advice
    advised = next((tier for tier in context.tiers if advice and tier.name == advice.tier.tier), None)
    gpus = context.gpu_count
    return {
        "smaller_tier": _name(smaller),
        "larger_tier": _name(larger),
        "smaller_size": _size(smaller),
        "larger_size": _size(larger),
        "larger_option": _option(larger, advice),
        "tier_size": _size(advised) or printable(advice.tier.tier or "" if advice else "", 40),
        "peak_of": _peak_of(context),
        "its_gpus": "its GPU" if gpus == 1 else "both GPUs" if gpus == 2 else f"all {format_count(gpus)} GPUs",
        "busy_span": _busy_span(context),
    }


def _name(tier: Tier | None) -> str:
    return printable(tier.name, 80) if tier else ""


def _size(tier: Tier | None) -> str:
    """GPUs are sold as 40 GB or 80 GB, and have about so many GiB."""
    return f"{tier.capacity_mib / 1024:.0f} GB" if tier else ""


def _option(tier: Tier | None, advice: Advice | None) -> str:
    """The option that asks for this tier, if the advice knows it; else the tier's name."""
    if tier and advice and advice.tier.tier == tier.name and advice.tier.rewrite:
        return shell_option(advice.tier.rewrite)
    return _name(tier)


def _peak_of(context: JobContext) -> str:
    peak_mib, capacity_mib = context.metrics.get("hbm_peak_mib"), context.metrics.get("hbm_capacity_mib")
    if peak_mib is None:
        return "peak not known"
    of = f" of {_size_text(capacity_mib, context)}" if capacity_mib else ""
    peak = peak_mib / 1024
    return f"peak {peak:.0f}{of} GiB" if 10 <= peak <= 0.9 * (capacity_mib or 0) / 1024 else f"peak {peak:.1f}{of} GiB"


def _size_text(mib: float, context: JobContext) -> str:
    """A capacity in GiB without its unit: "80" of a whole GPU, and "9.5" of a MIG slice."""
    return f"{mib / 1024:.1f}" if context.is_mig else f"{mib / 1024:.0f}"


def busy_pct(row: GpuRow | MetricsRow) -> float | None:
    """Mean utilization of a GPU or a job in percent; without it, the graphics engine's, but not on MIG."""
    util_pct, engine = row.get("mean_gpu_util_pct"), row.get("mean_gr_engine_active_frac")
    if util_pct is not None or row.get("mig") or row.get("mig_profile"):
        return util_pct
    return None if engine is None else 100 * engine


def _busy_span(context: JobContext) -> str:
    """ " (busy 15% to 60%)"; "" if the means of all GPUs are alike, or not all are known."""
    known = [pct for row in context.gpus if (pct := busy_pct(row)) is not None]
    if len(known) < max(context.gpu_count, 2) or max(known) - min(known) < UNEVEN_PCT:
        return ""
    return f" (busy {min(known):.0f}% to {max(known):.0f}%)"
