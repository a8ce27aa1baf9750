"""`almanac report`: what a job did with its GPUs, and what to ask for next time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.errors import AlmanacError, NotAllowedError
from almanac.units import format_count, format_duration
from cli.app import App
from cli.job_table import say_published
from cli.output import json_text, show_table
from cli.report_running import contexts_of, find_jobs, pending_json, pending_text
from cli.selection import COUNT
from cli.times import local_time, time_option

if TYPE_CHECKING:
    import pyarrow as pa

    from reports.job.context import JobContext
    from reports.job.site_choices import SiteChoices
    from telemetry.sources.live_jobs import LiveJob


@click.command("report")
@click.argument("job_ids", nargs=-1, metavar="[JOBID]...")
@click.option("--since", metavar="TIME", help="List the jobs that ended since then, one per line.")
@click.option("-u", "--user", metavar="USER", help="With --since: another user's jobs (operators).")
@click.option("-a", "--allusers", is_flag=True, help="With --since: everybody's jobs (operators).")
@click.option("-n", "--limit", type=COUNT, default=50, show_default=True, help="Newest jobs shown; 0: all.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write one job as a page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--jobstats", type=click.Choice(["json", "comment"]), help="Print one job as `jobstats --json`, or as AdminComment."
)
@click.option("--due", "is_due", is_flag=True, help="Mail the reports of jobs that have ended (operators; a timer).")
@click.option("--dry-run", "is_dry", is_flag=True, help="With --due: show what would be mailed.")
@click.option("--mail", "is_mail", is_flag=True, help="Send each report to the job's owner, now.")
@click.option(
    "--to", "preview_to", metavar="ADDRESS", help="With --mail: send it there instead, as a preview (operators)."
)
@click.pass_obj
def command(
    app: App,
    job_ids: tuple[str, ...],
    since: str | None,
    user: str | None,
    allusers: bool,
    limit: int,
    html_file: Path | None,
    as_json: bool,
    jobstats: str | None,
    is_due: bool,
    is_dry: bool,
    is_mail: bool,
    preview_to: str | None,
) -> int:
    """Show what a job did with its GPUs, and what to ask for next time.

    JOBID is 1234, a task 1234_5, tasks 1234_[1-3], a component 1234+1, or the id of an array or a heterogeneous job,
    which stands for all of it. For a job that still runs, the report has its figures so far. You see your own jobs;
    operators see everybody's. Without access to the store, you see your newest jobs as last published for you.
    docs/reports.md explains every line.
    """
    if is_due or is_dry:
        return _report_due(app, bool(job_ids or since), is_due, is_dry, as_json)
    if bool(job_ids) == bool(since):
        raise click.UsageError("name jobs, or give --since TIME")
    if (user or allusers) and not since:
        raise click.UsageError("-u and -a go with --since; a job id names its user")
    if is_mail and (since or html_file or as_json or jobstats):
        raise click.UsageError("--mail goes with job ids alone")
    if jobstats and since:
        raise click.UsageError("--jobstats goes with one job id")
    if preview_to is not None:
        _check_preview(app, is_mail, preview_to)
    if is_mail and not app.may_read_store:
        raise NotAllowedError(
            f"{app.caller} cannot read almanac's store, which records the mails",
            "use --html FILE for a page; if the site sends mail, a report comes after each GPU job",
        )
    if since:
        _show_since(app, _ended_since(app, since, user, allusers), limit, as_json, html_file)
        return 0
    chosen = find_jobs(app, job_ids)
    shown = chosen.newest(limit)
    if is_mail and (open_jobs := (*shown.running, *shown.pending)):
        raise AlmanacError(
            f"job {open_jobs[0].shown_id} has not ended, and a mail is about an ended job",
            "leave out --mail to see it now",
        )
    if jobstats and (open_jobs := (*shown.running, *shown.pending)):
        raise AlmanacError(
            f"job {open_jobs[0].shown_id} has not ended, and jobstats' summaries are of ended jobs",
            "leave out --jobstats to see it now",
        )
    found, error = contexts_of(app, shown)
    contexts = _with_site(app, found)
    if html_file:
        _write_page(html_file, contexts, shown.pending)
    elif is_mail:
        from cli.report_mail import send

        send(app, contexts, preview_to or "")
    elif jobstats:
        _print_jobstats(contexts, jobstats)
    elif as_json:
        _print_json(contexts, shown.pending)
    else:
        _show(contexts)
        for job in shown.pending:
            click.echo(pending_text(job))
    _say_older(len(chosen) - len(shown))
    if error:
        raise error
    return 0


def _with_site(app: App, contexts: Sequence[JobContext]) -> list[JobContext]:
    site = _site_choices(app)
    return [replace(each, site=site) for each in contexts]


def _site_choices(app: App) -> SiteChoices:
    """What the site adds to reports. Operators get a faulty rules.toml as an error, because they can correct it."""
    from reports.job.site_choices import choices_of

    found = choices_of(app.config)
    if found.rules_fault:
        if app.is_operator:
            raise found.rules_fault
        click.echo(f"warning: this report leaves out the site's own rules: {found.rules_fault}", err=True)
    return found


def _check_preview(app: App, is_mail: bool, preview_to: str) -> None:
    from cli.report_mail import check_preview

    if not is_mail:
        raise click.UsageError("--to goes with --mail")
    check_preview(app, preview_to)


def _show_since(app: App, job_ids: Sequence[int], limit: int, as_json: bool, html_file: Path | None) -> None:
    shown = job_ids[-limit:] if limit > 0 else job_ids
    contexts = _with_site(app, app.caller_jobs.contexts(shown, has_series=False))
    if html_file:
        _write_page(html_file, contexts)
    elif as_json:
        _print_json(contexts)
    else:
        _list(contexts)
        say_published(app)
    _say_older(len(job_ids) - len(shown))


def _say_older(number: int) -> None:
    if number:
        click.echo(f"{format_count(number)} older ones are not shown; --limit 0 shows all", err=True)


def _report_due(app: App, names_jobs: bool, is_due: bool, is_dry: bool, as_json: bool) -> int:
    from cli.report_due import run

    if names_jobs or not is_due:
        raise click.UsageError("--due goes alone, or with --dry-run or --json")
    return run(app, is_dry, as_json)


def _ended_since(app: App, since: str, user: str | None, allusers: bool) -> list[int]:
    """Raw ids of the GPU jobs that ended since then, oldest end first."""
    import pyarrow.compute as pc

    if allusers and not app.is_operator:
        raise NotAllowedError(f"{app.caller} is not an operator, and can see only their own jobs", "leave out -a")
    visible = app.visible_user(user)
    rows = app.caller_jobs.runs(None if allusers and not user else visible)
    since_s = time_option(since, app.now_s())
    rows = rows.filter((pc.field("end_s") >= since_s) & (pc.field("gpu_count") > 0)).sort_by("end_s")
    if app.caller_jobs.published_s is not None:
        rows = _published(rows)
    return [int(job_id) for job_id in dict.fromkeys(rows["job_id"].to_numpy().tolist())]


def _published(rows: pa.Table) -> pa.Table:
    """Runs that have a report; stderr says how many have none yet."""
    import pyarrow.compute as pc

    published = rows.filter(pc.field("has_report"))
    if awaited := rows.num_rows - published.num_rows:
        jobs = "1 more job has" if awaited == 1 else f"{format_count(awaited)} more jobs have"
        click.echo(f"{jobs} ended since then, with no report published yet: try again in half an hour", err=True)
    return published


def _write_page(path: Path, contexts: Sequence[JobContext], pending: Sequence[LiveJob] = ()) -> None:
    """For owner and group, in another user's folder for the owner alone."""
    from reports.job.report import render_page
    from telemetry.store.atomic import write_output

    if pending and not contexts:
        raise AlmanacError(pending_text(pending[0]), "ask again after it starts")
    if len(contexts) != 1:
        raise click.UsageError(f"--html takes one job, and {format_count(len(contexts))} were found: name one")
    try:
        if path.exists() and not path.is_file():
            raise AlmanacError(f"{path}: exists and is not a regular file", "name another file")
        write_output(path, render_page(contexts[0]).encode("utf-8"))
    except OSError as error:
        raise AlmanacError(f"{path}: cannot be written: {error.strerror}", "name another file") from error


