"""The conclusions of a job's report: headline, summary, suggestions, and a sentence for each chart.

`next_steps` gives the most important suggestion for each of many jobs, in a few words. It uses only the job's own row
and its family's peaks: no model and no samples are read. So there is no advice from the memory bound, and the report
can say more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from advisor.explain import to_json as advice_json
from advisor.packing.text import packing_table
from almanac.config import Tier
from almanac.published.files import to_plain
from almanac.units import format_count, format_gib, printable, span_text
from reports.job.evidence import JobContext, busy_pct, figure_rows, heading_rows
from reports.job.facts import UNEVEN_PCT, Facts, facts_of
from reports.job.job_report import ChartFinding, JobReport, JobRow, MemoryLevel, MetricsRow, Suggestion, unit_name
from reports.job.rules import (
    ALL_IDLE,
    SOME_IDLE,
    CharacterLimits,
    Rule,
    RuleSet,
    SiteChoices,
    first_of_topics,
    packaged,
)

MAX_SUGGESTIONS = 3
MAX_SENTENCES = 2
NOTHING_TO_CHANGE = "OK, nothing to change"


@dataclass(frozen=True)
class Conclusions:
    """The texts of a report. sentences: one or two; suggestions: at most MAX_SUGGESTIONS, most important first.

    headline: what happened and what to do, in a few words: "40 GB GPUs are enough (peak 26 of 80 GiB)".
    rules: the names of all rules that hold, also of those whose texts are not shown.
    """

    headline: str
    sentences: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    rules: tuple[str, ...]

    @property
    def summary(self) -> str:
        return " ".join(self.sentences)

    @property
    def is_fine(self) -> bool:
        """True if nothing must change."""
        return self.headline.startswith("OK")


def report_of(context: JobContext) -> JobReport:
    """The report of a job. Its texts hold no control characters."""
    facts = facts_of(context)
    conclusions = conclude(facts)
    return JobReport(
        job_id=context.job_id,
        shown_id=context.shown_id,
        cluster=context.cluster,
        still_running=context.is_live,
        job=context.job,
        earlier_runs=context.earlier_runs,
        headline=conclusions.headline,
        verdict=conclusions.summary,
        rules=conclusions.rules,
        suggestions=conclusions.suggestions,
        findings=findings_of(context, facts, conclusions.rules),
        heading=tuple(heading_rows(context)),
        figures=tuple(figure_rows(context)),
        gpu_count=context.gpu_count,
        elapsed_s=context.elapsed_s,
        gpu_hours=context.gpu_hours,
        metrics=context.metrics or None,
        gpus=context.gpus,
        ranks=context.ranks,
        advice=None if context.advice is None else to_plain(advice_json(context.advice)),
        packing=None if context.packing is None else to_plain(packing_table(context.packing, context.is_array)),
        memory_levels=_memory_levels(context),
        links=context.site.links_of(context.job, context.cluster),
        help_url=context.site.help_url,
        series=context.series,
    )


def _memory_levels(context: JobContext) -> tuple[MemoryLevel, ...]:
    """The tiers, and the job's GPU if no tier has its size; none for MIG instances."""
    if context.is_mig:
        return ()
    levels = [MemoryLevel(tier.name, tier.capacity_mib) for tier in context.tiers]
    own_mib = context.metrics.get("hbm_capacity_mib")
    if own_mib and own_mib not in {each.capacity_mib for each in levels}:
        levels.append(MemoryLevel("this GPU", own_mib))
    return tuple(levels)


def conclude(facts: Facts) -> Conclusions:
    """Return the texts of the first matching rule of each topic; at least one sentence."""
    found = first_of_topics(facts.rules.rules, facts.values)
    sentences = [rule.summary.format_map(facts.words) for rule in found if rule.summary]
    suggestions = [
        Suggestion(rule.name, advice.format_map(facts.words), rule.reason.format_map(facts.words))
        for rule in found
        if (advice := facts.rules.advice_of(rule, facts.values["framework"]))
    ]
    return Conclusions(
        headline=_headline(found).format_map(facts.words),
        sentences=tuple(sentences[:MAX_SENTENCES]),
        suggestions=tuple(suggestions[:MAX_SUGGESTIONS]),
        rules=tuple(rule.name for rule in found),
    )


