"""The facts of a job that the rules test, and the same facts as words for the rules' texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from advisor.explain import compared_waits, shell_option, short_text
from almanac.config import Tier
from almanac.hardware import NEAR
from almanac.records import Advice
from almanac.units import counted, format_count, format_duration, format_gib, printable
from reports.job.context import JobContext
from reports.job.headline_words import busy_pct, headline_words
from reports.job.packing import packing_facts, packing_words
from reports.job.ranks import Ranked, rank_text
from reports.job.rules import CharacterLimits, Fact, RuleSet
from telemetry.metrics.data_quality import IDLE, OK

UNATTRIBUTED = ("shared node", "GPU bound", "node list")
"""How the data quality begins if nobody knows which GPUs the job had."""
LIMITS_S = [900, 1800, *(3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 36, 48, 72, 96, 120, 168))]
"""Time limits to suggest, in seconds."""
SLICES_APART = 1.2
"""Two sizes of MIG slice differ by more. A tier of one size can be configured with its nominal memory: H200's 1g.18gb
has 16 GiB."""
LIMIT_MARGIN = 1.5
"""A suggested limit is at least this many times the run time."""


@dataclass(frozen=True)
class Facts:
    """values: the facts, None if not known. words: texts without control characters, "" if not known.

    rules: those of the job's site.
    """

    values: Mapping[str, Fact]
    words: Mapping[str, str]
    rules: RuleSet


def facts_of(context: JobContext) -> Facts:
    """The facts of a job that the rules test, and the same facts as words for their texts."""
    values = {**_outcome(context), **_use(context), **_memory(context), **_time(context), **_kernel(context)}
    values |= packing_facts(context.packing)
    site_rules = context.site.rules
    sentence = character_of(values, site_rules.character)
    values["has_character"] = bool(sentence)
    return Facts(values, _words(context, values, sentence), site_rules)


def _outcome(context: JobContext) -> dict[str, Fact]:
    job, data_quality = context.job, context.data_quality
    return {
        "state": job["state"],
        "has_started": job["start_s"] is not None,
        "has_ended": job["end_s"] is not None,
        "is_live": context.is_live,
        "gpus": None if job["gpu_count"] is None and job["gpu_count_req"] is None else context.gpu_count,
        "is_measurable": bool(job["gpu_count"]) and bool(context.elapsed_s),
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
        "cpu_share": context.cpu_use,
    }


def _memory(context: JobContext) -> dict[str, Fact]:
    metrics, tier = context.metrics, context.advice.tier if context.advice else None
    return {
        "hbm_peak_mib": metrics.get("hbm_peak_mib") if metrics.get("is_preallocated") is False else None,
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
    }


def character_of(values: Mapping[str, Fact], limits: CharacterLimits) -> str:
    """How the job used its GPUs, as far as that is known; "" if nothing is.

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
    """How busy the GPUs were, in everyday words."""
    util_pct = values["util_pct"]
    own = "Your GPU was" if values["gpus"] == 1 else "Your GPUs were"
    busy = f"{own} busy {util_pct:.0f}% of the time" if isinstance(util_pct, int | float) else f"{own} in use"
    means = {"memory": ", mostly moving data", "compute": ", mostly computing"}
    return busy + means.get(str(values["job_class"]), "")


def _words(context: JobContext, values: Mapping[str, Fact], character: str) -> dict[str, str]:
    metrics, advice = context.metrics, context.advice
    gpus, ended = context.gpu_count, _exit(context.job["exit_code"], context.job["exit_signal"])
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
        "limit_option": _limit_option(values["limit_next_s"]),
        "exit": f" ({ended})" if ended else "",
        "exit_short": ended,
        "coverage": percent(values["coverage"]),
        "util": _number(values["util_pct"], "{:.0f}%"),
        "cpu_share": percent(values["cpu_share"]),
        "cpus": counted(context.job["cpu_count"] or 0, "CPU"),
        "spatial": _number(values["spatial"], "{:.2f}"),
        "temporal": _number(values["temporal"], "{:.2f}"),
        "hbm_peak": _gib(values["hbm_peak_mib"] or metrics.get("hbm_max_mib")),
        "hbm_reserved": _gib(metrics.get("hbm_max_mib")),
        "hbm_capacity": _gib(metrics.get("hbm_capacity_mib")) or "an unknown amount",
        **headline_words(context, smaller=_smaller_tier(context), larger=_larger_tier(context)),
        "hbm_share": percent(values["hbm_share"]),
        "pipe": _pipe(values["main_pipe"]),
        "pipe_active": percent(values["pipe_frac"]),
        "tensor": percent(values["tensor_frac"]),
        "compute_time": percent(values["compute_frac"]),
        "memory_time": percent(None if values["compute_frac"] is None else 1 - float(values["compute_frac"])),
        "character": character,
    }
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
        return dict.fromkeys(("tier_option", "asked_tier", "evidence", "waits"), "")
    tier = advice.tier
    option = shell_option(tier.rewrite) if tier.rewrite else printable(tier.tier or "")
    return {
        "tier_option": option,
        "asked_tier": printable(tier.requested_tier or "what you asked for", 80),
        "evidence": f"{evidence[0].upper()}{evidence[1:]}" if (evidence := short_text(advice)) else "",
        "waits": _waits(advice),
    }


def _waits(advice: Advice) -> str:
    """ " (median wait lately: hbm40g 12 min, hbm80g 3 h)"; "" unless both are known and differ enough."""
    waits = [f"{printable(wait.tier)} {format_duration(wait.median_s)}" for wait in compared_waits(advice)]
    return f" (median wait lately: {', '.join(waits)})" if waits else ""


def percent(value: Fact) -> str:
    """A share as "12%"; a small share above zero as "less than 1%"; "" if it is not known."""
    if not isinstance(value, int | float) or math.isnan(value):
        return ""
    return "less than 1%" if 0 < value < 0.005 else f"{100 * value:.0f}%"


def _number(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float | np.number) else ""


def _pipe(name: Fact) -> str:
    """ "FP64 units" or "tensor cores"; "" if it is not known."""
    return "tensor cores" if name == "tensor" else f"{str(name).upper()} units" if name else ""


def gpus_named(number: Fact) -> str:
    """ "no GPU", "1 GPU", or "4 GPUs"; "" if it is not known."""
    return "no GPU" if number == 0 else counted(number, "GPU") if isinstance(number, int) else ""


def _span(seconds: Fact) -> str:
    return format_duration(seconds) if isinstance(seconds, int | float) else "an unknown time"


def _gib(mib: object) -> str:
    return format_gib(mib) if isinstance(mib, int | float) else ""


def _limit_option(limit_s: Fact) -> str:
    if not isinstance(limit_s, int | float):
        return ""
    hours, rest = divmod(int(limit_s), 3600)
    return f"--time={hours:02d}:{rest // 60:02d}:00"


def _exit(code: int | None, signal: int | None) -> str:
    if signal:
        return f"signal {signal}"
    return f"exit code {code}" if code else ""


def _listed(names: list[str] | tuple[str, ...]) -> str:
    """The first four names, and how many more there are."""
    shown = [printable(str(name), 80) for name in names[:4]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown) + more
