"""Sends what the outbox holds to the site's SMTP server: throttled, with backoff, over one connection."""

from __future__ import annotations

import contextlib
import smtplib
import ssl
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from almanac.config import Mail
from almanac.errors import ConfigError, ServerError
from almanac.scrub import forms
from reports.mail.message import sender_of
from reports.mail.outbox import Message, Outbox
from reports.mail.preferences import NOT_KNOWN, NOT_WANTED, UNKNOWN
from reports.mail.refusals import MOST_REFUSED, Refusals
from reports.mail.smtp_replies import Reply, reply_of

Connect = Callable[[Mail], smtplib.SMTP]

BATCH = 20
"""Messages that are in memory at once; each has at most 200 kB."""
RUN_S = 900
"""A run that throttling has held up for so long leaves the rest to the next one."""
UNKNOWN_S = 600
"""Mail of a user whom the system does not know is looked at again after so long."""
MINUTE_S, HOUR_S = 60, 3600
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 60, 4 * HOUR_S
LOST_IN_ROW = 3
"""Connections that may be lost one after the other before the server counts as down."""


@dataclass(frozen=True)
class DeliveryCounts:
    """What one run did. held: left for a later run because their user got enough mail within an hour, or is not known.
    withdrawn: not sent, as their user does not want them any more.

    left: queued messages, where throttling has held the run up for RUN_S, which is no fault.
    fault: what is wrong with the server, such as that it is not there, or takes nothing; "" where nothing is.
    last_error: of the last one that was given up, its recipient and why it was not taken.
    """

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    held: int = 0
    withdrawn: int = 0
    left: int = 0
    fault: str = ""
    last_error: str = ""


class _StoppedError(Exception):
    """The run cannot go on; its text says why."""


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
    """What no text of the server may show; () where the password cannot be read: then it was not sent either."""
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
    """Try every message that is due. A server's fault is in the counts. Raises ConfigError, StoreError.

    frequency: of a user, now (`preferences.read`): a choice holds for what is queued already, too.
    """
    if not config.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "name the host of an SMTP server")
    sender_of(config)
    run = _Run(outbox, config, clock, sleep, frequency, connect)
    fault = ""
    try:
        run.deliver()
    except _StoppedError as stopped:
        fault = str(stopped)
    finally:
        run.hang_up()
    fault = fault or run.refusal_fault
    run.leave_refused()
    done = run.done
    return DeliveryCounts(
        sent=done["sent"],
        failed=done["failed"],
        given_up=done["given up"],
        held=done["held"],
        withdrawn=done["withdrawn"],
        left=done["left"],
        fault=fault,
        last_error=run.last_error,
    )


def send_now(message: Message, config: Mail, connect: Connect = connect_smtp) -> None:
    """Send one message at once, past the outbox (`almanac report --mail`). Raises ServerError, ConfigError.

    A mail that the server has taken is sent, however it says goodbye.
    """
    try:
        server = connect(config)
        try:
            server.sendmail(sender_of(config), [message.recipient], message.raw)
        finally:
            _hang_up(server)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise ServerError(
            f"{config.server}:{config.port} did not take the mail: {reply_of(error, secrets_of(config)).text}",
            "see `almanac doctor`",
        ) from error


def _hang_up(server: smtplib.SMTP) -> None:
    with contextlib.suppress(OSError, smtplib.SMTPException):
        server.quit()
    server.close()


def backoff_s(attempts: int) -> int:
    """Seconds from a try to the next one, after so many before it: a minute, doubled each time, at most four hours."""
    return min(FIRST_BACKOFF_S << min(attempts, 20), LONGEST_BACKOFF_S)


