"""Answer for any job at any time: a report, or what is known without one. The terminal, mail, and Python ask here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from almanac.errors import AlmanacError, CommandError, StoreError
from almanac.records import Counts
from almanac.units import format_duration, printable
from reports.job.job_report import FigureRow, JobReport, JobRow
from reports.job.render import json_of
from reports.job.sources import FoundJobs, JobState, KnownRuns, SlurmJob, accounting_of, cluster_of, find_jobs, full_row
from slurm.error_file import ROOT, error_path, last_lines, submitted_file
from slurm.named_jobs import NamedJob
from slurm.states import JOB_FAILED, exit_text

if TYPE_CHECKING:
    from reports.job.evidence import JobContext
    from slurm.queued_job import QueuedJob
    from telemetry.ingest import Advance
    from telemetry.site import Site
    from telemetry.store.store import ClusterStore

    Show = Callable[[str], AbstractContextManager[Advance]]


class CallerReports(KnownRuns, Protocol):
    """The runs and reports that `answer_jobs` takes from the store, or of what was published for the caller."""

    def reports(self, job_ids: Sequence[int]) -> list[JobReport]: ...


@dataclass(frozen=True)
class JobAnswer:
    """The answer for one job: its report, or without one its state.

    note: why figures are missing, or "". error_file, error_lines: the end of the error output of a job of the caller
    that failed; only in the owner's own process, and never in a report.
    """

    report: JobReport | None = None
    state: JobState | None = None
    note: str = ""
    error_file: str = ""
    error_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answers:
    """Answers about jobs. jobs: oldest first, then those without a report. older: number left out by the limit."""

    jobs: tuple[JobAnswer, ...]
    older: int = 0

    @property
    def reports(self) -> list[JobReport]:
        return [each.report for each in self.jobs if each.report is not None]

    @property
    def states(self) -> list[JobState]:
        return [each.state for each in self.jobs if each.state is not None]


def answer_jobs(
    site: Site, known: CallerReports, wanted: Sequence[NamedJob], *, limit: int = 0, show: Show | None = None
) -> Answers:
    """Return an answer for each job that is named. known: what almanac keeps. limit: newest reports; 0: all.

    Raises the errors of the store and of published files only if nothing else answers.
    """
    found = find_jobs(site, known, wanted)
    shown = found.newest(limit)
    answers, states = _stored(known, shown), list(shown.states)
    measured: dict[int, JobContext] = {}
    note = ""
    if shown.running or any(job.row["gpu_count"] for job in shown.ended):
        measured, note = _measured(site, shown, show)
    contexts = [measured.get(job.row["job_id"]) or context_of(site, job) for job in shown.ended]
    contexts += [measured.get(job.job_id) or _running(site, job) for job in shown.running]
    is_silent = {job.row["job_id"] for job in shown.ended if job.silence}
    answers += [_answer(site, context, note, is_silent=context.job_id in is_silent) for context in contexts]
    answers = _with_errors(site, _with_steps(site, answers, wanted), found)
    return Answers((*answers, *(JobAnswer(state=state) for state in states)), len(found) - len(shown))


def _stored(known: CallerReports, found: FoundJobs) -> list[JobAnswer]:
    try:
        return [JobAnswer(report) for report in (known.reports(found.stored) if found.stored else [])]
    except StoreError as error:
        if not (found.ended or found.running or found.states or len(found.stored) > 1):
            raise
        return [JobAnswer(state=JobState("no_answer", "", str(error), error.hint))]


def _answer(site: Site, context: JobContext, note: str, *, is_silent: bool) -> JobAnswer:
    from reports.job.conclusions import report_of

    report = report_of(context)
    notes = [note] if note and report.gpu_count and not context.metrics else []
    notes += ["CPU time and memory are missing, because Slurm's accounting did not answer"] if is_silent else []
    return JobAnswer(report, note="; ".join(notes))


def _measured(site: Site, found: FoundJobs, show: Show | None) -> tuple[dict[int, JobContext], str]:
    """The contexts with figures by raw id, and why there are none of the others."""
    try:
        # The client package lacks what reads samples.
        from reports.job.build import ended_contexts, live_contexts
    except ModuleNotFoundError:
        return {}, ""
    kept = _open_store(site)
    contexts: list[JobContext] = []
    note = ""
    try:
        contexts += live_contexts(site, found.running, known=kept, show=show)
        contexts += ended_contexts(site, found.ended, known=kept, show=show)
    except AlmanacError as error:
        note = f"no GPU figures now: {printable(str(error), 300)}"
    return {context.job_id: context for context in contexts}, note


def _open_store(site: Site) -> ClusterStore | None:
    return site.store if site.may_read_store and (site.store_root / "store.json").exists() else None


def context_of(site: Site, job: SlurmJob) -> JobContext:
    """The evidence of a job that only Slurm has."""
    return _context(site, job.row, job.runs[:-1], is_live=job.row["end_s"] is None)


def _running(site: Site, job: QueuedJob) -> JobContext:
    return _context(site, full_row(job.row(site.now_s())), (), is_live=True)


def _context(site: Site, row: JobRow, earlier: Sequence[JobRow], *, is_live: bool) -> JobContext:
    from reports.job.evidence import JobContext
    from reports.job.rules import choices_of

    tiers, choices = site.config.tiers, choices_of(site.config)
    return JobContext(
        cluster_of(site), site.now_s(), row, tiers, earlier_runs=tuple(earlier), site=choices, is_live=is_live
    )


def _with_steps(site: Site, answers: list[JobAnswer], wanted: Sequence[NamedJob]) -> list[JobAnswer]:
    """The answers with a line about each step that is named, at the end of its job's figures."""
    asked: dict[str, list[str]] = {}
    for each in wanted:
        if each.step:
            asked.setdefault(each.text.rpartition(".")[0], []).append(each.step)
    reports = [each.report for each in answers if each.report and each.report.shown_id in asked]
    if not reports:
        return answers
    try:
        rows, _ = accounting_of(site).steps({(each.job_id, each.job["submit_s"]) for each in reports}, Counts())
    except CommandError:
        rows = []
    known = {(row["job_id"], row["step"]): row for row in rows}
    return [
        replace(each, report=replace(report, figures=(*report.figures, *more)))
        if (report := each.report)
        and (more := [_step(step, known.get((report.job_id, step))) for step in asked.get(report.shown_id, ())])
        else each
        for each in answers
    ]