def _print_json(contexts: Sequence[JobContext], pending: Sequence[LiveJob] = ()) -> None:
    from reports.job.report import to_json

    click.echo(json_text([*map(to_json, contexts), *map(pending_json, pending)]))


def _print_jobstats(contexts: Sequence[JobContext], form: str) -> None:
    from reports.job.jobstats import jobstats_comment, jobstats_document

    if len(contexts) != 1:
        raise click.UsageError(f"--jobstats takes one job, and {format_count(len(contexts))} were found: name one")
    (context,) = contexts
    if form == "comment":
        click.echo(jobstats_comment(context))
    else:
        click.echo(json.dumps(jobstats_document(context), sort_keys=True, indent=4, allow_nan=False))


def _show(contexts: Sequence[JobContext]) -> None:
    from rich.console import Console

    from reports.job.terminal import render_terminal

    width = shutil.get_terminal_size((80, 24)).columns
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for context in contexts:
        console.print(render_terminal(context, width))


def _list(contexts: Sequence[JobContext]) -> None:
    from reports.job.report import report_of

    if not contexts:
        click.echo("no GPU jobs ended since then; see -u and -a")
        return
    rows = [
        [
            context.shown_id,
            context.job["name"] or "",
            "-" if context.job["end_s"] is None else local_time(context.job["end_s"]),
            format_count(context.gpu_count),
            "-" if context.elapsed_s is None else format_duration(context.elapsed_s),
            report_of(context).conclusions.headline,
        ]
        for context in contexts
    ]
    show_table(["job", "name", "ended", "GPUs", "time", "in short"], rows, right=("job", "GPUs", "time"))
