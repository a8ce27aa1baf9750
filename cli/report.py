"""`almanac report`: what a job did with its GPUs, and what to ask for next time."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from almanac.atomic import write_output
from almanac.errors import AlmanacError
from almanac.published.files import usable
from almanac.submit_config import SITE
from almanac.units import format_count, format_duration, printable
from cli.app import COUNT, App, folded
from cli.output import json_text, progress, show_rich
from reports.job.answer import Answers, answer_jobs, plain_answer
from reports.job.job_report import JobReport
from reports.job.render import jobstats_comment, jobstats_document, render_page, render_terminal
from reports.job.sources import JobState, last_job
from slurm.named_jobs import named_jobs


@click.command("report")
@click.argument("job_ids", nargs=-1, metavar="[JOBID]...")
@click.option("-j", "--job", "options", multiple=True, hidden=True)
@click.option("--me", "is_me", is_flag=True, hidden=True)
@click.option("-n", "--limit", type=COUNT, default=50, show_default=True, help="Newest jobs shown; 0: all.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write one job as a page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--jobstats", type=click.Choice(["json", "comment"]), help="Print one job as `jobstats --json`, or as AdminComment."
)
@click.pass_obj
def command(
    app: App,
    job_ids: tuple[str, ...],
    options: tuple[str, ...],
    is_me: bool,
    limit: int,
    html_file: Path | None,
    as_json: bool,
    jobstats: str | None,
) -> int:
    """Show what a job did with its GPUs, and what to ask for next time; without JOBID, of the job you submitted last.

    JOBID is 1234, a task 1234_5, tasks 1234_[1-3], a component 1234+1, a step 1234.0, or the id of an array or a
    heterogeneous job, which stands for all of it. It answers at any time: a job that waits says why and until when, one
    that runs has its figures so far, and one that failed shows the end of its error output. You see your own jobs;
    operators see everybody's. docs/reports.md explains every line.
    """
    if is_me and (job_ids or options):
        raise click.UsageError("--me is your last job, so it goes without a job id")
    return _answer(app, (*job_ids, *options), limit=limit, html_file=html_file, as_json=as_json, jobstats=jobstats)


def _answer(
    app: App, texts: Sequence[str], *, limit: int, html_file: Path | None, as_json: bool, jobstats: str | None
) -> int:
    """Print the answers about jobs in the form chosen. Raises the error of the last job that nobody knows."""
    known = app.caller_jobs
    wanted = named_jobs(texts) or [last_job(app, known)]
    found = answer_jobs(app, known, wanted, limit=limit, show=lambda name: progress(f"read {name}"))
    if found.reports:
        app.check_rules()
    if html_file:
        _write_page(html_file, found)
    elif jobstats:
        _print_jobstats(_ended("--jobstats", found), jobstats)
    elif as_json:
        click.echo(json_text([plain_answer(each) for each in found.jobs]))
    else:
        _show(app, found)
    if found.older:
        click.echo(f"{format_count(found.older)} older ones are not shown; --limit 0 shows all", err=True)
    *others, last = [None, *(error for state in found.states if (error := state.error))]
    for error in filter(None, others):
        for line in (f"error: {printable(str(error), 1000)}", f"try: {printable(error.hint, 1000)}"):
            click.echo(folded(line, sys.stderr, "  "), err=True)
    if last is not None:
        raise last
    return 0


def _ended(option: str, found: Answers) -> JobReport:
    for answer in found.jobs:
        if answer.state or (answer.report and answer.report.still_running):
            shown = answer.state.shown_id if answer.state else answer.report.shown_id if answer.report else ""
            raise (answer.state and answer.state.error) or AlmanacError(
                f"job {shown} has not ended, and jobstats' summaries are of ended jobs",
                f"leave out {option} to see it now",
            )
    return _only(option, found.reports)


def _only(option: str, reports: Sequence[JobReport]) -> JobReport:
    if len(reports) != 1:
        raise click.UsageError(f"{option} takes one job, and {format_count(len(reports))} were found: name one")
    return reports[0]


def _write_page(path: Path, found: Answers) -> None:
    """For owner and group, in another user's folder for the owner alone."""
    if found.states and not found.reports:
        state = found.states[0]
        raise state.error or AlmanacError(state.message, "ask again after it starts")
    report = _only("--html", found.reports)
    try:
        if path.exists() and not path.is_file():
            raise AlmanacError(f"{path}: exists and is not a regular file", "name another file")
        write_output(path, render_page(report).encode("utf-8"))
    except OSError as error:
        raise AlmanacError(f"{path}: cannot be written: {error.strerror}", "name another file") from error


def _print_jobstats(report: JobReport, form: str) -> None:
    if form == "comment":
        click.echo(jobstats_comment(report))
    else:
        click.echo(json.dumps(jobstats_document(report), sort_keys=True, indent=4, allow_nan=False))


def _show(app: App, found: Answers) -> None:
    width = shutil.get_terminal_size((80, 24)).columns
    for answer in found.jobs:
        if answer.report is not None:
            show_rich(render_terminal(answer.report, width), width)
        if answer.note:
            click.echo(f"\n{_folded(answer.note[:1].upper() + answer.note[1:], width)}.")
        if answer.error_lines:
            click.echo(f"\nThe end of its error output ({answer.error_file}):")
            click.echo("\n".join(f"  {line}" for line in answer.error_lines))
        if answer.state and not answer.state.error:
            click.echo(_folded(f"{answer.state.message}{_sooner(app, answer.state)}", width))
            if answer.state.hint:
                click.echo(_folded(f"try: {answer.state.hint}", width))


def _sooner(app: App, state: JobState) -> str:
    """ " A job that is submitted now waits ... on h100": by the published waits; "" unless one is surely shorter.

    Where the waits of its own type are not predicted, it says so.
    """
    from slurm_hooks.advice.kinds import WAITS

    job, now_s = state.job or {}, app.now_s()
    file = usable(WAITS, app.config.hooks.advice_dir, SITE, now_s) if job.get("gpu_count_req") else None
    waits = file.told_of(int(job["gpu_count_req"]), now_s) if file else ()
    asked = {job.get("gpu_type"), job.get("partition"), *re.findall(r"[\w.-]+", str(job.get("constraints")))} - {None}
    types = file.types if file else ()
    own_types = {kind.name for kind in types if asked & {kind.gres, kind.constraint, kind.partition}}
    own = min((wait for wait in waits if wait.gpu_type in own_types), key=lambda wait: wait.low_s, default=None)
    if own is None:
        return " How long such jobs wait is not predicted: recent predictions did not hold." if own_types else ""
    sooner = [wait for wait in waits if wait.high_s < own.low_s]
    if not sooner:
        return ""
    faster = min(sooner, key=lambda wait: wait.wait_s)
    spans = [f"about {format_duration(wait.wait_s)}" for wait in (faster, own)]
    return f" A job that is submitted now waits {spans[0]} on {faster.gpu_type}, and {spans[1]} on {own.gpu_type}."


def _folded(text: str, width: int) -> str:
    return textwrap.fill(text, min(width, 100), break_long_words=False, break_on_hyphens=False)
