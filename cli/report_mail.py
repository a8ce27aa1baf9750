"""`almanac report JOBID --mail`: send reports to the jobs' owners, now, or a preview of them to an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from almanac.addresses import is_address
from almanac.errors import ConfigError
from almanac.units import format_count, printable
from cli.app import App

if TYPE_CHECKING:
    from reports.job.context import JobContext


def check_preview(app: App, preview_to: str) -> None:
    """Raises NotAllowedError for a user, and click.BadParameter for what is no address."""
    app.require_operator("--to sends reports to any address; without it, yours goes to you")
    if not is_address(preview_to):
        raise click.BadParameter(f"--to {printable(repr(preview_to), 80)}: expected one address, name@example.org")


def send(app: App, contexts: Sequence[JobContext], preview_to: str) -> None:
    """Send one mail for each job, or for each user with more than mail.storm jobs. Raises AlmanacError.

    preview_to: an address that gets the mails instead of the owners. A preview has no blind copy. Nothing is recorded,
    so the mail after the job still comes.
    """
    from dataclasses import replace

    from reports.mail.delivery import send_now
    from reports.mail.owner_mail import owner_mails

    if not app.config.mail.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "ask an operator of almanac")
    mail = replace(app.config.mail, bcc="") if preview_to else app.config.mail
    for message in owner_mails(contexts, app.config, app.caller, app.now_s(), preview_to):
        fault = send_now(message, mail)
        number = len(message.runs)
        whose = f" of {printable(message.user, 40)}; not sent to them, and not recorded as sent" if preview_to else ""
        click.echo(f"sent to {message.recipient}: {format_count(number)} job{'s' * (number != 1)}{whose}")
        if fault:
            click.echo(f"warning: {printable(fault, 300)}", err=True)
