"""An advice as plain text for people, and as a table for programs."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import textwrap
from collections.abc import Iterable
from datetime import UTC, datetime

from advisor.memory import tier as reasons
from almanac.names import SCRIPT_PREFIX, is_family
from almanac.records import Advice, Duration, JobRequest, MemoryBound, TierAdvice, gain_text
from almanac.units import format_count, format_duration, format_gib, printable, span_text

COLUMNS = 80
_KEPT_BLANK = "\xa0"
"""A blank that no line breaks at. Names never hold it: printable() replaces it."""
NO_GPU_LINE = "almanac: no memory tier to advise: the job asks for no GPU."


def explain(advice: Advice, why: bool = False) -> str:
    """Lines of at most COLUMNS, without a newline at the end. Control characters in names are replaced.

    why: add what the predicted time and the priority are made of.
    """
    lines = [
        _memory_line(advice),
        f"  gain: {gain}" if (gain := advised_gain(advice)) else "",
        _change_line(advice),
        pilot_line(advice.tier),
        _no_slice_line(advice.tier),
        _not_counted_line(advice),
        _duration_line(advice),
        _priority_line(advice),
    ]
    if why:
        lines += [_why_duration(advice), _why_priority(advice)]
    return wrapped(lines)


def wrapped(lines: Iterable[str]) -> str:
    """The lines that are not empty, wrapped at COLUMNS and indented by 4 where they continue.

    A number stays on one line with its unit.
    """
    return "\n".join(
        part.replace(_KEPT_BLANK, " ")
        for line in lines
        for part in textwrap.wrap(
            re.sub(r"(?<=[0-9]) (?=[^ ])", _KEPT_BLANK, line),
            COLUMNS,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _memory_line(advice: Advice) -> str:
    if advice.tier.reason == reasons.NO_GPU:
        return NO_GPU_LINE
    if advice.bound is None:
        return _no_bound_line(advice)
    return f"almanac: {with_tier(advice.tier, _bound_text(advice, advice.bound))}"


def _no_bound_line(advice: Advice) -> str:
    evidence, tier = advice.evidence, advice.tier
    if tier.reason == reasons.RAN_OUT and evidence is not None and evidence.ran_out_mib is not None:
        return f"almanac: {with_tier(tier, _ran_out_text(advice))}"
    why = f": {reason}" if (reason := why_no_advice(advice)) else ""
    family = family_text(advice.request)
    if tier.reason == reasons.PAUSED:
        until = _date((evidence.paused_until_s if evidence else None) or 0)
        return f"almanac: check the last runs of {family}{why}. Its memory advice is paused until {until}."
    return f"almanac: no advice yet for {family}{on_gpus(advice.request.gpu_count)}{why}."


def why_no_advice(advice: Advice) -> str:
    """Say why no tier is advised, if the evidence does not support one; "" otherwise."""
    return printable(advice.tier.note) if advice.tier.reason in (reasons.NO_EVIDENCE, reasons.PAUSED) else ""


def on_gpus(gpus: int) -> str:
    """ " on 4 GPUs": runs of a family on another number of GPUs do not count."""
    return f" on {gpus} GPU{'' if gpus == 1 else 's'}"


def family_text(request: JobRequest) -> str:
    """The job family as people read it: its key in quotes, or "this script"; the name of a job without a family."""
    key = request.name_key
    if key.startswith(SCRIPT_PREFIX) and key[1:] == request.script_key:
        return "this script"
    return f'"{printable(key)}"' if is_family(key) else f'"{printable(request.job_name, 40)}"'


def _bound_text(advice: Advice, bound: MemoryBound) -> str:
    family = family_text(advice.request)
    like = "names like " if bound.scope == "similar" and family.startswith('"') else ""
    what = "this script" if bound.scope == "script" else f"{like}{family}"
    runs = f"your last {bound.runs} runs of {what} peaked at {format_gib(bound.highest_mib)} per GPU"
    one_in = f"about 1 in {format_count(_jobs_per_exceedance(bound.risk))}"
    if bound.bound_mib is None or not advice.tier.holds_bound:
        return f"{runs}; {one_in} jobs with such advice needs a larger tier{_slow_text(advice.tier)}."
    return f"{runs}; {one_in} such jobs needs more than {format_gib(bound.bound_mib)}{_slow_text(advice.tier)}."


def _slow_text(tier: TierAdvice) -> str:
    """Return how long such jobs run on a MIG slice; "" for a whole GPU, and if that is not known."""
    if tier.slow_down is None:
        return ""
    tenths = math.ceil(tier.slow_down * 10 - 0.5)
    if tenths <= 10:
        return "; it runs about as fast as on a whole GPU"
    return f"; it runs about {tenths / 10:.1f} times as long as on a whole GPU"


def _no_slice_line(tier: TierAdvice) -> str:
    return f"  no smaller MIG slice: {printable(tier.no_slice)}" if tier.no_slice else ""


def pilot_line(tier: TierAdvice) -> str:
    """The line on the number of jobs that the tier is advised for; "" for any number."""
    if tier.is_held:
        return "  wait: none of your open jobs like this has shown its memory yet. Keep the tier that you ask for."
    if tier.pilot is None or not tier.is_change or tier.reason == reasons.LARGER:
        return ""
    return f"  for the next {tier.pilot} jobs only, until one of them has shown its memory"


def short_text(advice: Advice) -> str:
    """The evidence about the memory of such jobs, in one or two sentences; "" for nothing to show.

    Where a bound leads to a tier, "TIER is enough: " can go before it. Otherwise the text stands alone.
    """
    if advice.tier.reason == reasons.NO_TIERS:
        return ""
    if advice.bound is not None:
        text = _bound_text(advice, advice.bound)
        return with_tier(advice.tier, text) if advice.tier.reason == reasons.NONE_LARGE_ENOUGH else text
    if advice.tier.reason == reasons.RAN_OUT:
        return f"{_ran_out_text(advice)} {advice.tier.tier} is the next larger tier."
    return ""


def _ran_out_text(advice: Advice) -> str:
    capacity_mib = (advice.evidence.ran_out_mib if advice.evidence else None) or 0.0
    return f"a run of {family_text(advice.request)} seems to have run out of memory on {format_gib(capacity_mib)} GPUs."


def _jobs_per_exceedance(risk: float) -> int:
    return max(math.floor(1 / risk + 1e-9), 1)


def with_tier(tier: TierAdvice, evidence: str) -> str:
    """Return the advised option, the evidence, and the exception, in this order; a text for wrapped()."""
    name, asked = printable(tier.tier or ""), printable(tier.requested_tier or "")
    option = f" ({shell_option(tier.rewrite).replace(' ', _KEPT_BLANK)})" if tier.rewrite else ""
    match tier.reason:
        case reasons.FITS:
            return f"keep {name}: {evidence}"
        case reasons.SMALLER:
            return f"ask for {name}{option} instead of {asked}: {evidence}"
        case reasons.RAN_OUT:
            return f"ask for {name}{option}, the next larger tier: {evidence}"
        case reasons.LARGER:
            return f"ask for {name}{option}, because {asked} is too small: {evidence}"
        case reasons.NAME_IT:
            return f"ask for {name}{option}, which may shorten the wait: {evidence}"
        case reasons.NONE_LARGE_ENOUGH:
            return f"{evidence} No tier of this site is surely large enough."
        case reasons.CHOICE:
            return f"{evidence} Your request leaves a choice between tiers, so it stays as it is."
        case reasons.NOT_REWRITABLE:
            return f"{name} is enough: {evidence} almanac suggests no option: {printable(tier.note)}."
        case reasons.NO_TIERS:
            return f"{evidence} This site has no memory tiers configured."
    return evidence


def shell_option(option: str) -> str:
    """ "--constraint=gpu&hbm40g" as it can be typed: -C "gpu&hbm40g"."""
    name, _, value = printable(option).partition("=")
    quoted = f'"{value}"' if re.fullmatch(r"[\w.:,+&|-]*", value) else shlex.quote(value)
    return f"{ {'--constraint': '-C', '--partition': '-p'}.get(name, name) } {quoted}"


def _change_line(advice: Advice) -> str:
    """Return how far back the evidence goes, and what would change the advice."""
    evidence = advice.evidence
    if evidence is None or evidence.changes_above_mib is None or evidence.since_s is None:
        return ""
    above = format_gib(evidence.changes_above_mib)
    return f"  based on runs since {_date(evidence.since_s)}; a peak above {above} would change the advice"


def _date(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d")


def advised_gain(advice: Advice) -> str:
    """The user's gain from the advised change; "" for no change, and if it is not known."""
    tier = advice.tier
    if not tier.is_change:
        return ""
    gain = next((each for each in advice.gains if each.asked == tier.requested_tier), None)
    freed = printable(tier.requested_tier or "") if tier.reason == reasons.SMALLER else ""
    return gain_text(format_duration(gain.gain_s) if gain else "", advice.request.gpu_count, freed)


