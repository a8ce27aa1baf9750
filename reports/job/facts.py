"""The facts of a job that the rules test, and the same facts as words for the rules' texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from advisor.explain import advised_gain, shell_option, short_text
from advisor.packing.text import packing_words
from almanac.config import Tier
from almanac.hardware import NEAR, shares_host_memory
from almanac.names import framework_of
from almanac.records import Advice
from almanac.units import format_count, format_duration, format_gib, printable
from reports.job.evidence import JobContext, Ranked, busy_pct, gpus_named, percent, rank_text
from reports.job.health import health_facts, health_words
from reports.job.host import host_facts, host_words
from reports.job.mfu import pipe_text
from reports.job.rules import CharacterLimits, Fact, RuleSet
from slurm.states import exit_text
from telemetry.metrics.data_quality import IDLE, OK

UNATTRIBUTED = ("shared node", "GPU bound", "GPU shared", "node list")
"""First words of the data quality of jobs whose GPUs are unknown."""
LIMITS_S = [900, 1800, *(3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 36, 48, 72, 96, 120, 168))]
"""Time limits to suggest, in seconds."""
SLICES_APART = 1.2
"""Two sizes of MIG slice differ by more. A tier of one size can be configured with its nominal memory: H200's 1g.18gb
has 16 GiB."""
LIMIT_MARGIN = 1.5
"""A suggested limit is at least this many times the run time."""


@dataclass(frozen=True)
class Facts:
    """The facts about a job that rules compare and texts quote.

    values: facts by name, None if not known. words: texts without control characters, "" if not known. rules: the rules
    of the job's site.
    """

    values: Mapping[str, Fact]
    words: Mapping[str, str]
    rules: RuleSet


def facts_of(context: JobContext) -> Facts:
    """The facts of a job that the rules test, and the same facts as words for their texts."""
    values = {**_outcome(context), **_use(context), **_memory(context), **_time(context), **_kernel(context)}
    values |= host_facts(context) | health_facts(context)
    packing = context.packing
    values["packing_gain"] = packing.gain.low if packing and packing.is_advised and packing.gain else None
    site_rules = context.site.rules
    sentence = character_of(values, site_rules.character)
    values["has_character"] = bool(sentence)
    values["framework"] = context.job["framework"] or framework_of(context.job["name"] or "")
    return Facts(values, _words(context, values, sentence), site_rules)


def _outcome(context: JobContext) -> dict[str, Fact]:
    job, data_quality = context.job, context.data_quality
    return {
        "state": job["state"],
        "has_started": job["start_s"] is not None,
        "has_ended": job["end_s"] is not None,
        "is_live": context.is_live,
        "gpus": None if job["gpu_count"] is None and job["gpu_count_req"] is None else context.gpu_count,
        "is_measurable": bool(job["gpu_count"] or job["gpu_share_count"]) and bool(context.elapsed_s),
        "gpu_shares": job["gpu_share_count"],
        "elapsed_s": context.elapsed_s,
        "verdict": data_quality,
        "is_attributed": not data_quality.startswith(UNATTRIBUTED),
        "coverage": context.metrics.get("coverage_frac"),
        "has_fault": bool(context.metrics.get("has_profiling_fault")),
    }


def _use(context: JobContext) -> dict[str, Fact]:
    metrics = context.metrics
    spatial, temporal = metrics.get("spatial_imbalance"), metrics.get("temporal_imbalance")
    # Short and hardly measured jobs have figures too, but these do not say how the GPUs were used.
    is_judged = context.data_quality in (OK, IDLE)
    is_whole = metrics.get("gpus_seen") == context.gpu_count and temporal is not None and is_judged
    idle = len(metrics.get("idle_gpus") or ()) if is_whole else None
    busy = [pct for row in context.gpus if (pct := busy_pct(row)) is not None]
    unasked = context.unasked_gpus
    return {
        "util_pct": metrics.get("mean_gpu_util_pct") if context.is_mig else busy_pct(metrics),
        "spatial": spatial if is_judged else None,
        "temporal": temporal if is_judged else None,
        "idle_gpus": idle,
        "used_gpus": None if idle is None else context.gpu_count - idle,
        "unasked_gpus": unasked,
        "asked_gpus": None if unasked is None else context.gpu_count - unasked,
        "busiest_pct": max(busy, default=None) if is_whole else None,
    }


def _memory(context: JobContext) -> dict[str, Fact]:
    metrics, tier = context.metrics, context.advice.tier if context.advice else None
    is_own = metrics.get("is_preallocated") is False and not shares_host_memory(metrics.get("gpu_model"))
    return {
        "hbm_peak_mib": metrics.get("hbm_peak_mib") if is_own else None,
        "hbm_share": metrics.get("hbm_peak_frac"),
        "is_preallocated": metrics.get("is_preallocated"),
        "tier_reason": tier.reason if tier else None,
        "tier_option_known": bool(tier and tier.rewrite),
        "has_smaller_tier": bool(_smaller_tier(context)),
        "has_larger_tier": bool(_larger_tier(context)),
    }


def _smaller_tier(context: JobContext) -> Tier | None:
    """The smallest tier that holds the job's peak with 10% to spare, if it is smaller than the GPU used."""
    peak_mib, own_mib = context.metrics.get("hbm_peak_mib"), context.metrics.get("hbm_capacity_mib")
    if peak_mib is None or own_mib is None or context.metrics.get("is_preallocated") is not False:
        return None
    if shares_host_memory(context.metrics.get("gpu_model")):
        return None  # a part of the peak may be the host's
    below_mib = own_mib / _apart(context)
    holding = [tier for tier in context.tiers if 1.1 * peak_mib <= tier.capacity_mib < below_mib]
    return min(holding, key=lambda tier: tier.capacity_mib, default=None)