@dataclass
class _Run:
    """recent: when mail was handed over within the last hour; by_user: the same of each user.

    refusals: those that are not settled, as the server has taken nothing. last_error: as in the counts.
    """

    outbox: Outbox
    config: Mail
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    frequency: Callable[[str], str]
    connect: Connect
    done: Counter[str] = field(default_factory=Counter)
    recent: deque[int] = field(default_factory=deque)
    by_user: defaultdict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    server: smtplib.SMTP | None = None
    lost_in_row: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    last_error: str = ""

    def deliver(self) -> None:
        start_s = self._now_s()
        for user, sent_s in self.outbox.sent_since(start_s - HOUR_S):
            self._remember(user, sent_s)
        while messages := self.outbox.ready(self._now_s(), BATCH):
            for message in messages:
                if self._now_s() - start_s > RUN_S:
                    self.done["left"] = self.outbox.counts().queued
                    return
                if self._is_wanted(message) and not self._held(message):
                    self._wait_for_minute()
                    self._try(message)

    def hang_up(self) -> None:
        if self.server is not None:
            _hang_up(self.server)
            self.server = None

    def _now_s(self) -> int:
        return int(self.clock())

    def _remember(self, user: str, time_s: int) -> None:
        """A time that a clock left in the future counts as now."""
        time_s = min(time_s, self._now_s())
        self.recent.append(time_s)
        self.by_user[user].append(time_s)

    def _is_wanted(self, message: Message) -> bool:
        """Whether its user still wants such mail; where that cannot be known it waits, like for a server."""
        now_s, wanted = self._now_s(), self.frequency(message.user)
        if wanted == UNKNOWN and now_s - message.put_s < self.config.give_up_hours * HOUR_S:
            self.outbox.hold(message, now_s + UNKNOWN_S)
            self.done["held"] += 1
        elif wanted in ("off", UNKNOWN) or (wanted == "digest" and message.kind != "weekly"):
            self.outbox.withdraw(message, NOT_WANTED.get(wanted, NOT_KNOWN), now_s)
            self.done["withdrawn"] += 1
        else:
            return True
        return False

    def _held(self, message: Message) -> bool:
        """Whether its user has got enough for an hour; then it waits until the first of those is an hour old."""
        times = self.by_user[message.user]
        _drop_until(times, self._now_s() - HOUR_S)
        if len(times) < self.config.per_user_hour:
            return False
        self.outbox.hold(message, times[-self.config.per_user_hour] + HOUR_S + 1)
        self.done["held"] += 1
        return True

    def _wait_for_minute(self) -> None:
        _drop_until(self.recent, self._now_s() - MINUTE_S)
        if len(self.recent) >= self.config.per_minute:
            self.hang_up()  # servers hang up on who is silent
            self.sleep(max(1, self.recent[-self.config.per_minute] + MINUTE_S + 1 - self._now_s()))

    def _try(self, message: Message) -> None:
        server = self._connected()
        self.refusals.drop(message)
        self.outbox.trying(message, self._now_s() + backoff_s(message.attempts))
        try:
            server.sendmail(sender_of(self.config), [message.recipient], message.raw)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            self._settle(message, reply_of(error, secrets_of(self.config)))
        else:
            self.lost_in_row = 0
            self.outbox.sent(message, self._now_s())
            self._remember(message.user, self._now_s())
            self.done["sent"] += 1
            self._believe_refusals()

    def _connected(self) -> smtplib.SMTP:
        """Raises _StoppedError where there is no server: then no message is to blame, but for those too old."""
        if self.server is None:
            try:
                self.server = self.connect(self.config)
            except (OSError, smtplib.SMTPException, ValueError) as error:
                said = reply_of(error, secrets_of(self.config)).text
                self._expire(said)
                raise _StoppedError(f"{self._name}: {said}") from error
        return self.server

    @property
    def _name(self) -> str:
        return f"{self.config.server}:{self.config.port}"

    def _settle(self, message: Message, reply: Reply) -> None:
        """What becomes of a message that was not taken."""
        now_s = self._now_s()
        self.recent.append(now_s)
        if reply.is_lost:
            self.hang_up()
        if reply.is_sender:
            self.outbox.not_tried(message)
            self._expire(reply.text)
            raise _StoppedError(f"{self._name} refuses mail from {sender_of(self.config)}: {reply.text}")
        if reply.is_refusal and not self.done["sent"]:
            self._wait_for_others(message, reply)
        elif reply.is_final:
            self._give_up(message, reply.text)
        else:
            self._leave(message, reply)
        self.lost_in_row = self.lost_in_row + 1 if reply.is_lost else 0
        if self.lost_in_row >= LOST_IN_ROW:
            raise _StoppedError(f"{self._name} hangs up: {reply.text}")

    @property
    def refusal_fault(self) -> str:
        return f"{self._name} {self.refusals.fault}" if self.refusals.fault else ""

    def _wait_for_others(self, message: Message, reply: Reply) -> None:
        """Whether it is this message that the server refuses shows when it takes another one."""
        self.refusals.add(message, reply)
        if self.refusals.recipients >= MOST_REFUSED:
            self._expire(reply.text)
            raise _StoppedError(self.refusal_fault)

    def _believe_refusals(self) -> None:
        """The server takes mail."""
        for message, reply in self.refusals.pop_all():
            if reply.is_final:
                self._give_up(message, reply.text)
            else:
                self._leave(message, reply)

    def leave_refused(self) -> None:
        """The run ends, and the server has taken nothing: it may take these when it is set right."""
        for message, reply in self.refusals.pop_all():
            self._leave(message, reply)

    def _leave(self, message: Message, reply: Reply) -> None:
        """For a later try, or where there were enough of them, for none."""
        now_s = self._now_s()
        if now_s - message.put_s >= self.config.give_up_hours * HOUR_S:
            self._give_up(message, reply.text)
        else:
            self.outbox.failed(message, reply.text, now_s + backoff_s(message.attempts))
            self.done["failed"] += 1

    def _give_up(self, message: Message, error: str) -> None:
        self.outbox.give_up(message, error, self._now_s())
        self.done["given up"] += 1
        self.last_error = f"{message.recipient}: {error}"

    def _expire(self, error: str) -> None:
        """No server for days, or none that takes our mail: what waits for it must not fill the disk."""
        now_s = self._now_s()
        while messages := self.outbox.ready(now_s, BATCH):
            old = [each for each in messages if now_s - each.put_s >= self.config.give_up_hours * HOUR_S]
            for message in old:
                self._give_up(message, error)
            if len(old) < len(messages):
                return


def _drop_until(times: deque[int], until_s: int) -> None:
    while times and times[0] <= until_s:
        times.popleft()
