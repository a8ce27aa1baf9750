"""What the charts of a report show, in a plain sentence each: balance of the GPUs, roofline, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from almanac.units import format_count, format_gib, printable
from reports.job.context import JobContext
from reports.job.facts import Facts
from reports.job.headline_words import UNEVEN_PCT, busy_pct
from reports.job.rules import ALL_IDLE, SOME_IDLE, CharacterLimits
from reports.job.series import unit_name

NAMED = 4
"""A picture's text names the GPUs of a job with at most so many."""
MOSTLY_PCT = 20.0
"""GPUs whose means differ by more than this many percentage points share the work only mostly evenly."""
LOW_PCT = 30.0
"""Below this utilization, waiting costs more time than what the roofline shows, as in the rule memory_bound."""


@dataclass(frozen=True)
class Finding:
    """A section of the report. picture: the name of its chart. alt: what the chart shows, in words."""

    picture: Literal["timeline", "roofline", "memory"]
    title: str
    text: str
    alt: str


@dataclass(frozen=True)
class _Busy:
    """Mean utilization of a GPU in percent."""

    name: str
    pct: float

    @property
    def shown(self) -> str:
        return f"{self.pct:.0f}%"


def findings_of(context: JobContext, facts: Facts, rules: Sequence[str]) -> tuple[Finding, ...]:
    """The sections that have something to say. rules: the names of the rules that hold."""
    found = (_balance(context, facts, rules), _roofline(context, facts), _memory(context, facts))
    return tuple(each for each in found if each is not None)


def _balance(context: JobContext, facts: Facts, rules: Sequence[str]) -> Finding | None:
    busy = [
        _Busy(printable(unit_name(row["host"], row["gpu"], row["mig"]), 80), pct)
        for row in context.gpus
        if (pct := busy_pct(row)) is not None
    ]
    if not busy:
        return None
    thing = "MIG slice" if context.is_mig else "GPU"
    whose = f"your {thing}" if len(busy) == 1 else f"each of your {format_count(len(busy))} {thing}s"
    text = _balance_text(busy, thing, facts, rules)
    absent = context.gpu_count - len(busy)
    if absent > 0 and not context.is_mig:
        was = "was" if absent == 1 else "were"
        text += f" {format_count(absent)} of {format_count(context.gpu_count)} GPUs {was} not measured."
    return Finding("timeline", f"How busy {whose} was", text, f"How busy {whose} was over time: {_listed(busy)}")


def _balance_text(busy: Sequence[_Busy], thing: str, facts: Facts, rules: Sequence[str]) -> str:
    values, limits = facts.values, facts.rules.character
    coverage = values["coverage"]
    when = "of the measured time" if isinstance(coverage, float) and coverage < 0.95 else "of the time"
    yours = f"Your {thing}" if len(busy) == 1 else f"Your {format_count(len(busy))} {thing}s"
    spatial = values["spatial"]
    if not ALL_IDLE.isdisjoint(rules):
        return f"{yours} did nothing."
    if not SOME_IDLE.isdisjoint(rules):
        return f"{facts.words['idle_gpus']} of your {facts.words['gpus']} {thing}s did nothing; {_others(busy, when)}."
    if len(busy) == 1:
        return f"{yours} was busy {busy[0].shown} {when}{_pace(values['temporal'], limits)}."
    if not isinstance(spatial, int | float):
        return f"{yours} were busy {_span(busy)} {when}."
    if spatial <= limits.balanced_max:
        return f"{yours} shared the work {_even(busy, when)}{_pace(values['temporal'], limits)}."
    return f"{yours} did not share the work evenly: {_contrast(busy, when)}."


def _even(busy: Sequence[_Busy], when: str) -> str:
    """How evenly, where the imbalance between GPUs is small: among many GPUs, a few can still work much less."""
    least, most = min(busy, key=_pct), max(busy, key=_pct)
    if most.pct - least.pct < MOSTLY_PCT:
        return f"evenly: each was busy {_span(busy)} {when}"
    return f"mostly evenly: they were busy {_span(busy)} {when} ({least.name} the least)"


def _pct(each: _Busy) -> float:
    return each.pct


def _others(busy: Sequence[_Busy], when: str) -> str:
    """Who worked, where some GPUs did nothing."""
    used = [each for each in busy if each.pct >= 1]
    if not used:
        return "the others were hardly busy"
    if len(used) == 1:
        return f"{used[0].name} was busy {used[0].shown} {when}"
    return f"the others were busy {_span(used)} {when}"