def _larger_tier(context: JobContext) -> Tier | None:
    """The next tier above the GPU that the job ran on."""
    own_mib = context.metrics.get("hbm_capacity_mib")
    if own_mib is None:
        return None
    larger = [tier for tier in context.tiers if tier.capacity_mib > own_mib * _apart(context)]
    return min(larger, key=lambda tier: tier.capacity_mib, default=None)


def _apart(context: JobContext) -> float:
    """Least ratio of another tier's memory to that of the job's GPU: GPUs have less memory than their names say."""
    return SLICES_APART if context.is_mig else 1 + NEAR


def _time(context: JobContext) -> dict[str, Fact]:
    limit_s, elapsed_s = context.job["time_limit_s"], context.elapsed_s
    next_s = suggested_limit_s(context)
    return {
        "limit_s": limit_s,
        "limit_share": elapsed_s / limit_s if limit_s and elapsed_s is not None else None,
        "limit_next_s": next_s,
        "limit_next_share": next_s / limit_s if limit_s and next_s else None,
    }


def suggested_limit_s(context: JobContext) -> int | None:
    """The shortest of LIMITS_S that holds this run with LIMIT_MARGIN, and a long predicted run; None if none does."""
    if context.elapsed_s is None:
        return None
    duration = context.advice.duration if context.advice else None
    needed_s = max(LIMIT_MARGIN * context.elapsed_s, (duration.high_s or duration.duration_s) if duration else 0.0)
    return next((limit_s for limit_s in LIMITS_S if limit_s >= needed_s), None)


def _kernel(context: JobContext) -> dict[str, Fact]:
    metrics, pipe = context.metrics, context.metrics.get("main_pipe")
    by_pipe: Mapping[str, Any] = metrics
    is_ok = context.data_quality == OK and not metrics.get("has_profiling_fault")
    return {
        "main_pipe": pipe if is_ok else None,
        "job_class": metrics.get("job_class") if is_ok else None,
        "pipe_frac": by_pipe.get(f"mean_{pipe}_active_frac"),
        "compute_frac": by_pipe.get(f"compute_frac_{pipe}"),
        "tensor_frac": metrics.get("mean_tensor_active_frac"),
        "dram_frac": metrics.get("mean_dram_active_frac"),
        "mfu": metrics.get("mfu_frac") if is_ok else None,
        "mfu_fall": context.mfu_fall.share if context.mfu_fall and is_ok else None,
    }


def character_of(values: Mapping[str, Fact], limits: CharacterLimits) -> str:
    """Describe how the job used its GPUs, as far as that is known; "" if nothing is.

    "Your GPUs were busy 90% of the time, mostly moving data (memory-bound, steady, well balanced)"
    """
    parts = []
    if values["job_class"]:
        parts.append(f"{values['job_class']}-bound")
    temporal, spatial = values["temporal"], values["spatial"]
    if isinstance(temporal, int | float):
        steady = temporal <= limits.steady_max
        parts.append("steady" if steady else "in bursts" if temporal >= limits.bursty_min else "fairly steady")
    if isinstance(spatial, int | float) and spatial <= limits.balanced_max:
        parts.append("well balanced")
    return f"{_busy(values)} ({', '.join(parts)})" if parts else ""


def _busy(values: Mapping[str, Fact]) -> str:
    """Describe how busy the GPUs were, in everyday words."""
    util_pct = values["util_pct"]
    own = "Your GPU was" if values["gpus"] == 1 else "Your GPUs were"
    busy = f"{own} busy {util_pct:.0f}% of the time" if isinstance(util_pct, int | float) else f"{own} in use"
    means = {"memory": ", mostly moving data", "compute": ", mostly computing"}
    return busy + means.get(str(values["job_class"]), "")


