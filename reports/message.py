"""A rendered report as the mail that a server gets: text and HTML alternatives, pictures by Content-ID, headers."""

from __future__ import annotations

from collections.abc import Sequence

from almanac.config import Config
from reports.job_report import Rendered
from reports.outbox import EndedRun, Message


def recipient_of(user: str, config: Config, mail_user: str = "") -> str | None:
    """The address of a job's owner by mail.recipient; MailUser where the site allows it and it is an address.

    None where that gives no address.
    """
    raise NotImplementedError


def compose(
    rendered: Rendered,
    runs: Sequence[EndedRun],
    recipient: str,
    config: Config,
    now_s: int,
    *,
    user: str = "",
    kind: str = "job",
    key: str = "",
) -> Message:
    """user: of the runs where left out. key: what makes a message without runs that one, such as "a100 ann 2026-W47".

    The same runs, or key, give the same Message-ID.
    """
    raise NotImplementedError
