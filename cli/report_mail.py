"""`almanac report JOBID --mail`: reports to the jobs' owners, at once and past the outbox."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from almanac.errors import ConfigError, NotAllowedError
from almanac.units import format_count, printable
from cli.app import App

if TYPE_CHECKING:
    from reports.job.context import JobContext
    from reports.mail.outbox import Message


def send(app: App, contexts: Sequence[JobContext]) -> None:
    """One mail for each job, or for each user of whom there are more than mail.storm. Raises AlmanacError.

    Its Message-ID is another one than that of the report after the job: a mail client would hide the second.
    """
    from reports.mail.delivery import send_now

    if not app.config.mail.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "ask an operator of almanac")
    for message in _messages(app, contexts):
        send_now(message, app.config.mail)
        click.echo(f"sent to {message.recipient}: {_jobs(len(message.runs))}")


def _messages(app: App, contexts: Sequence[JobContext]) -> list[Message]:
    by_user: dict[str, list[JobContext]] = defaultdict(list)
    for context in contexts:
        by_user[context.user].append(context)
    messages = []
    for user, own in by_user.items():
        recipient = _recipient(app, user)
        is_storm = len(own) > app.config.mail.storm
        messages += [_message(app, part, recipient) for part in ([own] if is_storm else [[each] for each in own])]
    return messages


def _recipient(app: App, user: str) -> str:
    """Raises NotAllowedError for another user who wants none or may want none, ConfigError without an address."""
    from reports.mail.message import recipient_of
    from reports.mail.preferences import UNKNOWN, read

    wanted = "every" if user == app.caller else read(user, app.config).frequency
    if wanted == UNKNOWN:
        said = f"the system does not know {printable(user)}, so whether they want mail cannot be said"
        raise NotAllowedError(said, "look up `getent passwd`, or write the report to a file: --html FILE")
    if wanted == "off":
        raise NotAllowedError(f"{printable(user)} wants no mail", "write the report to a file: --html FILE")
    recipient = recipient_of(user, app.config)
    if recipient is None:
        raise ConfigError(f"mail.recipient gives no address of {printable(user)}", "see mail.recipient in the docs")
    return recipient


def _message(app: App, contexts: Sequence[JobContext], recipient: str) -> Message:
    from reports.job.report import render_email
    from reports.mail.digest import render_storm
    from reports.mail.message import compose
    from reports.mail.outbox import EndedRun

    runs = [
        EndedRun(
            cluster=context.cluster,
            job_id=context.job_id,
            submit_s=context.job["submit_s"],
            user=context.user,
            end_s=context.job["end_s"] or app.now_s(),
            gpu_count=context.gpu_count,
            array_job_id=context.job["array_job_id"],
        )
        for context in contexts
    ]
    is_one = len(contexts) == 1
    rendered = render_email(contexts[0], app.config) if is_one else render_storm(contexts, app.config)
    kind = "job" if is_one else "digest"
    return compose(rendered, runs, recipient, app.config, app.now_s(), kind=kind, key=f"asked for at {app.now_s()}")


def _jobs(number: int) -> str:
    return f"{format_count(number)} job{'s' * (number != 1)}"