def _headline(found: Sequence[Rule]) -> str:
    """The first rule's headline, and what to do if that rule has no advice; rules.toml says which one is used."""
    said = [rule for rule in found if rule.headline and not rule.is_fine]
    if not said:
        return next((rule.headline for rule in found if rule.headline), NOTHING_TO_CHANGE)
    first, *others = said
    action = next((rule.headline for rule in others if rule.advice), "")
    return f"{first.headline}; {action}" if action and not first.advice else first.headline


NAMED = 4
"""A picture's text names the GPUs of a job with at most so many."""
MOSTLY_PCT = 20.0
"""GPUs whose means differ by more than this many percentage points share the work only mostly evenly."""
LOW_PCT = 30.0
"""Below this utilization, waiting costs more time than what the roofline shows, as in the rule memory_bound."""


@dataclass(frozen=True)
class _Busy:
    """Mean utilization of a GPU in percent."""

    name: str
    pct: float

    @property
    def shown(self) -> str:
        return f"{self.pct:.0f}%"


def findings_of(context: JobContext, facts: Facts, rules: Sequence[str]) -> tuple[ChartFinding, ...]:
    """The sections that have something to say. rules: the names of the rules that hold."""
    found = (_balance(context, facts, rules), _roofline(context, facts), _memory(context, facts))
    return tuple(each for each in found if each is not None)


def _balance(context: JobContext, facts: Facts, rules: Sequence[str]) -> ChartFinding | None:
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
    return ChartFinding("timeline", f"How busy {whose} was", text, f"How busy {whose} was over time: {_listed(busy)}")


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
    """Describe a small imbalance between GPUs: among many GPUs, a few can still work much less."""
    least, most = min(busy, key=_pct), max(busy, key=_pct)
    if most.pct - least.pct < MOSTLY_PCT:
        return f"evenly: each was busy {_span(busy)} {when}"
    return f"mostly evenly: they were busy {_span(busy)} {when} ({least.name} the least)"


def _pct(each: _Busy) -> float:
    return each.pct


def _others(busy: Sequence[_Busy], when: str) -> str:
    """Name the GPUs that worked, if some did nothing."""
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
    return span_text(*(f"{function(each.pct for each in busy):.0f}%" for function in (min, max)))


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
class _RooflineText:
    """The roofline of a job class in words. makes_faster: what would make the job faster."""

    text: str
    makes_faster: str
    alt: str


_BOUNDS: Mapping[str, _RooflineText] = {
    "memory": _RooflineText(
        "Memory-bound: while the GPUs computed, their memory was busier than the {pipe} for {memory_time} of the time.",
        "Moving less data makes such a job faster; faster arithmetic does not.",
        "most work lies left of the ridge, limited by GPU memory",
    ),
    "compute": _RooflineText(
        "Compute-bound: while the GPUs computed, the {pipe} were busier than their memory for {compute_time} of the "
        "time.",
        "Faster kernels make such a job faster; faster memory does not.",
        "most work lies right of the ridge, limited by the {pipe}",
    ),
}
"""By job class."""


def _roofline(context: JobContext, facts: Facts) -> ChartFinding | None:
    title, job_class = "Roofline: what limits the speed", facts.values["job_class"]
    if job_class in _BOUNDS:
        bound, util_pct = _BOUNDS[str(job_class)], facts.values["util_pct"]
        is_waiting = isinstance(util_pct, int | float) and util_pct < LOW_PCT
        text = bound.text if is_waiting else f"{bound.text} {bound.makes_faster}"
        gpu = printable(str(context.metrics.get("gpu_model") or "GPU"), 40)
        # The model's name comes from an exporter, and could hold braces.
        alt = f"Roofline of one {gpu}: {bound.alt.format_map(facts.words)}"
        return ChartFinding("roofline", title, text.format_map(facts.words), alt)
    if facts.values["has_fault"]:
        return ChartFinding(
            "roofline", title, "Not known, because the detailed counters failed.", "Roofline, incomplete"
        )
    if context.is_mig or context.data_quality != "ok":
        return None
    return ChartFinding(
        "roofline",
        title,
        "Not known: too little of the work can be placed on the roofline.",
        "Roofline of the few moments that can be placed on it",
    )