def _contrast(busy: Sequence[_Busy], when: str) -> str:
    least, most = min(busy, key=_pct), max(busy, key=_pct)
    if most.pct - least.pct < UNEVEN_PCT:
        return f"each was busy {_span(busy)} {when}, but at different times"
    return f"{most.name} was busy {most.shown} {when}, and {least.name} {least.shown}"


def _span(busy: Sequence[_Busy]) -> str:
    low, high = (f"{function(each.pct for each in busy):.0f}%" for function in (min, max))
    return low if low == high else f"{low} to {high}"


def _pace(temporal: object, limits: CharacterLimits) -> str:
    if not isinstance(temporal, int | float):
        return ""
    if temporal >= limits.bursty_min:
        return ", in bursts with long pauses"
    return ", steadily" if temporal <= limits.steady_max else ", fairly steadily"


def _listed(busy: Sequence[_Busy]) -> str:
    """ "n2:0 80% busy, the others idle"; for many GPUs, their range."""
    if len(busy) > NAMED:
        return f"{_span(busy)} busy on average"
    idle = [each for each in busy if each.pct < 1]
    shown = [f"{each.name} {each.shown} busy" for each in busy if each.pct >= 1]
    if not shown:
        return "idle" if len(busy) == 1 else "all idle"
    rest = ["the others idle"] if len(idle) > 1 else [f"{each.name} idle" for each in idle]
    return ", ".join([*shown, *rest])


@dataclass(frozen=True)
class _Bound:
    """What the roofline of a job class shows. makes_faster: what would make the job faster."""

    text: str
    makes_faster: str
    alt: str


_BOUNDS: Mapping[str, _Bound] = {
    "memory": _Bound(
        "Memory-bound: while the GPUs computed, their memory was busier than the {pipe} for {memory_time} of the time.",
        "Moving less data makes such a job faster; faster arithmetic does not.",
        "most work lies left of the ridge, limited by GPU memory",
    ),
    "compute": _Bound(
        "Compute-bound: while the GPUs computed, the {pipe} were busier than their memory for {compute_time} of the "
        "time.",
        "Faster kernels make such a job faster; faster memory does not.",
        "most work lies right of the ridge, limited by the {pipe}",
    ),
}
"""By job class."""


def _roofline(context: JobContext, facts: Facts) -> Finding | None:
    title, job_class = "Roofline: what limits the speed", facts.values["job_class"]
    if job_class in _BOUNDS:
        bound, util_pct = _BOUNDS[str(job_class)], facts.values["util_pct"]
        is_waiting = isinstance(util_pct, int | float) and util_pct < LOW_PCT
        text = bound.text if is_waiting else f"{bound.text} {bound.makes_faster}"
        gpu = printable(str(context.metrics.get("gpu_model") or "GPU"), 40)
        # The model's name comes from an exporter, and could hold braces.
        alt = f"Roofline of one {gpu}: {bound.alt.format_map(facts.words)}"
        return Finding("roofline", title, text.format_map(facts.words), alt)
    if facts.values["has_fault"]:
        return Finding("roofline", title, "Not known, because the detailed counters failed.", "Roofline, incomplete")
    if context.is_mig or context.data_quality != "ok":
        return None
    return Finding(
        "roofline",
        title,
        "Not known: too little of the work can be placed on the roofline.",
        "Roofline of the few moments that can be placed on it",
    )


def _memory(context: JobContext, facts: Facts) -> Finding | None:
    metrics = context.metrics
    peak_mib, capacity_mib = metrics.get("hbm_peak_mib") or metrics.get("hbm_max_mib"), metrics.get("hbm_capacity_mib")
    if peak_mib is None:
        return None
    used = format_gib(peak_mib) + (f" of {format_gib(capacity_mib)}" if capacity_mib else "")
    tiers = ", ".join(f"{printable(tier.name, 40)} {tier.capacity_mib / 1024:.0f} GiB" for tier in context.tiers[:6])
    beside = f"; tiers of this site: {tiers}" if tiers and not context.is_mig else ""
    if metrics.get("is_preallocated"):
        text = f"Your framework reserved {used}, which hides how much your program uses."
        return Finding("memory", "GPU memory", text, f"GPU memory over time: {used} reserved{beside}")
    thing = "MIG slice" if context.is_mig else "GPU"
    share = f"The fullest {thing}" if context.gpu_count > 1 else f"Your {thing}"
    return Finding(
        "memory", "GPU memory", f"{share} used at most {used}.", f"GPU memory over time: peak {used}{beside}"
    )