def _not_counted_line(advice: Advice) -> str:
    parts = [_runs_text(number, reason) for reason, number in sorted(advice.excluded.items())]
    return f"  not counted: {', '.join(parts)}" if parts else ""


def _runs_text(number: int, reason: str) -> str:
    """ "3 short runs", "1 run with low coverage"."""
    before, after = _EXCLUDED.get(reason, ("", f" ({printable(reason)})"))
    return f"{format_count(number)} {before}run{'' if number == 1 else 's'}{after}"


_EXCLUDED = {
    "failed before its end": ("failed ", ""),
    "ended early": ("", " that ended early"),
    "idle": ("idle ", ""),
    "short": ("short ", ""),
    "packed": ("packed ", ""),
    "low coverage": ("", " with low coverage"),
    "no telemetry": ("", " without telemetry"),
    "preallocated memory": ("", " with preallocated memory"),
    "possibly preallocated memory": ("", " with possibly preallocated memory"),
    "memory shared with the host": ("", " on GPUs that share their memory with the host"),
    "GPU memory size unknown": ("", " on GPUs of unknown memory size"),
}
"""Words before and after "runs", by reason."""
_CASES = {
    "name": "your runs with similar names",
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
        interval = ", too irregular for a range"
    elif duration.low_s is not None and duration.high_s is not None:
        low, high = format_duration(duration.low_s), format_duration(duration.high_s)
        interval = f", usually {span_text(low, high)}" if low != high else ""
    return (
        f"  predicted time: {format_duration(duration.duration_s)}{interval}{gpu_time} (from {_basis(duration)}{model})"
    )


def _basis(duration: Duration) -> str:
    return f"{format_count(duration.runs)} of {_CASES.get(duration.case, duration.case)}"


def _priority_line(advice: Advice) -> str:
    """Compare the job with recent ones. Its site factor, a number that users cannot compare, is in the reasons."""
    priority = advice.priority
    if priority is None or priority.share_longer is None:
        return ""
    parts = [f"by its predicted time, this job goes before {priority.share_longer:.0%} of recent jobs"]
    if priority.is_cautious:
        parts.append("a longer time counts, because your newest runs took longer than predicted")
    if priority.extra:
        parts.append("options of this site raise it")
    return f"  priority: {'; '.join(parts)}"


def _why_duration(advice: Advice) -> str:
    duration = advice.duration
    if duration is None:
        return ""
    rolling = f"{_basis(duration)} took about {format_duration(duration.rolling_s)}, where newer and more similar ones "
    rolling += "count more"
    if duration.model_s is None:
        return f"  why this time: {rolling}; no trained model is used"
    model = f"the site's model predicts {format_duration(duration.model_s)}"
    return f"  why this time: {model}; {rolling}; the prediction combines both"


def _why_priority(advice: Advice) -> str:
    priority = advice.priority
    if priority is None:
        return ""
    return (
        f"  why this priority: almanac's part of it is {format_count(priority.site_factor)} (Slurm's site factor): the "
        f"less time on all GPUs together, the more; {format_duration(priority.gpu_time_s)} counted. Slurm adds to it "
        "while the job waits"
    )


def to_json(advice: Advice) -> dict[str, object]:
    """The advice as a table of plain values.

    request   the submission: user, job_name, name_key, gpu_count, node_count, constraints, partition, time_limit_s
    tier      tier (null: none advised), reason, requested_tier, is_change, option (as sbatch takes it), note,
              slow_down (on a MIG slice, as a multiple of the time on a whole GPU; null: not known), no_slice (why
              no smaller slice is advised)
    bound     null, or bound_mib (null: none can be stated), tier_mib, risk, highest_mib, runs, scope,
              evidence_class (the risk is that class's)
    duration  null, or duration_s, gpu_time_s, rolling_s, model_s, case, runs, low_s, high_s
    priority  null, or term, gpu_time_s, share_longer, worth_wait_s, is_cautious, extra
    set_aside runs without evidence, by reason
    evidence  null, or what was looked at: scope, runs, since_s, until_s, newest_peaks_mib, ran_out_mib, ran_out_s,
              paused_until_s, changes_above_mib
    gains     how much sooner jobs start in the advised tier than in others: asked, pairs, gain_s
    services  by name of the site's own service: updated_s, told (null: nothing), error (null: none)
    """
    return {
        "request": request_table(advice.request),
        "tier": tier_table(advice.tier),
        "bound": _table(advice.bound),
        "duration": _table(advice.duration),
        "priority": None if advice.priority is None else advice.priority.to_table(),
        "set_aside": dict(advice.excluded),
        "evidence": None if advice.evidence is None else dataclasses.asdict(advice.evidence),
        "gains": [dataclasses.asdict(gain) for gain in advice.gains],
        "services": dict(advice.services),
        "has_evidence": advice.has_evidence,
    }


def request_table(request: JobRequest) -> dict[str, object]:
    names = ("gpu_count", "node_count", "constraints", "partition", "time_limit_s")
    own = {"user": request.user, "job_name": request.job_name, "name_key": request.name_key}
    return {**own, **{name: getattr(request, name) for name in names}}


def tier_table(tier: TierAdvice) -> dict[str, object]:
    names = ("tier", "reason", "requested_tier", "is_change", "slow_down", "no_slice")
    return {**{name: getattr(tier, name) for name in names}, "option": tier.rewrite, "note": tier.note}


def _table(part: MemoryBound | Duration | None) -> dict[str, object] | None:
    return None if part is None else dataclasses.asdict(part)
