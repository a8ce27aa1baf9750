"""Mails about several jobs: a burst of them, such as an array's tasks, and a user's week."""

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
from reports.mail.week import FAILED_STATES, Saving, Totals, Week, week_of
from telemetry.store.cluster_store import ClusterStore

COMMON = 0.1
"""Suggestions for at least this share of the jobs come first, in the order of the rules."""
LISTED = 20
"""Most jobs that the mail about a burst lists."""


@dataclass(frozen=True)
class Part:
    """A card of a digest, or a section of its text. separator: stands between a row's value and what it is about."""

    title: str
    rows: tuple[FigureRow, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    note: str = ""
    separator: str = ", "


def render_burst(contexts: Sequence[JobContext], config: Config) -> Rendered:
    """One mail about many jobs of one user. The contexts need no series. Raises ValueError if there are none."""
    if not contexts:
        raise ValueError("a digest of no jobs")
    reports = [report_of(context) for context in contexts]
    summary = f"{_ended(contexts)}. They used {_hours(sum(context.gpu_hours or 0.0 for context in contexts))}."
    listed = sorted(reports, key=_urgency)[:LISTED]
    more = len(reports) - len(listed)
    rest = f"{format_count(more)} more are not listed. `almanac report JOBID` shows any of them." if more else ""
    parts = [
        _suggested(reports),
        Part("Figures", tuple(_burst_rows(contexts))),
        Part("Jobs (failed ones first, then by unused GPU-hours)", tuple(map(_job_row, listed)), (), rest, ": "),
    ]
    given = _site_given(contexts[0].cluster, config, contexts)
    return _rendered(given, _burst_subject(contexts), summary, _kicker(contexts), parts)


def render_weekly(store: ClusterStore, user: str, config: Config, now_s: int) -> Rendered | None:
    """The mail about the user's GPU jobs of the last whole week (Monday to Sunday, UTC); None if none ended.

    The mail is the same at any time of the following week. Raises StoreError.
    """
    week = week_of(store, user, config, now_s)
    if week is None:
        return None
    named = build(store, [*week.best, *week.worst], config, now_s, has_series=False)
    reports = {context.job_id: report_of(context) for context in named}
    worst = [reports[job_id] for job_id in week.worst if job_id in reports]
    best = [reports[job_id] for job_id in week.best if job_id in reports]
    parts = [
        Part("Figures", tuple(_total_rows(week.totals))),
        Part("Earlier weeks", tuple(FigureRow(span.name, *_trend(totals)) for span, totals in week.before)),
        Part("Your best jobs", tuple(map(_job_row, best)), separator=": "),
        Part("Jobs to improve", tuple(map(_job_row, worst)), separator=": "),
        _suggested(worst),
        _savings(week),
    ]
    kicker = f"Week {week.span.name}: {format_moment(week.span.start_s)} to {format_moment(week.span.end_s)}"
    totals = week.totals
    subject = f"Your GPU week {week.span.name}: {_jobs(totals.jobs)}, {_hours(totals.gpu_hours)}"
    return _rendered(_site_given(store.cluster, config, named), subject, _week_summary(week), kicker, parts)


def _site_given(cluster: str, config: Config, contexts: Sequence[JobContext]) -> dict[str, Any]:
    """What the templates show of the site. job_urls: its first link for each job, by the id that Slurm shows."""
    links = {context.shown_id: context.site.links_of(context.job, context.cluster) for context in contexts}
    return {
        "cluster": printable(cluster, 60),
        "links": (),
        "help_url": config.site.help_url,
        "job_urls": {shown_id: own[0].url for shown_id, own in links.items() if own},
        "version": __version__,
    }


def _rendered(site: Mapping[str, Any], subject: str, summary: str, kicker: str, parts: Sequence[Part]) -> Rendered:
    given: dict[str, Any] = {
        **site,
        "subject": printable(subject, MAX_SUBJECT),
        "summary": summary,
        "kicker": kicker,
        "parts": [part for part in parts if part.rows or part.suggestions or part.note],
    }
    text = templates().get_template("digest.txt.j2").render(**given)
    return Rendered(given["subject"], text, render_html("digest.html.j2", **given, is_mail=True), {})


def _burst_subject(contexts: Sequence[JobContext]) -> str:
    arrays = {context.job["array_job_id"] for context in contexts}
    names = {context.job["name"] for context in contexts}
    only = names.pop() if len(names) == 1 else None
    name = "" if only is None else f" ({printable(only, 40)})"
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


def _burst_rows(contexts: Sequence[JobContext]) -> Iterator[FigureRow]:
    known = [context.elapsed_s for context in contexts if context.elapsed_s is not None]
    if known:
        span = f"{format_duration(min(known))} to {format_duration(max(known))}"
        yield FigureRow("Run time", format_duration(sum(known) / len(known)), f"on average; {span}")
    yield FigureRow("GPU-hours", real_text(sum(context.gpu_hours or 0.0 for context in contexts)))
    energies = [energy_j for each in contexts if (energy_j := each.metrics.get("energy_j")) is not None]
    if energies:
        yield FigureRow("GPU energy", f"{real_text(sum(energies) / 3.6e6)} kWh", _of(energies, contexts))
    used = [(context.metrics.get("mean_gpu_util_pct"), context.gpu_hours or 0.0) for context in contexts]
    measured = [(util_pct, hours) for util_pct, hours in used if util_pct is not None]
    weight = sum(hours for _, hours in measured)
    util = f"{sum(util * hours for util, hours in measured) / weight:.0f}%" if weight else NOT_KNOWN
    yield FigureRow(
        "GPU utilization", util, f"average weighted by GPU-hours{_of(measured, contexts, ', ')}" if weight else ""
    )
    peaks = [peak_mib for each in contexts if (peak_mib := each.metrics.get("hbm_peak_mib")) is not None]
    peak = format_gib(max(peaks)) if peaks else NOT_KNOWN
    yield FigureRow("Peak GPU memory", peak, f"the highest{_of(peaks, contexts, ', ')}" if peaks else "")


def _of(known: Sequence[Any], contexts: Sequence[JobContext], before: str = "") -> str:
    return "" if len(known) == len(contexts) else f"{before}known for {_jobs(len(known))}"


def _suggested(reports: Sequence[Report]) -> Part:
    """The most important suggestions, each with the job of most GPU-hours as its example. See COMMON."""
    found: dict[str, list[tuple[Report, Suggestion]]] = {}
    for report in sorted(reports, key=lambda report: -(report.context.gpu_hours or 0.0)):
        for suggestion in report.conclusions.suggestions:
            found.setdefault(suggestion.rule, []).append((report, suggestion))
    own = reports[0].context.site.rules.rules if reports else ()
    order = {rule.name: place for place, rule in enumerate(own)}

    def rank(name: str) -> tuple[bool, int]:
        is_common = len(found[name]) >= COMMON * len(reports)
        return not is_common, order[name] if is_common else -len(found[name])

    most = [found[name] for name in sorted(found, key=rank)[:MAX_SUGGESTIONS]]
    return Part("For next time", suggestions=tuple(_example(those, len(reports)) for those in most))


def _example(those: Sequence[tuple[Report, Suggestion]], of: int) -> Suggestion:
    report, suggestion = those[0]
    share = f"{format_count(len(those))} of {_jobs(of)}, such as {report.context.shown_id}"
    return Suggestion(suggestion.rule, suggestion.advice, f"{share}: {suggestion.reason}")


def _urgency(report: Report) -> tuple[bool, float, int]:
    """A sort key: failed jobs first, then the jobs with the most unused GPU-hours."""
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
        yield FigureRow("GPU energy", f"{real_text(totals.energy_j / 3.6e6)} kWh")
    util = NOT_KNOWN if totals.util_pct is None else f"{totals.util_pct:.0f}%"
    yield FigureRow(
        "GPU utilization", util, "" if totals.util_pct is None else "average weighted by GPU-hours, over measured jobs"
    )


def _trend(totals: Totals) -> tuple[str, str]:
    busy = "" if totals.util_pct is None else f", GPUs busy {totals.util_pct:.0f}%"
    return _hours(totals.gpu_hours), f"{_jobs(totals.jobs)}{busy}"


def _week_summary(week: Week) -> str:
    totals = week.totals
    first = f"You ran {_jobs(totals.jobs)} with {_hours(totals.gpu_hours)}{_compared(week)}."
    if week.idle.gpu_hours >= 0.05 * totals.gpu_hours > 0:
        share = week.idle.gpu_hours / totals.gpu_hours
        return f"{first} GPUs that did nothing took {share:.0%} of these hours."
    if totals.util_pct is not None:
        return f"{first} Your GPUs were busy {totals.util_pct:.0f}% of the time."
    return first


def _compared(week: Week) -> str:
    """How the week compares with the mean of the known weeks before it; "" without a job in these."""
    if not week.before:
        return ""
    usual = sum(totals.gpu_hours for _, totals in week.before) / len(week.before)
    if not usual:
        return ""
    change = week.totals.gpu_hours / usual - 1
    number = len(week.before)
    mean = "the week before" if number == 1 else f"the average of the {number} weeks before"
    if abs(change) < 0.1:
        return f", about as much as {mean}"
    if change >= 1:
        return f", {change + 1:.1f} times {mean}"
    return f", {abs(change):.0%} {'more' if change > 0 else 'less'} than {mean}"


def _savings(week: Week) -> Part:
    texts: Mapping[str, tuple[Saving, str]] = {
        "GPUs that did nothing": (week.idle, "in {jobs}; ask only for GPUs that you use"),
        "Memory tier too large": (week.tier, "in {jobs} that fit in a smaller tier"),
        "Time limit too long": (week.limit, "requested by {jobs} but not used; short jobs can start earlier"),
    }
    rows = [
        FigureRow(name, _hours(saving.gpu_hours), about.format(jobs=_jobs(saving.jobs)))
        for name, (saving, about) in texts.items()
        if saving.jobs
    ]
    none = "Nothing." if week.totals.util_pct is not None else "Not known, because your jobs were not measured."
    return Part("What the suggestions would have saved", tuple(rows), note="" if rows else none)


def _jobs(number: int) -> str:
    return f"{format_count(number)} job{'s' * (number != 1)}"


def _hours(hours: float) -> str:
    text = real_text(hours)
    return f"{text} GPU-hour{'s' * (text != '1')}"
