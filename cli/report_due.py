"""`almanac report --due`: the mails of jobs that have ended since the last time."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.errors import BusyError
from almanac.units import format_count, printable
from cli.app import App
from cli.due import STARTED, Due, comments_since, move_marks, plan_of, pull_back_marks, recipient_in, told_since
from cli.due_outcome import Outcome
from cli.output import json_text

if TYPE_CHECKING:
    from reports.mail.outbox import Outbox
    from telemetry.store.store import Store

FAULT = 5
"""Exit code where a source or the mail server failed: as everywhere, that of sources."""
_FOREVER_S = 2**40


def run(app: App, is_dry: bool, as_json: bool) -> int:
    """One run of the timer. Nothing to do, or another run at work, is no fault."""
    app.require_operator("reports are of everybody's jobs")
    store = app.open_store()
    cluster = app.cluster(store)
    if is_dry:
        return _dry_run(app, store, cluster)
    if not app.config.mail.server:
        pull_back_marks(store, cluster, app.now_s())
        move_marks(store, cluster, app.now_s())
        click.echo("mail is off: mail.server is not set; jobs that end before it is get no mail")
        return 0
    from reports.mail.outbox import Outbox, outbox_path

    try:
        with Outbox(outbox_path(store.root)) as outbox:
            outcome = Due(app, store, cluster, outbox).run()
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


def _dry_run(app: App, store: Store, cluster: str) -> int:
    """Say what would be told of what the store knows; nothing is asked, written or sent."""
    with _copied_outbox(store) as outbox:
        return _foretell(app, store, cluster, outbox)


def _foretell(app: App, store: Store, cluster: str, outbox: Outbox) -> int:
    from reports.mail.allowance import allowance_of
    from reports.mail.due import ENOUGH_MAIL, leave_for_later, parcels
    from reports.mail.ended import ended_since, look_up

    started_s = store.watermark(STARTED, cluster) if app.config.mail.server else None
    outbox.notice(ended_since(store, cluster, told_since(app, started_s)), app.now_s())
    found = look_up(store, cluster, outbox.waiting(_FOREVER_S, cluster), comments_since(app))
    plan, allowance = plan_of(app, store, cluster, found), allowance_of(outbox, app.config.mail, app.now_s())
    ready, later = leave_for_later(plan.ready, allowance)
    for parcel in parcels(ready, allowance.most):
        what = f"{format_count(len(parcel.runs))} jobs" if parcel.is_digest else f"job {parcel.runs[0].job_id}"
        click.echo(f"to {printable(recipient_in(app)(parcel.user) or '')}: {what}")
    skipped = Counter({reason: len(runs) for reason, runs in plan.skipped.items()})
    delayed = Counter({reason: len(runs) for (reason, _), runs in plan.delayed.items()})
    delayed[ENOUGH_MAIL] = sum(map(len, later.values()))
    for line in Outcome(skipped=skipped, delayed=delayed).decisions():
        click.echo(line)
    span = "of the last day; the first run tells of no job that ended before it" if started_s is None else "that is new"
    click.echo(f"a dry run, of what the store has {span}; nothing was asked, written or sent")
    return 0


@contextmanager
def _copied_outbox(store: Store) -> Iterator[Outbox]:
    """With what waits in the outbox, also what is delayed; a copy, since it is another's to change."""
    from reports.mail.outbox import Outbox, outbox_path
    from reports.mail.outbox_file import explained

    path = outbox_path(store.root)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if path.exists():
            with (
                explained(path),
                closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as to,
            ):
                source.backup(to)
        with Outbox(copy) as outbox:
            yield outbox