def _step(step: str, row: Mapping[str, Any] | None) -> FigureRow:
    if not step.isdecimal():
        return FigureRow(f"Step {step}", "the job itself", "the figures are those of the whole job")
    if row is None:
        return FigureRow(f"Step {step}", "not known", "Slurm's accounting has no such step")
    start_s, end_s = row["start_s"], row["end_s"]
    ran = "" if start_s is None or end_s is None else f"ran {format_duration(end_s - start_s)}"
    about = [ran, exit_text(row["exit_code"], row["exit_signal"])]
    return FigureRow(f"Step {step}", printable(row["state"] or "not known", 40), ", ".join(filter(None, about)))


def plain_answer(answer: JobAnswer) -> dict[str, Any]:
    """The report or the state as values for JSON. expected_start_s is None if Slurm has no estimate."""
    if answer.report is not None:
        more = {"note": answer.note, "error_file": answer.error_file, "error_lines": list(answer.error_lines)}
        return {**json_of(answer.report), **{name: value for name, value in more.items() if value}}
    assert answer.state is not None  # one of both
    return {"job_id": (answer.state.job or {}).get("job_id"), "still_running": False, **vars(answer.state)}


def _with_errors(site: Site, answers: list[JobAnswer], found: FoundJobs) -> list[JobAnswer]:
    """The answers with the end of the error output of the caller's own jobs that failed; never for root."""
    jobs = [each.report.job for each in answers if each.report]
    failed = {job["job_id"]: job for job in jobs if job["state"] in JOB_FAILED and job["user"] == site.caller}
    if not failed or os.getuid() == ROOT:
        return answers
    runs = {(key, job["submit_s"]) for key, job in failed.items()}
    files = {key: (job.error_file, job.work_dir) for key, job in found.queued.items() if key in failed}
    if others := failed.keys() - files.keys():
        with suppress(CommandError):
            for run, (folder, line, file) in accounting_of(site).outputs(others).items():
                if run in runs:
                    files[run[0]] = (file or submitted_file(line), folder)
    paths = {key: error_path(*files[key], job) for key, job in failed.items() if key in files}
    tails = {key: lines for key, path in paths.items() if (lines := last_lines(path, os.getuid()))}
    return [
        replace(each, error_file=printable(paths[key], 200), error_lines=tails[key])
        if each.report and (key := each.report.job_id) in tails
        else each
        for each in answers
    ]
