"""Send queued mail to the site's SMTP server: rate-limited, with backoff, over one connection."""

from __future__ import annotations

import contextlib
import smtplib
import ssl
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from almanac.config import Mail
from almanac.errors import ConfigError, ServerError
from almanac.scrub import forms
from reports.mail.message import sender_of
from reports.mail.outbox import Message, Outbox
from reports.mail.preferences import NOT_KNOWN, NOT_WANTED, UNKNOWN
from reports.mail.smtp_replies import Reply, reply_of

Connect = Callable[[Mail], smtplib.SMTP]

BATCH = 20
"""Messages in memory at once. Each has at most 200 kB."""
RUN_S = 900
"""A run that the rate limit has slowed down for this long leaves the rest to the next run."""
UNKNOWN_S = 600
"""Mail of a user whom the system does not know waits this long."""
MINUTE_S, HOUR_S = 60, 3600
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 60, 4 * HOUR_S
MOST_FAILED = 3
"""Refused recipients, refused senders, and lost connections in a row that end a run. One dead mailbox never ends it."""
_FAILURES = (OSError, smtplib.SMTPException, ValueError)


@dataclass(frozen=True)
class DeliveryCounts:
    """Counts of one run.

    held: kept for later, because the system does not know the user now.
    withdrawn: not sent, because the user no longer wants it.
    left: still queued when the rate limit ended the run, which is no fault.
    fault: what is wrong with the server, or "".
    last_error: recipient and error of the last mail that was given up, or "".
    """

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    held: int = 0
    withdrawn: int = 0
    left: int = 0
    fault: str = ""
    last_error: str = ""


def connect_smtp(config: Mail) -> smtplib.SMTP:
    """A connection, encrypted and logged in as configured. Raises OSError, SMTPException, ConfigError."""
    if config.username and config.security == "none" and config.server not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError("mail.username is set, and mail.security is none", "use starttls or tls: a login needs it")
    password = _password(config)
    tls = None if config.security == "none" else ssl.create_default_context(cafile=config.ca_file or None)
    if config.security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(config.server, config.port, timeout=config.timeout_s, context=tls)
    else:
        server = smtplib.SMTP(config.server, config.port, timeout=config.timeout_s)
    try:
        if config.security == "starttls":
            server.starttls(context=tls)
        if config.username:
            server.login(config.username, password)
    except BaseException:
        server.close()
        raise
    return server


def _password(config: Mail) -> str:
    if not config.username:
        return ""
    try:
        return Path(config.password_file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mail.password_file: cannot be read: {error}", "name a readable file") from error


def secrets_of(config: Mail) -> tuple[str, ...]:
    """Texts to remove from what the server says. None if the password cannot be read: then it was not sent."""
    with contextlib.suppress(ConfigError):
        return forms(_password(config), config.username)
    return ()


def deliver(
    outbox: Outbox,
    config: Mail,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    frequency: Callable[[str], str],
    connect: Connect = connect_smtp,
) -> DeliveryCounts:
    """Try every message that is due. Raises ConfigError, StoreError; faults of the server are in the counts.

    frequency: of a user, now (`preferences.read`). A choice also applies to mail that is queued already.
    """
    if not config.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "name the host of an SMTP server")
    sender_of(config)
    run = _DeliveryRun(outbox, config, clock, sleep, frequency, connect)
    try:
        run.deliver()
    finally:
        run.hang_up()
    done = run.done
    return DeliveryCounts(
        sent=done["sent"],
        failed=done["failed"],
        given_up=done["given up"],
        held=done["held"],
        withdrawn=done["withdrawn"],
        left=done["left"],
        fault=run.fault,
        last_error=run.last_error,
    )


def send_now(message: Message, config: Mail, connect: Connect = connect_smtp) -> None:
    """Send one message at once, past the outbox (`almanac report --mail`). Raises ServerError, ConfigError."""
    try:
        server = connect(config)
        try:
            server.sendmail(sender_of(config), [message.recipient], message.raw)
        finally:
            _hang_up(server)
    except _FAILURES as error:
        raise ServerError(
            f"{config.server}:{config.port} did not take the mail: {reply_of(error, secrets_of(config)).text}",
            "see `almanac doctor`",
        ) from error


def _hang_up(server: smtplib.SMTP) -> None:
    """A mail that the server has taken is sent, whatever the server answers here."""
    with contextlib.suppress(OSError, smtplib.SMTPException):
        server.quit()
    server.close()


def backoff_s(attempts: int) -> int:
    """Seconds from a try to the next one, after so many tries before: one minute, then doubled, at most four hours."""
    return min(FIRST_BACKOFF_S << min(attempts, 20), LONGEST_BACKOFF_S)


