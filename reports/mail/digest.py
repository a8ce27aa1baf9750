"""Mails about several jobs: like runs, a burst of jobs, such as an array's tasks, and a user's week."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from almanac import __version__
from almanac.config import Config
from almanac.units import counted, format_count, format_duration, format_gib, format_moment, printable, span_text
from reports.job.build import build_runs
from reports.job.evidence import NOT_KNOWN, JobContext, real_text
from reports.job.job_report import FigureRow, Suggestion
from reports.job.render import MAX_SUBJECT, Rendered, render_html, templates
from reports.mail.cpu_jobs import cpu_suggestions
from reports.mail.families import (
    DigestJob,
    JobFamily,
    SharedAdvice,
    families_of,
    first_statement,
    job_of,
    said_states,
    shared_advice,
    sum_hours,
    time_limits,
    told_of_digest,
)
from reports.mail.record import Told
from reports.mail.week import Saving, Totals, Week, WeekSpan, best_of, last_week, week_of
from telemetry.site import Site
from telemetry.store.store import ClusterStore

LISTED = 10
"""Most job families, and most failed jobs, that a digest lists."""
SLICE = 500
"""Jobs of a week that are read together."""


@dataclass(frozen=True)
class FamilyLine:
    """A row of the table of job families, as texts. about: how its jobs ended, and what is advised."""

    name: str
    jobs: str
    gpu_hours: str
    unused: str
    about: str


@dataclass(frozen=True)
class Part:
    """A card of a digest, or a section of its text. separator: stands between a row's value and what it is about."""

    title: str
    rows: tuple[FigureRow, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    families: tuple[FamilyLine, ...] = ()
    note: str = ""
    separator: str = ", "

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.suggestions or self.families or self.note)


@dataclass(frozen=True)
class Digest:
    """A rendered digest, and what it tells about job families."""

    rendered: Rendered
    told: frozenset[Told]


def render_burst(contexts: Sequence[JobContext], config: Config) -> Digest:
    """One mail about many jobs of one user. The contexts need no series. Raises ValueError if there are none."""
    if not contexts:
        raise ValueError("a digest of no jobs")
    jobs = [job_of(context) for context in contexts]
    families, advice = families_of(jobs), shared_advice(jobs)
    headline = headline_of(jobs, advice)
    parts = [
        _advised(advice, jobs),
        _family_part(families, advice),
        _failed_part(jobs),
        _limits_part(families),
        Part("Figures", tuple(_burst_rows(contexts)), note="`almanac report JOBID` shows the report of each job."),
    ]
    summary = f"{headline[:1].upper()}{headline[1:]}."
    subject = f"{_burst_name(contexts, families)}: {headline}"
    site = site_given(contexts[0].cluster, config, jobs)
    rendered = render_parts(site, subject, (summary, _used(jobs)), _kicker(contexts), parts)
    return Digest(rendered, told_of_digest(jobs, advice))


def render_weekly(store: ClusterStore, user: str, config: Config, now_s: int) -> Digest | None:
    """The mail about the user's jobs of the last whole week (Monday to Sunday, UTC).

    None if no GPU job ended, and there is nothing to change in others. The mail is the same at any time of the
    following week. Raises StoreError.
    """
    week, span, around = week_of(store, user, config, now_s), last_week(now_s), Site.of(store, config, now_s)
    kicker = f"Week {span.name}: {format_moment(span.start_s)} to {format_moment(span.end_s)}"
    without_gpus = Part("Your jobs without GPUs", suggestions=cpu_suggestions(around, user, span))
    if week is None:
        return None if without_gpus.is_empty else _cpu_week(store.cluster, config, span, kicker, without_gpus)
    jobs: list[DigestJob] = []
    for first in range(0, len(week.runs), SLICE):
        part = week.runs[first : first + SLICE]
        jobs += map(job_of, build_runs(around, part, has_series=False))
    families, advice = families_of(jobs), shared_advice(jobs)
    parts = [
        _advised(advice, jobs),
        _family_part(families, advice),
        without_gpus,
        _limits_part(families),
        Part("Your best jobs", tuple(map(_job_row, best_of(jobs))), separator=": "),
        Part("Figures", tuple(_total_rows(week.totals))),
        _savings(week),
        Part("Earlier weeks", tuple(FigureRow(span.name, *_trend(totals)) for span, totals in week.before)),
    ]
    used = f"{_jobs(week.totals.jobs)}, {_hours(week.totals.gpu_hours)}"
    subject = f"Your GPU week {week.span.name}: {used}; {headline_of(jobs, advice)}"
    site = site_given(store.cluster, config, jobs)
    return Digest(render_parts(site, subject, (_week_summary(week),), kicker, parts), told_of_digest(jobs, advice))


