"""`almanac report --due`: the mails of jobs that have ended since the last time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from almanac.errors import BusyError
from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text

if TYPE_CHECKING:
    from reports.mail.mail_site import MailSite
    from telemetry.sources.configured import SourceName
    from telemetry.store.cluster_store import ClusterStore

FAULT = 5
"""Exit code if a source or the mail server failed; other commands use it for sources, too."""


def run(app: App, is_dry: bool, as_json: bool) -> int:
    """One run of the timer. Nothing to do, or another run at work, is no fault."""
    from reports.mail.outbox import Outbox, outbox_path
    from reports.mail.run import MailRun, skip_until_now

    app.require_operator("reports are of everybody's jobs")
    store = app.cluster_store()
    site = mail_site(app, store)
    if is_dry:
        return _dry_run(site)
    try:
        with Outbox(outbox_path(store.root)) as outbox:
            if not app.config.mail.server:
                skip_until_now(site, outbox)
                click.echo("mail is off: mail.server is not set; jobs that end before it is get no mail")
                return 0
            outcome = MailRun(site, outbox).run()
    except BusyError as error:
        click.echo(f"{error}: it does what is due")
        return 0
    for fault in outcome.faults:
        click.echo(f"almanac: {printable(fault, 1000)}", err=True)
    if as_json:
        click.echo(json_text(vars(outcome)))
    else:
        for line in outcome.lines():
            click.echo(line)
    return FAULT if outcome.faults else 0


def mail_site(app: App, store: ClusterStore) -> MailSite:
    from reports.mail.mail_site import MailSite

    def read_source(name: SourceName) -> None:
        from cli.ingest import live_spans, run

        for result in run(store, live_spans(app, store, (name,))).values():
            if result.error:
                raise result.error

    return MailSite(store, app.config, app.commands, read_source, app.now_s)


def _dry_run(site: MailSite) -> int:
    from reports.mail.dry_run import dry_run

    found = dry_run(site)
    for runs in found.mails:
        what = f"{format_count(len(runs))} jobs" if len(runs) > 1 else f"job {runs[0].job_id}"
        click.echo(f"to {printable(site.recipient(runs[0].user) or '')}: {what}")
    for fault in site.addresses.faults:
        click.echo(f"almanac: {printable(fault, 1000)}", err=True)
    for line in found.outcome.decisions():
        click.echo(line)
    span = "that is new" if found.is_started else "of the last day; the first run tells of no job that ended before it"
    click.echo(f"a dry run, of what the store has {span}; nothing was asked, written or sent")
    return 0
