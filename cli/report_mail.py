"""`almanac report JOBID --mail`: send reports to the jobs' owners, now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from almanac.errors import ConfigError
from almanac.units import format_count
from cli.app import App

if TYPE_CHECKING:
    from reports.job.context import JobContext


def send(app: App, contexts: Sequence[JobContext]) -> None:
    """Send one mail for each job, or for each user with more than mail.storm jobs. Raises AlmanacError."""
    from reports.mail.delivery import send_now
    from reports.mail.owner_mail import owner_mails

    if not app.config.mail.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "ask an operator of almanac")
    for message in owner_mails(contexts, app.config, app.caller, app.now_s()):
        send_now(message, app.config.mail)
        number = len(message.runs)
        click.echo(f"sent to {message.recipient}: {format_count(number)} job{'s' * (number != 1)}")