def _cpu_week(cluster: str, config: Config, span: WeekSpan, kicker: str, part: Part) -> Digest:
    """The mail about a week without GPU jobs."""
    action = first_statement(part.suggestions[0].advice)
    subject = f"Your CPU week {span.name}: {action[:1].lower()}{action[1:]}"
    given = {**site_given(cluster, config, ()), "ran": "jobs"}
    return Digest(render_parts(given, subject, (f"{action}.",), kicker, [part]), frozenset())


def site_given(cluster: str, config: Config, jobs: Sequence[DigestJob]) -> dict[str, Any]:
    """The site's part of the templates' input. job_urls: its first link for each job, by the id that Slurm shows."""
    return {
        "cluster": printable(cluster, 60),
        "links": (),
        "help_url": config.site.help_url,
        "job_urls": {job.shown_id: job.url for job in jobs if job.url},
        "version": __version__,
    }


def render_parts(
    site: Mapping[str, Any], subject: str, summary: Sequence[str], kicker: str, parts: Sequence[Part]
) -> Rendered:
    """summary: the first line, and the text that follows it, if any."""
    given: dict[str, Any] = {
        **site,
        "subject": printable(subject, MAX_SUBJECT),
        "summary": summary,
        "kicker": kicker,
        "parts": [part for part in parts if not part.is_empty],
    }
    text = templates().get_template("digest.txt.j2").render(**given)
    return Rendered(given["subject"], text, render_html("digest.html.j2", **given, is_mail=True), {})


def headline_of(jobs: Sequence[DigestJob], advice: Sequence[SharedAdvice]) -> str:
    """The most important fact about these jobs: "2 of 12 failed; ask for --gpu-tier=hbm40g instead of hbm80g"."""
    unmeasured = sum(job.unused_hours is None for job in jobs)
    said = [", ".join(failures)] if (failures := list(_failures(jobs))) else []
    if unmeasured == len(jobs):
        said.append("not assessed")
    if advice:
        said.append(advice[0].short)
    elif limits := time_limits(families_of(jobs)):
        whose = f" for {limits[0].name}" if any(job.name_key != jobs[0].name_key for job in jobs) else ""
        said.append(f"ask for less time{whose} (--time)")
    return "; ".join(said) or (f"{_jobs(unmeasured)} not assessed" if unmeasured else "OK, nothing to change")


def _failures(jobs: Sequence[DigestJob]) -> Iterator[str]:
    """ "2 of 15 failed", "1 timed out"."""
    stopped, of = sum(job.state == "TIMEOUT" for job in jobs), f" of {format_count(len(jobs))}"
    by_node = sum(job.is_node_failure for job in jobs)
    failed = sum(job.has_failed for job in jobs) - stopped - by_node
    for number, what in ((failed, "failed"), (stopped, "timed out"), (by_node, "ended by a node")):
        if number:
            yield f"{format_count(number)}{of} {what}"
            of = ""


def _burst_name(contexts: Sequence[JobContext], families: Sequence[JobFamily]) -> str:
    """ "12 runs of train-bert-#", with the array's id if they are one array, or "17 GPU jobs"."""
    if len(families) != 1:
        return f"{format_count(len(contexts))} GPU jobs"
    arrays = {context.job["array_job_id"] for context in contexts}
    array = arrays.pop() if len(arrays) == 1 else None
    of_array = "" if array is None else f" (array {array})"
    return f"{counted(len(contexts), 'run')} of {families[0].name}{of_array}"