def _memory(context: JobContext, facts: Facts) -> ChartFinding | None:
    metrics = context.metrics
    peak_mib, capacity_mib = metrics.get("hbm_peak_mib") or metrics.get("hbm_max_mib"), metrics.get("hbm_capacity_mib")
    if peak_mib is None:
        return None
    used = format_gib(peak_mib) + (f" of {format_gib(capacity_mib)}" if capacity_mib else "")
    tiers = ", ".join(f"{printable(tier.name, 40)} {tier.capacity_mib / 1024:.0f} GiB" for tier in context.tiers[:6])
    beside = f"; tiers of this site: {tiers}" if tiers and not context.is_mig else ""
    if metrics.get("is_preallocated"):
        text = f"Your framework reserved {used}, which hides how much your program uses."
        return ChartFinding("memory", "GPU memory", text, f"GPU memory over time: {used} reserved{beside}")
    thing = "MIG slice" if context.is_mig else "GPU"
    share = f"The fullest {thing}" if context.gpu_count > 1 else f"Your {thing}"
    return ChartFinding(
        "memory", "GPU memory", f"{share} used at most {used}.", f"GPU memory over time: peak {used}{beside}"
    )


NO_EVIDENCE = "no evidence"

Row: TypeAlias = Mapping[str, Any]
Family = tuple[str, str, int]
FAMILY = ("user", "name_key", "gpu_count")


class History(Protocol):
    """Gives the jobs submitted in [since_s, until_s), of one user or all, oldest end first. Missing values are None.

    among: by column, the values that count.
    """

    def __call__(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, Sequence[Any]] | None = None,
    ) -> Iterable[Row]: ...


def next_steps(
    rows: Sequence[Row], tiers: Sequence[Tier], history: History, since_s: int, rules: RuleSet | None = None
) -> list[str]:
    """For each row, the short text of the most important rule with advice; without one, why; else "".

    rows: with NEXT_COLUMNS. history: the jobs that the caller may see. A smaller tier is suggested only if it holds the
    highest sample of all runs of the job's family since since_s, failed runs and reserved memory included.
    rules: the site's; None: the packaged ones.
    """
    site = SiteChoices(rules or packaged())
    found = [_facts(row, tiers, None, site) for row in rows]
    asking = [row for row, facts in zip(rows, found, strict=True) if _may_use_smaller(facts)]
    peaks = _family_peaks(asking, history, since_s) if asking else {}
    return [_short(_facts(row, tiers, peaks.get(_family(row)), site)) for row in rows]


def _family(row: Row) -> Family:
    return row["user"], row["name_key"], row["gpu_count"]


def _facts(row: Row, tiers: Sequence[Tier], highest_mib: float | None, site: SiteChoices) -> Facts:
    """The facts that the rules test. highest_mib: of the job's family; None if that is not known."""
    metrics = dict(row)
    if row.get("hbm_evidence") in ("telemetry", "jobstats", "sacct"):
        metrics["is_preallocated"] = False
    if highest_mib is not None and metrics.get("hbm_peak_mib") is not None:
        metrics["hbm_peak_mib"] = max(highest_mib, row["hbm_peak_mib"])
    job = cast(JobRow, {**dict.fromkeys(JobRow.__annotations__), **row, **_gpus(row)})
    context = JobContext("", 0, job, tuple(tiers), cast(MetricsRow, metrics), site=site)
    facts = facts_of(context)
    return Facts({**facts.values, "tier_reason": NO_EVIDENCE}, facts.words, facts.rules)


def _gpus(row: Row) -> dict[str, int | None]:
    """GPU counts that the job was given and asked for; None for the latter in lists that older releases published."""
    given, unasked = row["gpu_count_alloc"] or row["gpu_count"], row["unasked_gpu_count"]
    return {"gpu_count": given, "gpu_count_req": None if unasked is None else given - unasked}


def _may_use_smaller(facts: Facts) -> bool:
    return any(rule.name == "memory_spare" for rule in first_of_topics(facts.rules.rules, facts.values))


def _family_peaks(rows: Sequence[Row], history: History, since_s: int) -> dict[Family, float]:
    """The highest sample of each row's family, in MiB."""
    among = {name: sorted({row[name] for row in rows}) for name in ("user", "name_key")}
    peaks: dict[Family, float] = {}
    for run in history([*FAMILY, "hbm_max_mib"], since_s, None, None, among):
        peaks[_family(run)] = max(peaks.get(_family(run), 0.0), run["hbm_max_mib"] or 0.0)
    return {family: peak_mib for family, peak_mib in peaks.items() if peak_mib}


def _short(facts: Facts) -> str:
    found = [rule for rule in first_of_topics(facts.rules.rules, facts.values) if rule.short]
    found.sort(key=lambda rule: not rule.advice)
    return next((text for rule in found if (text := rule.short.format_map(facts.words))), "")