def _words(context: JobContext, values: Mapping[str, Fact], character: str) -> dict[str, str]:
    metrics, advice = context.metrics, context.advice
    gpus, exits = (
        context.gpu_count or int(bool(context.job["gpu_share_count"])),
        (context.job["exit_code"], context.job["exit_signal"]),
    )
    ended = exit_text(*exits)
    words = {
        **_use_words(context),
        "gpus": format_count(gpus),
        "all_gpus": "Your GPU" if gpus == 1 else "Both of your GPUs" if gpus == 2 else f"All {gpus} of your GPUs",
        "each_gpu": f"{'Your' if gpus == 1 else 'Each'} {'MIG slice' if context.is_mig else 'GPU'}",
        "idle_gpus": _number(values["idle_gpus"], "{:.0f}"),
        "used_gpus": _number(values["used_gpus"], "{:.0f}"),
        "used_named": "1 GPU" if values["used_gpus"] == 1 else _number(values["used_gpus"], "{:.0f} GPUs"),
        "asked_named": gpus_named(values["asked_gpus"]),
        "unasked_named": gpus_named(values["unasked_gpus"]),
        "idle_names": _listed(metrics.get("idle_gpus") or ()),
        "elapsed": _span(context.elapsed_s),
        "limit": _span(values["limit_s"]),
        "of_limit": f" of {_span(limit_s)}" if (limit_s := values["limit_s"]) else "",
        "exit": f" ({ended})" if ended else "",
        "exit_short": exit_text(*exits, is_short=True),
        "coverage": percent(values["coverage"]),
        "util": _number(values["util_pct"], "{:.0f}%"),
        "spatial": _number(values["spatial"], "{:.2f}"),
        "temporal": _number(values["temporal"], "{:.2f}"),
        "hbm_peak": _gib(values["hbm_peak_mib"] or metrics.get("hbm_max_mib")),
        "hbm_reserved": _gib(metrics.get("hbm_max_mib")),
        "hbm_capacity": _gib(metrics.get("hbm_capacity_mib")) or "an unknown amount",
        **headline_words(context, smaller=_smaller_tier(context), larger=_larger_tier(context)),
        "hbm_share": percent(values["hbm_share"]),
        "pipe": pipe_text(metrics.get("main_pipe") if values["main_pipe"] else None),
        "mfu": percent(metrics.get("mfu_frac")),
        "mfu_before": context.mfu_fall.before if context.mfu_fall else "",
        "mfu_runs": str(context.mfu_fall.runs) if context.mfu_fall else "",
        "pipe_active": percent(values["pipe_frac"]),
        "tensor": percent(values["tensor_frac"]),
        "compute_time": percent(values["compute_frac"]),
        "memory_time": percent(None if values["compute_frac"] is None else 1 - float(values["compute_frac"])),
        "character": character,
    }
    words |= host_words(context, values) | health_words(context)
    return words | _advice_words(advice) | packing_words(context.packing, context.is_array)


def _use_words(context: JobContext) -> dict[str, str]:
    """The least and the most busy GPU, and how the job compares with others of its site."""
    means = [
        (row["mean_gpu_util_pct"], f"{row['host']}:{row['gpu']}")
        for row in context.gpus
        if row["mean_gpu_util_pct"] is not None and not row["mig"]
    ]
    return {
        "busy_range": _busy_range(min(means), max(means)) if means else "",
        "spatial_rank": _rank_words(context, "spatial_imbalance"),
        "temporal_rank": _rank_words(context, "temporal_imbalance"),
        "util_rank": _rank_words(context, "mean_gpu_util_pct"),
    }


def _busy_range(low: tuple[float, str], high: tuple[float, str]) -> str:
    """low, high: utilization in percent, and the GPU's name."""
    names = printable(low[1], 80), printable(high[1], 80)
    return f" GPU {names[0]} was busy {low[0]:.0f}% of the time, GPU {names[1]} {high[0]:.0f}%."


def _rank_words(context: JobContext, metric: Ranked) -> str:
    text = rank_text(context.ranks, metric)
    return f"; {text}" if text else ""


def _advice_words(advice: Advice | None) -> dict[str, str]:
    if advice is None:
        return dict.fromkeys(("tier_option", "asked_tier", "evidence", "gain"), "")
    tier = advice.tier
    option = shell_option(tier.rewrite) if tier.rewrite else printable(tier.tier or "")
    return {
        "tier_option": option,
        "asked_tier": printable(tier.requested_tier or "what you asked for", 80),
        "evidence": f"{evidence[0].upper()}{evidence[1:]}" if (evidence := short_text(advice)) else "",
        "gain": f": {gain}" if (gain := advised_gain(advice)) else "",
    }


def _number(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else ""


def _span(seconds: Fact) -> str:
    return format_duration(seconds) if isinstance(seconds, int | float) else "an unknown time"


def _gib(mib: object) -> str:
    return format_gib(mib) if isinstance(mib, int | float) else ""


def _listed(names: list[str] | tuple[str, ...]) -> str:
    """The first four names, and how many more there are."""
    shown = [printable(str(name), 80) for name in names[:4]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown) + more


UNEVEN_PCT = 5.0
"""Two GPUs that differ by less than this have no range of utilization, percentage points."""


def headline_words(context: JobContext, *, smaller: Tier | None, larger: Tier | None) -> dict[str, str]:
    """Words by name, without control characters, "" if not known. smaller, larger: the tiers next to its GPU."""
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


def _busy_span(context: JobContext) -> str:
    """ " (busy 15% to 60%)"; "" if the means of all GPUs are alike, or not all are known."""
    known = [pct for row in context.gpus if (pct := busy_pct(row)) is not None]
    if len(known) < max(context.gpu_count, 2) or max(known) - min(known) < UNEVEN_PCT:
        return ""
    return f" (busy {min(known):.0f}% to {max(known):.0f}%)"
