"""An advice as a few plain lines for a person, and as a table for programs."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from datetime import UTC, datetime

from advisor.decisions import tier as reasons
from advisor.memory.evidence import SCRIPT, SIMILAR
from almanac.names import name_key
from almanac.records import Advice, Duration, MemoryBound, PriorityAdvice, TierAdvice
from almanac.units import format_count, format_duration, format_gib, printable


def explain(advice: Advice, why: bool = False) -> str:
    """Lines joined by newlines, without a last one. Names are shown with control characters replaced.

    why: also what the predicted time and the priority are made of.
    """
    lines = [
        _memory_line(advice),
        _change_line(advice),
        _waits_line(advice),
        _set_aside_line(advice),
        _duration_line(advice),
        _priority_line(advice),
    ]
    if why:
        lines += [_why_duration(advice), _why_priority(advice)]
    return "\n".join(line for line in lines if line)


def _memory_line(advice: Advice) -> str:
    if advice.tier.reason == reasons.NO_GPU:
        return "almanac: no GPU is asked for, so there is no memory tier to advise."
    if advice.bound is None:
        return _no_evidence_line(advice)
    return f"almanac: {_bound_text(advice, advice.bound)} {tier_text(advice.tier)}"


def _no_evidence_line(advice: Advice) -> str:
    evidence, tier = advice.evidence, advice.tier
    if tier.reason == reasons.RAN_OUT and evidence is not None and evidence.ran_out_mib is not None:
        return f"almanac: {_ran_out_text(advice)} {tier_text(tier)}"
    note = f" ({printable(tier.note)})" if tier.note else ""
    if tier.reason == reasons.PAUSED:
        until = _date((evidence.paused_until_s if evidence else None) or 0)
        return f"almanac: advice on the memory of {_family(advice)} is paused until {until}{note}: check its last runs."
    return f"almanac: too little is known of the memory of {_family(advice)}{_on(advice)}{note}: nothing is advised."


def _on(advice: Advice) -> str:
    """A family's runs on other numbers of GPUs are no evidence: the number belongs to what is said of them."""
    gpus = advice.request.gpu_count
    return f" on {gpus} GPU{'' if gpus == 1 else 's'}"


def _family(advice: Advice) -> str:
    return f'"{printable(name_key(advice.request.job_name))}"'


def _bound_text(advice: Advice, bound: MemoryBound) -> str:
    like = "names like " if bound.scope == SIMILAR else ""
    what = "this script" if bound.scope == SCRIPT else f"{like}{_family(advice)}"
    runs = f"your last {bound.runs} runs of {what}"
    jobs = format_count(_jobs_per_exceedance(bound.risk))
    if bound.bound_mib is None or not advice.tier.holds_bound:
        return (
            f"{runs} peaked at {format_gib(bound.highest_mib)} per GPU; "
            f"of {jobs} jobs that are advised a tier on evidence like this, at most about 1 exceeds it."
        )
    return (
        f"{runs} peaked at {format_gib(bound.highest_mib)} per GPU; of {jobs} jobs with evidence like this, "
        f"at most about 1 exceeds {format_gib(bound.bound_mib)}."
    )


def short_text(advice: Advice) -> str:
    """What is known of the memory of such jobs, as a sentence or two; "" where nothing is to be shown.

    Where no tier is advised by a bound it is whole; else "TIER holds that." can follow.
    """
    if advice.tier.reason == reasons.NO_TIERS:
        return ""
    if advice.bound is not None:
        whole = f" {tier_text(advice.tier)}" if advice.tier.reason == reasons.NONE_LARGE_ENOUGH else ""
        return _bound_text(advice, advice.bound) + whole
    if advice.tier.reason == reasons.RAN_OUT:
        return f"{_ran_out_text(advice)} {advice.tier.tier} is the next larger."
    return ""


def _ran_out_text(advice: Advice) -> str:
    capacity_mib = (advice.evidence.ran_out_mib if advice.evidence else None) or 0.0
    return f"a run of {_family(advice)} seems to have run out of memory on {format_gib(capacity_mib)} GPUs."


