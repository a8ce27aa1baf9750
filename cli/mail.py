"""`almanac mail`: how often the caller wants reports by mail, and what operators and the timer do to send them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from almanac.errors import AlmanacError, BusyError, ConfigError, NotAllowedError
from almanac.names import is_address
from almanac.units import DAY_S, counted, format_count, format_duration, printable
from cli.app import App, CommandGroup, folded
from cli.output import local_time

if TYPE_CHECKING:
    from reports.mail.record import MailRecord
    from reports.mail.run import MailRun
    from telemetry.ingest import SourceName
    from telemetry.store.store import ClusterStore

WORDS = {
    "every": "one mail after each GPU job, or one for a burst of jobs",
    "useful": "a mail at once about failed jobs, idle GPUs, and new advice; the rest once a week",
    "digest": "one mail a week about all of your GPU jobs",
    "off": "no mail",
}
DEFAULT = "default"
STALE_S = DAY_S
"""The timer runs every minute; a choice made while it is down for a while still counts."""
UNTIL = "Until then, for no mail about a job: sbatch --comment=almanac:nomail"
FAULT = 5
"""Exit code if a source or the mail server failed; other commands use it for sources, too."""
SHOWN = 5
"""Mails that `almanac mail` shows."""
_BECAME = {
    "failed": "not taken yet, and tried again every 15 min. The mail server's answer about {to}: {words}",
    "skipped": "given up: the mail server did not take it for days. `almanac report` shows the job",
}
MOST_JOBS = 50
"""Jobs whose reports one `almanac mail send` sends."""


class _MailGroup(CommandGroup):
    """Takes each word of WORDS, and default, as a command that is not listed."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in (*WORDS, DEFAULT):
            return super().get_command(ctx, cmd_name)
        return click.Command(cmd_name, callback=lambda: _choose(ctx.obj, cmd_name))


@click.group("mail", cls=_MailGroup, invoke_without_command=True, subcommand_metavar=f"[{'|'.join(WORDS)}] | COMMAND")
@click.pass_context
def command(context: click.Context) -> None:
    """Show how often you get reports by mail, or choose it.

    every: after every GPU job; useful: at once if a job failed, left GPUs idle, or gives advice that is new to you this
    week, and the rest once a week; digest: once a week; off: never; default: what the site has chosen. Your choice is
    yours alone, and holds until you make another. For one job: sbatch --comment=almanac:nomail.
    """
    if context.invoked_subcommand is None:
        _show_choice(context.obj)


@command.command("run")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be mailed; ask, write, and send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def run(app: App, is_dry: bool, as_json: bool) -> int:
    """Mail the reports of the jobs that have ended since the last run. For a timer, each minute.

    Exit code 5: accounting, Prometheus, or the mail server failed; the next run goes on from there.
    """
    from reports.mail.record import MailRecord, record_path

    app.require_operator("reports are of everybody's jobs")
    store = app.store
    if is_dry:
        return _dry_run(app, store)
    try:
        with MailRecord(record_path(store.root)) as record:
            if not app.config.mail.server:
                record.start_now(store.cluster, app.now_s())
                click.echo("mail is off: mail.server is not set; jobs that end before it is get no mail")
                return 0
            outcome = mail_run(app, store, record).run()
    except BusyError as error:
        click.echo(f"{error}: it does what is due")
        return 0
    for fault in outcome.faults:
        click.echo(f"almanac: {printable(fault, 1000)}", err=True)
    if as_json:
        from cli.output import json_text

        click.echo(json_text(vars(outcome)))
    else:
        for line in outcome.lines():
            click.echo(line)
    return FAULT if outcome.faults else 0


def mail_run(app: App, store: ClusterStore, record: MailRecord) -> MailRun:
    from reports.mail.run import MailRun

    def read_source(name: SourceName) -> None:
        from cli.ingest import live_spans, run

        for result in run(store, live_spans(app.but(store=store), (name,))).values():
            if result.error:
                raise result.error

    return MailRun(store, app.config, app.commands, read_source, app.now_s, record)


def _dry_run(app: App, store: ClusterStore) -> int:
    from reports.mail.record import copied_record

    with copied_record(store.root) as record:
        would = mail_run(app, store, record)
        mails, is_started = would.preview()
    for runs in mails:
        what = f"{format_count(len(runs))} jobs" if len(runs) > 1 else f"job {runs[0].job_id}"
        click.echo(f"to {printable(would.recipient(runs[0].user) or '')}: {what}")
    for fault in would.addresses.faults:
        click.echo(f"almanac: {printable(fault, 1000)}", err=True)
    for line in would.outcome.decisions():
        click.echo(line)
    span = "that is new" if is_started else "of the last day; the first run tells of no job that ended before it"
    click.echo(f"a dry run, of what the store has {span}; nothing was asked, written or sent")
    return 0


