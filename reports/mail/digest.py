"""Mails of several jobs: a storm of them, such as an array's tasks, and a user's week."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac import __version__
from almanac.config import Config
from almanac.units import format_count, format_duration, format_gib, format_moment, printable
from reports.job.conclusions import MAX_SUGGESTIONS, Suggestion
from reports.job.context import JobContext, build
from reports.job.figures import NOT_KNOWN, FigureRow, real_text
from reports.job.report import MAX_SUBJECT, Rendered, Report, render_html, report_of, templates
from reports.job.rules import rules
from reports.mail.week import FAILED_STATES, Saving, Totals, Week, week_of
from telemetry.store.store import Store

COMMON = 0.1
"""Share of the jobs from which on the order of the rules says what matters most."""
LISTED = 20
"""Jobs of a storm that are named, at most."""


@dataclass(frozen=True)
class Part:
    """A card of a digest, or a section of its text."""

    title: str
    rows: tuple[FigureRow, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    note: str = ""


def render_storm(contexts: Sequence[JobContext], config: Config) -> Rendered:
    """One mail of many jobs of one user; contexts need no series. Raises ValueError for none."""
    if not contexts:
        raise ValueError("a digest of no jobs")
    reports = [report_of(context) for context in contexts]
    summary = f"{_ended(contexts)}, {_hours(sum(context.gpu_hours or 0.0 for context in contexts))} in all."
    listed = sorted(reports, key=_urgency)[:LISTED]
    more = len(reports) - len(listed)
    rest = f"{format_count(more)} more are not named; `almanac report JOBID` tells of each." if more else ""
    parts = [
        _suggested(reports),
        Part("In figures", tuple(_storm_rows(contexts))),
        Part("The jobs" if not more else "The jobs, the most telling first", tuple(map(_job_row, listed)), note=rest),
    ]
    return _rendered(contexts[0].cluster, _storm_subject(contexts), summary, _kicker(contexts), parts)


def render_weekly(store: Store, cluster: str, user: str, config: Config, now_s: int) -> Rendered | None:
    """The user's GPU jobs of the last whole week (Monday to Sunday, UTC); None where none ended. Raises StoreError.

    Asked for at any time of the week after it is about the same jobs; `week.last_week` gives the week's name.
    """
    week = week_of(store, cluster, user, config, now_s)
    if week is None:
        return None
    named = build(store, cluster, [*week.best, *week.worst], config, now_s, has_series=False)
    reports = {context.job_id: report_of(context) for context in named}
    worst = [reports[job_id] for job_id in week.worst if job_id in reports]
    best = [reports[job_id] for job_id in week.best if job_id in reports]
    parts = [
        Part("In figures", tuple(_total_rows(week.totals))),
        Part("The weeks before", tuple(FigureRow(span.name, *_trend(totals)) for span, totals in week.before)),
        Part("Your best jobs", tuple(map(_job_row, best))),
        Part("Jobs that could do better", tuple(map(_job_row, worst))),
        _suggested(worst),
        _savings(week),
    ]
    kicker = f"Week {week.span.name}: {format_moment(week.span.start_s)} to {format_moment(week.span.end_s)}"
    totals = week.totals
    subject = f"Your GPU week {week.span.name}: {_jobs(totals.jobs)}, {_hours(totals.gpu_hours)}"
    return _rendered(cluster, subject, _week_summary(week), kicker, parts)


def _rendered(cluster: str, subject: str, summary: str, kicker: str, parts: Sequence[Part]) -> Rendered:
    given: dict[str, Any] = {
        "subject": printable(subject, MAX_SUBJECT),
        "summary": summary,
        "kicker": kicker,
        "parts": [part for part in parts if part.rows or part.suggestions or part.note],
        "cluster": printable(cluster, 60),
        "version": __version__,
    }
    text = templates().get_template("digest.txt.j2").render(**given)
    return Rendered(given["subject"], text, render_html("digest.html.j2", **given, is_mail=True), {})


def _storm_subject(contexts: Sequence[JobContext]) -> str:
    arrays = {context.job["array_job_id"] for context in contexts}
    names = {context.job["name"] for context in contexts}
    name = f" ({printable(names.pop(), 40)})" if len(names) == 1 and None not in names else ""
    array = arrays.pop() if len(arrays) == 1 else None
    what = f"GPU array {array}{name}" if array is not None else f"GPU jobs{name}"
    return f"{what}: {_ended(contexts)}"


def _ended(contexts: Sequence[JobContext]) -> str:
    """ "24 jobs ended: 20 completed, 4 failed"."""
    states = Counter(printable(context.job["state"] or NOT_KNOWN, 40).lower() for context in contexts)
    said = ", ".join(f"{format_count(number)} {state.replace('_', ' ')}" for state, number in states.most_common(4))
    return f"{_jobs(len(contexts))} ended: {said}"


def _kicker(contexts: Sequence[JobContext]) -> str:
    ends = [context.job["end_s"] for context in contexts if context.job["end_s"] is not None]
    when = f", ended {format_moment(min(ends))} to {format_moment(max(ends))}" if ends else ""
    ids = [context.shown_id for context in contexts]
    return f"Jobs {', '.join(ids[:3])}{f' and {format_count(len(ids) - 3)} more' if len(ids) > 3 else ''}{when}"


def _storm_rows(contexts: Sequence[JobContext]) -> Iterator[FigureRow]:
    known = [context.elapsed_s for context in contexts if context.elapsed_s is not None]
    if known:
        span = f"{format_duration(min(known))} to {format_duration(max(known))}"
        yield FigureRow("Time", format_duration(sum(known) / len(known)), f"mean; {span}")
    yield FigureRow("GPU-hours", real_text(sum(context.gpu_hours or 0.0 for context in contexts)))
    energies = [context.metrics["energy_j"] for context in contexts if context.metrics.get("energy_j") is not None]
    if energies:
        yield FigureRow("Energy of the GPUs", f"{real_text(sum(energies) / 3.6e6)} kWh", _of(energies, contexts))
    used = [(context.metrics.get("mean_gpu_util_pct"), context.gpu_hours or 0.0) for context in contexts]
    measured = [(util_pct, hours) for util_pct, hours in used if util_pct is not None]
    weight = sum(hours for _, hours in measured)
    util = f"{sum(util * hours for util, hours in measured) / weight:.0f}%" if weight else NOT_KNOWN
    yield FigureRow("GPU utilisation", util, f"mean by GPU-hours{_of(measured, contexts, ', ')}" if weight else "")
    peaks = [context.metrics["hbm_peak_mib"] for context in contexts if context.metrics.get("hbm_peak_mib") is not None]
    peak = format_gib(max(peaks)) if peaks else NOT_KNOWN
    yield FigureRow("Peak of GPU memory", peak, f"the highest{_of(peaks, contexts, ', ')}" if peaks else "")


def _of(known: Sequence[Any], contexts: Sequence[JobContext], before: str = "") -> str:
    return "" if len(known) == len(contexts) else f"{before}of the {_jobs(len(known))} where it is known"


def _suggested(reports: Sequence[Report]) -> Part:
    """What jobs are told, with the one of most GPU-hours as the example; what a tenth of them is told comes first."""
    found: dict[str, list[tuple[Report, Suggestion]]] = {}
    for report in sorted(reports, key=lambda report: -(report.context.gpu_hours or 0.0)):
        for suggestion in report.conclusions.suggestions:
            found.setdefault(suggestion.rule, []).append((report, suggestion))
    order = {rule.name: place for place, rule in enumerate(rules())}

    def rank(name: str) -> tuple[bool, int]:
        is_common = len(found[name]) >= COMMON * len(reports)
        return not is_common, order[name] if is_common else -len(found[name])

    most = [found[name] for name in sorted(found, key=rank)[:MAX_SUGGESTIONS]]
    return Part("For next time", suggestions=tuple(_example(those, len(reports)) for those in most))


def _example(those: Sequence[tuple[Report, Suggestion]], of: int) -> Suggestion:
    report, suggestion = those[0]
    share = f"{_jobs(len(those))} of {format_count(of)}, such as {report.context.shown_id}"
    return Suggestion(suggestion.rule, suggestion.advice, f"{share}: {suggestion.reason}")


def _urgency(report: Report) -> tuple[bool, float, int]:
    """Failures first, then most GPU-hours unused."""
    context = report.context
    util_pct = context.metrics.get("mean_gpu_util_pct")
    unused = 0.0 if util_pct is None else (context.gpu_hours or 0.0) * (1 - min(util_pct, 100.0) / 100)
    return context.job["state"] not in FAILED_STATES, -unused, context.job_id


def _job_row(report: Report) -> FigureRow:
    context = report.context
    name = printable(context.job["name"] or "", 40)
    time = format_duration(context.elapsed_s) if context.elapsed_s is not None else NOT_KNOWN
    gpus = f"{format_count(context.gpu_count)} GPU{'s' * (context.gpu_count != 1)}"
    return FigureRow(context.shown_id, f"{name + ', ' if name else ''}{gpus}, {time}", report.conclusions.sentences[0])


def _total_rows(totals: Totals) -> Iterator[FigureRow]:
    failed = f"{format_count(totals.failed)} failed or reached their time limit" if totals.failed else ""
    yield FigureRow("Jobs", format_count(totals.jobs), failed)
    yield FigureRow("GPU-hours", real_text(totals.gpu_hours))
    if totals.energy_j is not None:
        yield FigureRow("Energy of the GPUs", f"{real_text(totals.energy_j / 3.6e6)} kWh")
    util = NOT_KNOWN if totals.util_pct is None else f"{totals.util_pct:.0f}%"
    yield FigureRow("GPU utilisation", util, "" if totals.util_pct is None else "mean by GPU-hours, where it is known")


def _trend(totals: Totals) -> tuple[str, str]:
    busy = "" if totals.util_pct is None else f", GPUs busy {totals.util_pct:.0f}%"
    return _hours(totals.gpu_hours), f"{_jobs(totals.jobs)}{busy}"


def _week_summary(week: Week) -> str:
    totals = week.totals
    first = f"{_jobs(totals.jobs)} ran {_hours(totals.gpu_hours)}{_compared(week)}."
    if week.idle.gpu_hours >= 0.05 * totals.gpu_hours > 0:
        share = week.idle.gpu_hours / totals.gpu_hours
        return f"{first} GPUs that did nothing took {share:.0%} of that."
    if totals.util_pct is not None:
        return f"{first} The GPUs were busy {totals.util_pct:.0f}% of the time."
    return first


def _compared(week: Week) -> str:
    """With the mean of the weeks before that are known, where there was any job in them."""
    if not week.before:
        return ""
    usual = sum(totals.gpu_hours for _, totals in week.before) / len(week.before)
    if not usual:
        return ""
    change = week.totals.gpu_hours / usual - 1
    number = len(week.before)
    if abs(change) < 0.1:
        return f", about as much as in the week{'s' * (number > 1)} before"
    mean = "the week before" if number == 1 else f"the mean of the {number} weeks before"
    if change >= 1:
        return f", {change + 1:.1f} times {mean}"
    return f", {abs(change):.0%} {'more' if change > 0 else 'less'} than {mean}"


def _savings(week: Week) -> Part:
    texts: Mapping[str, tuple[Saving, str]] = {
        "GPUs that did nothing": (week.idle, "in {jobs}: ask for the GPUs that you use"),
        "Memory tier too large": (week.tier, "in {jobs} that a smaller one would have held"),
        "Time limits far off": (week.limit, "asked for by {jobs} beyond what they took; short limits start sooner"),
    }
    rows = [
        FigureRow(name, _hours(saving.gpu_hours), about.format(jobs=_jobs(saving.jobs)))
        for name, (saving, about) in texts.items()
        if saving.jobs
    ]
    known = (
        "Nothing that was measured" if week.totals.util_pct is not None else "Not known: your jobs were not measured"
    )
    return Part("What the suggestions would have saved", tuple(rows), note="" if rows else f"{known}.")


def _jobs(number: int) -> str:
    return f"{format_count(number)} job{'s' * (number != 1)}"


def _hours(hours: float) -> str:
    text = real_text(hours)
    return f"{text} GPU-hour{'s' * (text != '1')}"
