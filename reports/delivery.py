"""Sends what the outbox holds to the site's SMTP server: throttled, with backoff, over one connection."""

from __future__ import annotations

import smtplib
from collections.abc import Callable
from dataclasses import dataclass

from almanac.config import Mail
from reports.outbox import Message, Outbox

Connect = Callable[[Mail], smtplib.SMTP]


@dataclass(frozen=True)
class DeliveryCounts:
    """What one run did. held: left for a later run because their user got enough mail within an hour.

    fault: why the run ended before everything was tried, such as a server that is not there; "" where it did not.
    """

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    held: int = 0
    fault: str = ""


def connect_smtp(config: Mail) -> smtplib.SMTP:
    """A connection, encrypted and logged in as configured. Raises OSError, SMTPException, ConfigError."""
    raise NotImplementedError


def deliver(
    outbox: Outbox,
    config: Mail,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    connect: Connect = connect_smtp,
) -> DeliveryCounts:
    """Try every message that is due. Never raises for a server's fault: that is in the counts."""
    raise NotImplementedError


def send_now(message: Message, config: Mail, connect: Connect = connect_smtp) -> None:
    """Send one message at once, past the outbox (`almanac report --mail`). Raises AlmanacError."""
    raise NotImplementedError