@command.command("send")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOBID...")
@click.option("--to", "preview_to", metavar="ADDRESS", help="Send it there, as a preview (operators).")
@click.pass_obj
def send(app: App, job_ids: tuple[str, ...], preview_to: str | None) -> None:
    """Send the reports of ended jobs to their owners now: one mail for each job, or for more than mail.storm jobs.

    Nothing is recorded, so the mail after the job still comes. It reads the store; without access to that, `almanac
    report` shows the same.
    """
    if preview_to is not None:
        app.require_operator("--to sends reports to any address; without it, yours goes to you")
        if not is_address(preview_to):
            said = f"--to {printable(repr(preview_to), 80)}: expected one address, name@example.org"
            raise click.BadParameter(said)
    if not app.may_read_store:
        raise NotAllowedError(
            f"{app.caller} cannot read almanac's store, which records the mails",
            "use `almanac report JOBID --html FILE` for a page; if the site sends mail, a report comes after each GPU "
            "job",
        )
    from reports.job.answer import context_of
    from reports.job.build import build
    from reports.job.sources import find_jobs
    from reports.mail.batch import owner_mails
    from reports.mail.handover import MailAgent
    from slurm.named_jobs import named_jobs

    chosen = find_jobs(app, app.caller_jobs, named_jobs(job_ids))
    shown = chosen.newest(MOST_JOBS)
    if error := next((state.error for state in shown.states if state.error), None):
        raise error
    if open_ids := [*(job.shown_id for job in shown.running), *(state.shown_id for state in shown.states)]:
        open_id = open_ids[0]
        said = f"job {open_id} has not ended, and a mail is about an ended job"
        raise AlmanacError(said, f"see it now: almanac report {open_id}")
    app.check_rules()
    contexts = build(app, shown.stored, user=None if app.is_operator else app.caller)
    contexts += [context_of(app, job) for job in shown.ended]
    if not app.config.mail.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "ask an operator of almanac")
    with MailAgent(app.config.mail) as agent:
        for message in owner_mails(contexts, app.config, app.caller, app.now_s(), preview_to or ""):
            agent.hand_over(message)
            whose = f" of {printable(message.user, 40)}; not sent to them, and not recorded as sent"
            jobs = counted(len(message.runs), "job")
            click.echo(f"sent to {message.recipient}: {jobs}{whose if preview_to else ''}")
    if older := len(chosen) - len(shown):
        click.echo(f"{format_count(older)} older ones are not sent: name fewer jobs", err=True)


def _choose(app: App, word: str) -> None:
    from reports.mail.recipients import write

    write(None if word == DEFAULT else word, app.config)
    _show_choice(app)


def _show_choice(app: App) -> None:
    from reports.mail.recipients import read

    preference = read(app.caller, app.config, lambda user: os.getuid())
    if preference.frequency not in WORDS:
        click.echo("unknown: you cannot read your own choice; choose again (no mail is sent to you until then)")
        return
    whose = "your choice" if preference.is_own else "this site's default"
    click.echo(folded(f"{preference.frequency}: {WORDS[preference.frequency]} ({whose})", sys.stdout, "  "))
    mail = app.config.mail
    if (mail.users or mail.accounts) and app.caller not in mail.users:
        click.echo("This site sends mail only to some users and accounts so far.")
    for said in _reader_lines(app, preference.is_own):
        width = min(shutil.get_terminal_size().columns, 80)
        click.echo(textwrap.fill(said, width, break_long_words=False, break_on_hyphens=False))
    _show_mails(app)


def _show_mails(app: App) -> None:
    """Print the newest mails about the caller's jobs; nothing if none are known here."""
    with contextlib.suppress(AlmanacError):  # nothing is published, or only the owner may read: `almanac jobs` says it
        mails, as_of_s = app.caller_jobs.mails(app.caller)[:SHOWN], app.caller_jobs.published_s
        if mails:
            click.echo(f"\nYour newest mails{f', as of {local_time(as_of_s)}' if as_of_s else ''}:")
        for mail in mails:
            more = f" and {counted(mail.jobs - 1, 'other job')}" if mail.jobs > 1 else ""
            what = f"job {mail.job_id}{more}" if mail.job_id else "the weekly mail"
            to, words = printable(mail.to, 100), printable(mail.words, 200)
            became = _BECAME.get(mail.kind, "sent to {to}").format(to=to or "you", words=words)
            click.echo(folded(f"{local_time(mail.time_s)}  {what}: {became}", sys.stdout, "  "))


def _reader_lines(app: App, is_own: bool) -> list[str]:
    """Warn the user if no mail timer reads the choices that are made on this host; [] if one does."""
    from reports.mail.recipients import folder_of, last_read

    folder, host = folder_of(app.config), printable(socket.gethostname(), 60)
    if not folder.is_dir():
        return [
            f"No choice can be kept on {host}: {folder} does not exist.",
            "Ask the operators where to run this.",
            UNTIL,
        ]
    found = last_read(folder)
    if found is None and not app.config.mail.server:
        return [
            f"This site sends no mail, as far as {host} knows: its configuration sets no mail.server.",
            *((f"If you do get mail, ask the operators where to run this. {UNTIL}",) if is_own else ()),
        ]
    if not is_own or (found and app.now_s() - found.time_s < STALE_S):
        return []
    if found is None:
        return [
            f"It is stored on {host}, but nothing that sends mail has read it yet.",
            "In an hour, run this again: almanac mail",
            f"If it is still so, tell the operators that no mail timer reads {folder} of {host}.",
            UNTIL,
        ]
    ago = format_duration(app.now_s() - found.time_s)
    return [
        f"It is stored on {host}, but nothing that sends mail has read it for {ago}.",
        f"Tell the operators that the mail timer of {found.host} no longer reads {folder}.",
        UNTIL,
    ]