def _used(jobs: Sequence[DigestJob]) -> str:
    """ "24 jobs ended: 20 completed, 4 failed. They took 12 GPU-hours, 3 of them unused."."""
    hours = sum_hours(job.gpu_hours for job in jobs)
    known = [job.unused_hours for job in jobs if job.unused_hours is not None]
    unused = f", {real_text(sum(known))} of them unused" if known else ""
    missing = f" ({_jobs(len(jobs) - len(known))} not assessed)" if known and len(known) < len(jobs) else ""
    return f"{_jobs(len(jobs))} ended: {said_states(jobs)}. They took {_hours(hours)}{unused}{missing}."


def _kicker(contexts: Sequence[JobContext]) -> str:
    ends = [context.job["end_s"] for context in contexts if context.job["end_s"] is not None]
    when = f", ended {format_moment(min(ends))} to {format_moment(max(ends))}" if ends else ""
    ids = [context.shown_id for context in contexts]
    return f"Jobs {', '.join(ids[:3])}{f' and {format_count(len(ids) - 3)} more' if len(ids) > 3 else ''}{when}"


def _advised(advice: Sequence[SharedAdvice], jobs: Sequence[DigestJob]) -> Part:
    return Part(
        "For next time", suggestions=tuple(Suggestion(each.rule, each.advice, _why(each, jobs)) for each in advice)
    )


def _why(advice: SharedAdvice, jobs: Sequence[DigestJob]) -> str:
    example = f"Job {advice.jobs[0].shown_id}: " if len(advice.jobs) > 1 else ""
    return f"{advice.where(jobs)}; {_hours(advice.gpu_hours)}. {example}{advice.reason}"


def _family_part(families: Sequence[JobFamily], advice: Sequence[SharedAdvice]) -> Part:
    """A row for each family, if there is more than one."""
    if len(families) < 2:
        return Part("Job families")
    rest = families[LISTED:]
    jobs, hours = sum(len(each.jobs) for each in rest), sum(each.gpu_hours for each in rest)
    note = f"Not listed: {_jobs(jobs)} of {_other(len(rest))}, {_hours(hours)}." if rest else ""
    lines = tuple(_family_line(each, advice) for each in families[:LISTED])
    return Part("Job families, most unused GPU-hours first", families=lines, note=note)


def _family_line(family: JobFamily, advice: Sequence[SharedAdvice]) -> FamilyLine:
    ids = {job.job_id for job in family.jobs}
    numbers = [number for number, each in enumerate(advice, 1) if ids & {job.job_id for job in each.jobs}]
    about = [family.states]
    if 0 < family.unmeasured < len(family.jobs):
        about.append(f"{format_count(family.unmeasured)} not assessed")
    if numbers:
        rest = f" and {', '.join(map(str, numbers[1:]))}" if numbers[1:] else ""
        about.append(f"advice {numbers[0]} ({advice[numbers[0] - 1].short}){rest}")
    unused = family.unused_hours
    return FamilyLine(
        f"{family.name}, {family.gpus}",
        format_count(len(family.jobs)),
        real_text(family.gpu_hours),
        "unknown" if unused is None else real_text(unused),
        "; ".join(about),
    )


def _failed_part(jobs: Sequence[DigestJob]) -> Part:
    failed = sorted((job for job in jobs if job.has_failed), key=lambda job: (-(job.gpu_hours or 0.0), job.job_id))
    more = len(failed) - LISTED
    note = f"{format_count(more)} more failed." if more > 0 else ""
    return Part("Failed jobs", tuple(map(_job_row, failed[:LISTED])), note=note, separator=": ")


def _limits_part(families: Sequence[JobFamily]) -> Part:
    rows = [
        FigureRow(
            each.name,
            f"{_jobs(len(each.jobs))} asked for {_hours(each.asked_hours)}, used {real_text(each.used_hours)}",
            each.spans,
        )
        for each in time_limits(families)
    ]
    note = "Slurm can start jobs with shorter limits (--time) earlier. Leave room for a longer run." if rows else ""
    return Part("Time limits: asked for, not used", tuple(rows), note=note, separator="; ")