@dataclass
class _DeliveryRun:
    """recent: times of the tries of the last minute.

    failed_in_row: since the last mail that was sent, the refused recipients, and the Message-IDs of mails with
    another failure: a lost connection, or a refused sender.
    """

    outbox: Outbox
    config: Mail
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    frequency: Callable[[str], str]
    connect: Connect
    done: Counter[str] = field(default_factory=Counter)
    recent: deque[int] = field(default_factory=deque)
    server: smtplib.SMTP | None = None
    failed_in_row: set[str] = field(default_factory=set)
    fault: str = ""
    last_error: str = ""

    def deliver(self) -> None:
        start_s = self._now_s()
        self.recent.extend(min(sent_s, start_s) for _, sent_s in self.outbox.sent_since(start_s - MINUTE_S))
        while messages := self.outbox.ready(self._now_s(), BATCH):
            for message in messages:
                if self._now_s() - start_s > RUN_S:
                    self.done["left"] = self.outbox.counts().queued
                    return
                if self._is_wanted(message):
                    self._wait_for_minute()
                    if not self._try(message):
                        return

    def hang_up(self) -> None:
        if self.server is not None:
            _hang_up(self.server)
            self.server = None

    def _now_s(self) -> int:
        return int(self.clock())

    def _is_old(self, message: Message) -> bool:
        return self._now_s() - message.put_s >= self.config.give_up_hours * HOUR_S

    def _is_wanted(self, message: Message) -> bool:
        """Whether the user still wants such mail. The mail waits while the system does not know the user."""
        now_s, wanted = self._now_s(), self.frequency(message.user)
        if wanted == UNKNOWN and not self._is_old(message):
            self.outbox.hold(message, now_s + UNKNOWN_S)
            self.done["held"] += 1
        elif wanted in ("off", UNKNOWN) or (wanted == "digest" and message.kind != "weekly"):
            self.outbox.withdraw(message, NOT_WANTED.get(wanted, NOT_KNOWN), now_s)
            self.done["withdrawn"] += 1
        else:
            return True
        return False

    def _wait_for_minute(self) -> None:
        while self.recent and self.recent[0] <= self._now_s() - MINUTE_S:
            self.recent.popleft()
        if len(self.recent) >= self.config.per_minute:
            self.hang_up()  # servers close silent connections
            self.sleep(max(1, self.recent[-self.config.per_minute] + MINUTE_S + 1 - self._now_s()))

    def _try(self, message: Message) -> bool:
        """Send one message. False if the run must end because of the server."""
        try:
            server = self.server = self.server or self.connect(self.config)
        except _FAILURES as error:
            said = reply_of(error, secrets_of(self.config)).text
            self.fault = f"{self._name}: {said}"
            self._expire(said)
            return False
        self.outbox.trying(message, self._now_s() + backoff_s(message.attempts))
        try:
            server.sendmail(sender_of(self.config), [message.recipient], message.raw)
        except _FAILURES as error:
            self._settle(message, reply_of(error, secrets_of(self.config)))
        else:
            self.outbox.sent(message, self._now_s())
            self.done["sent"] += 1
            self.failed_in_row.clear()
        self.recent.append(self._now_s())
        return not self.fault

    @property
    def _name(self) -> str:
        return f"{self.config.server}:{self.config.port}"

    def _settle(self, message: Message, reply: Reply) -> None:
        """Leave a message that was not taken for a later try, until it is too old.

        A refusal (5xx) can be the fault of the server, so it gives up no message. Several in a row name the server.
        """
        if reply.is_lost:
            self.hang_up()
        if reply.is_lost or reply.is_refusal:
            self.failed_in_row.add(message.message_id if reply.is_lost or reply.is_of_sender else message.recipient)
        if len(self.failed_in_row) >= MOST_FAILED:
            self.fault = f"{self._name} takes no mail: {reply.text}"
        if self._is_old(message):
            self._give_up(message, reply.text)
        else:
            self.outbox.failed(message, reply.text, self._now_s() + backoff_s(message.attempts))
            self.done["failed"] += 1

    def _give_up(self, message: Message, error: str) -> None:
        self.outbox.give_up(message, error, self._now_s())
        self.done["given up"] += 1
        self.last_error = f"{message.recipient}: {error}"

    def _expire(self, error: str) -> None:
        """Give up old mail while there is no server, so that it does not fill the disk."""
        now_s = self._now_s()
        while old := self.outbox.ready(now_s, BATCH, now_s - self.config.give_up_hours * HOUR_S):
            for message in old:
                self._give_up(message, error)