def _jobs_per_exceedance(risk: float) -> int:
    return max(math.floor(1 / risk + 1e-9), 1)


def tier_text(tier: TierAdvice) -> str:
    """Which tier holds what was said before, and what to ask for; "" where nothing is to be said."""
    name, asked = printable(tier.tier or ""), printable(tier.requested_tier or "")
    option = f": ask for {shell_option(tier.rewrite)}" if tier.rewrite else ""
    match tier.reason:
        case reasons.FITS:
            return f"{name} holds that: keep it."
        case reasons.SMALLER:
            return f"{name} holds that{option} in place of {asked}."
        case reasons.RAN_OUT:
            return f"{name} is the next larger{option}."
        case reasons.LARGER:
            return f"{asked} is too small for that, {name} holds it{option}."
        case reasons.NAME_IT:
            return f"{name} holds that{option}; naming a tier may shorten the wait."
        case reasons.NONE_LARGE_ENOUGH:
            return "No tier of this site is sure to hold that: nothing is advised."
        case reasons.CHOICE:
            return "The request leaves a choice between tiers: it is left as it is."
        case reasons.NOT_REWRITABLE:
            return f"{name} holds that, but the request is left as it is: {printable(tier.note)}."
        case reasons.NO_TIERS:
            return "No memory tiers are configured."
    return ""


def shell_option(option: str) -> str:
    """ "--constraint=gpu&hbm40g" as it can be typed: -C "gpu&hbm40g"."""
    name, _, value = printable(option).partition("=")
    quoted = f'"{value}"' if re.fullmatch(r"[\w.:,+&|-]*", value) else shlex.quote(value)
    return f"{ {'--constraint': '-C', '--partition': '-p'}.get(name, name) } {quoted}"


def _change_line(advice: Advice) -> str:
    """Since when the evidence goes, and what would change the advice."""
    evidence = advice.evidence
    if evidence is None or evidence.changes_above_mib is None or evidence.since_s is None:
        return ""
    return (
        f"  runs since {_date(evidence.since_s)}; one above {format_gib(evidence.changes_above_mib)} would change this"
    )