def _burst_rows(contexts: Sequence[JobContext]) -> Iterator[FigureRow]:
    known = [context.elapsed_s for context in contexts if context.elapsed_s is not None]
    if known:
        span = span_text(format_duration(min(known)), format_duration(max(known)))
        yield FigureRow("Run time", format_duration(sum(known) / len(known)), f"on average; {span}")
    yield FigureRow("GPU-hours", real_text(sum(context.gpu_hours or 0.0 for context in contexts)))
    energies = [energy_j for each in contexts if (energy_j := each.metrics.get("energy_j")) is not None]
    if energies:
        yield FigureRow("GPU energy", f"{real_text(sum(energies) / 3.6e6)} kWh", _of(energies, contexts))
    used = [(context.metrics.get("mean_gpu_util_pct"), context.gpu_hours or 0.0) for context in contexts]
    measured = [(util_pct, hours) for util_pct, hours in used if util_pct is not None]
    weight = sum(hours for _, hours in measured)
    util = f"{sum(util * hours for util, hours in measured) / weight:.0f}%" if weight else NOT_KNOWN
    yield FigureRow("GPU utilization", util, f"of the GPU-hours{_of(measured, contexts, ', ')}" if weight else "")
    peaks = [peak_mib for each in contexts if (peak_mib := each.metrics.get("hbm_peak_mib")) is not None]
    peak = format_gib(max(peaks)) if peaks else NOT_KNOWN
    yield FigureRow("Peak GPU memory", peak, f"the highest{_of(peaks, contexts, ', ')}" if peaks else "")


def _of(known: Sequence[Any], contexts: Sequence[JobContext], before: str = "") -> str:
    return "" if len(known) == len(contexts) else f"{before}known for {_jobs(len(known))}"


def _job_row(job: DigestJob) -> FigureRow:
    name = printable(job.name, 40)
    time = format_duration(job.elapsed_s) if job.elapsed_s is not None else NOT_KNOWN
    about = f"{name + ', ' if name else ''}{counted(job.gpu_count, 'GPU')}, {time}"
    return FigureRow(job.shown_id, about, next(iter(job.conclusions.sentences), job.conclusions.headline))


def _total_rows(totals: Totals) -> Iterator[FigureRow]:
    failed = f"{format_count(totals.failed)} failed or reached their time limit" if totals.failed else ""
    yield FigureRow("Jobs", format_count(totals.jobs), failed)
    unmeasured = totals.gpu_hours - totals.measured_hours
    missing = f"{real_text(unmeasured)} of them not assessed" if unmeasured > 0.005 * totals.gpu_hours else ""
    yield FigureRow("GPU-hours", real_text(totals.gpu_hours), missing)
    if totals.energy_j is not None:
        yield FigureRow("GPU energy", f"{real_text(totals.energy_j / 3.6e6)} kWh")
    util = NOT_KNOWN if totals.util_pct is None else f"{totals.util_pct:.0f}%"
    yield FigureRow("GPU utilization", util, "" if totals.util_pct is None else "of the GPU-hours of measured jobs")


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
    """Compare the week with the mean of the known weeks before it; "" without a job in these."""
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
    }
    rows = [
        FigureRow(name, _hours(saving.gpu_hours), about.format(jobs=_jobs(saving.jobs)))
        for name, (saving, about) in texts.items()
        if saving.jobs
    ]
    none = "Nothing." if week.totals.util_pct is not None else "Not known, because your jobs were not measured."
    return Part("What the suggestions would have saved", tuple(rows), note="" if rows else none)


def _other(number: int) -> str:
    return "1 other job family" if number == 1 else f"{format_count(number)} other job families"


def _jobs(number: int) -> str:
    return counted(number, "job")


def _hours(hours: float) -> str:
    text = real_text(hours)
    return f"{text} GPU-hour{'s' * (text != '1')}"