def _date(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d")


def _waits_line(advice: Advice) -> str:
    """Where another tier is advised, and both waits are known."""
    waits = {wait.tier: wait for wait in advice.waits}
    named = [waits[name] for name in (advice.tier.tier, advice.tier.requested_tier) if name in waits]
    if not advice.tier.is_change or not named:
        return ""
    parts = [
        f"{printable(wait.tier)} {format_duration(wait.median_s)} (half of {format_count(wait.jobs)} jobs: "
        f"{format_duration(wait.low_s)} to {format_duration(wait.high_s)})"
        for wait in named
    ]
    return f"  recent waits: {', '.join(parts)}"


def _set_aside_line(advice: Advice) -> str:
    if not advice.set_aside:
        return ""
    parts = [f"{number} ({printable(reason)})" for reason, number in sorted(advice.set_aside.items())]
    return f"  runs that say nothing about memory: {', '.join(parts)}"


_CASES = {
    "name": "your runs of similar name",
    "user": "your runs with as many GPUs",
    "user, any size": "your runs",
    "site": "the site's jobs with as many GPUs",
    "site, any size": "the site's jobs",
}


def _duration_line(advice: Advice) -> str:
    duration = advice.duration
    if duration is None:
        return "  predicted time: unknown"
    model = " and the site's model" if duration.model_s is not None else ""
    gpu_time = f", {format_duration(duration.gpu_time_s)} of GPU-time" if advice.request.gpu_count > 1 else ""
    interval = ""
    if duration.low_s is not None and duration.high_s is not None and not duration.is_regular:
        interval = ", too irregular to say a range"
    elif duration.low_s is not None and duration.high_s is not None:
        low, high = format_duration(duration.low_s), format_duration(duration.high_s)
        interval = f", mostly {low} to {high}" if low != high else ""
    return (
        f"  predicted time: {format_duration(duration.duration_s)}{interval}{gpu_time} (from {_basis(duration)}{model})"
    )


def _basis(duration: Duration) -> str:
    return f"{format_count(duration.runs)} of {_CASES.get(duration.case, duration.case)}"


def _priority_line(advice: Advice) -> str:
    priority = advice.priority
    if priority is None:
        return ""
    parts = [f"site factor {format_count(priority.term)}"]
    if priority.share_longer is not None:
        parts.append(f"{priority.share_longer:.0%} of recent jobs are predicted to need more")
    if priority.worth_wait_s is not None and abs(priority.worth_wait_s) >= 60:
        than = "as good as having waited" if priority.worth_wait_s > 0 else "as if it had been submitted later by"
        parts.append(f"against a job in the middle it is {than} {format_duration(abs(priority.worth_wait_s))}")
    if priority.is_cautious:
        parts.append("your newest runs took longer than expected, so the longer end counts")
    if priority.extra:
        parts.append(f"{format_count(priority.extra)} of it by this site's options")
    return f"  priority: {'; '.join(parts)}"


def _why_duration(advice: Advice) -> str:
    duration = advice.duration
    if duration is None:
        return ""
    rolling = f"the weighted mean of {_basis(duration)} is {format_duration(duration.rolling_s)}"
    if duration.model_s is None:
        last = "" if duration.case.startswith("site") else "it is the median of your last runs most like it; "
        return f"  why this time: {last}{rolling}; no trained model is used"
    model = f"the site's model says {format_duration(duration.model_s)}"
    return f"  why this time: {model}; {rolling}; the prediction weighs the model with your last runs"


def _why_priority(advice: Advice) -> str:
    if advice.priority is None:
        return ""
    counted = format_duration(advice.priority.gpu_time_s)
    return f"  why this priority: it falls with the logarithm of the GPU-time ({counted} are counted); age adds to it"


def to_json(advice: Advice) -> dict[str, object]:
    """The advice as a table of plain values.

    request   the submission: user, job_name, name_key, gpu_count, node_count, constraints, partition, time_limit_s
    tier      tier (null: none advised), reason, requested_tier, is_change, option (as sbatch takes it), note
    bound     null, or bound_mib (null: none can be stated), tier_mib, risk, highest_mib, runs, scope,
              evidence_class (the risk is that class's)
    duration  null, or duration_s, gpu_time_s, rolling_s, model_s, case, runs, low_s, high_s
    priority  null, or term, gpu_time_s, share_longer, worth_wait_s, is_cautious, extra
    set_aside runs without evidence, by reason
    evidence  null, or what was looked at: scope, runs, since_s, until_s, newest_peaks_mib, ran_out_mib, ran_out_s,
              paused_until_s, changes_above_mib
    waits     expected wait per tier: tier, jobs, median_s, low_s, high_s
    services  by name of the site's own service: updated_s, told (null: nothing), error (null: none)
    """
    request = advice.request
    return {
        "request": {
            "user": request.user,
            "job_name": request.job_name,
            "name_key": name_key(request.job_name),
            "gpu_count": request.gpu_count,
            "node_count": request.node_count,
            "constraints": request.constraints,
            "partition": request.partition,
            "time_limit_s": request.time_limit_s,
        },
        "tier": {
            "tier": advice.tier.tier,
            "reason": advice.tier.reason,
            "requested_tier": advice.tier.requested_tier,
            "is_change": advice.tier.is_change,
            "option": advice.tier.rewrite,
            "note": advice.tier.note,
        },
        "bound": _table(advice.bound),
        "duration": _table(advice.duration),
        "priority": _table(advice.priority),
        "set_aside": dict(advice.set_aside),
        "evidence": None if advice.evidence is None else dataclasses.asdict(advice.evidence),
        "waits": [dataclasses.asdict(wait) for wait in advice.waits],
        "services": dict(advice.services),
        "has_evidence": advice.has_evidence,
    }


def _table(part: MemoryBound | Duration | PriorityAdvice | None) -> dict[str, object] | None:
    return None if part is None else dataclasses.asdict(part)
