"""Send queued mail to the site's SMTP server over one connection. Refused mail waits for a later run."""

from __future__ import annotations

import contextlib
import smtplib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from almanac.bounded import watch, within
from almanac.config import Mail
from almanac.errors import ConfigError, ServerError
from almanac.scrub import forms, scrub
from almanac.trusted_file import read_trusted, require_trusted
from reports.mail.due import GIVE_UP_S
from reports.mail.message import sender_of
from reports.mail.outbox import Message, Outbox
from reports.mail.outcome import LEFT, Outcome
from reports.mail.preferences import NOT_KNOWN, NOT_WANTED, UNKNOWN

Connect = Callable[[Mail], smtplib.SMTP]

BATCH = 20
"""Messages in memory at once. Each has at most 200 kB."""
RUN_S = 900
"""A run that the rate limit has slowed down for this long leaves the rest to the next run."""
RETRY_S = 900
"""Seconds between two tries of a mail. A mail also waits this long while the system does not know its user."""
TIMEOUT_S = 30.0
"""Seconds after which almanac stops waiting for the server: relays answer within a few."""
MOST_REFUSED = 3
"""Refused recipients (5xx) in a row that end a run. One dead mailbox never ends it."""
REPLIES = 5
"""Replies of the server to one mail, or to a login: together they may take so many times TIMEOUT_S."""
MOST_REPLY_BYTES = 1 << 16
_FAILURES = (OSError, smtplib.SMTPException, ValueError)


def connect_smtp(config: Mail) -> smtplib.SMTP:
    """A connection, encrypted and logged in as configured. Raises OSError, SMTPException, ConfigError."""
    if config.username and config.security == "none" and config.server not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError("mail.username is set, and mail.security is none", "use starttls or tls: a login needs it")
    password = _password(config)
    if config.ca_file:
        require_trusted(config.ca_file)
    tls = None if config.security == "none" else ssl.create_default_context(cafile=config.ca_file or None)
    with within(REPLIES * TIMEOUT_S):
        if config.security == "tls":
            server: smtplib.SMTP = _TlsServer(config.server, config.port, timeout=TIMEOUT_S, context=tls)
        else:
            server = _Server(config.server, config.port, timeout=TIMEOUT_S)
        try:
            if config.security == "starttls":
                server.starttls(context=tls)
            if config.username:
                server.login(config.username, password)
        except BaseException:
            server.close()
            raise
    return server


class _BoundedSmtp(smtplib.SMTP):
    """Reads replies of limited length, on a socket that `within` can shut down."""

    def getreply(self) -> tuple[int, bytes]:
        if self.sock:
            watch(self.sock)
            self.file: Any = _Reply(self.file or self.sock.makefile("rb"))
        try:
            return super().getreply()
        finally:
            if self.file:
                self.file = self.file.file


class _Server(_BoundedSmtp, smtplib.SMTP):
    pass


class _TlsServer(_BoundedSmtp, smtplib.SMTP_SSL):
    pass


class _Reply:
    """One reply of a server, which may go on for ever."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._left = file, MOST_REPLY_BYTES

    def readline(self, most: int) -> bytes:
        line = self.file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise OSError(f"a reply of more than {MOST_REPLY_BYTES} bytes")
        return line

    def close(self) -> None:
        self.file.close()


def send(server: smtplib.SMTP, config: Mail, recipient: str, raw: bytes) -> None:
    """Send one mail. Raises OSError, SMTPException, ValueError."""
    with within(REPLIES * TIMEOUT_S):
        server.sendmail(sender_of(config), [recipient], raw)


def _password(config: Mail) -> str:
    if not config.username:
        return ""
    try:
        return read_trusted(Path(config.password_file), (), MOST_REPLY_BYTES, is_strict=False).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"mail.password_file: cannot be read: {error}", "name a readable file") from error


def secrets_of(config: Mail) -> tuple[str, ...]:
    """Texts to remove from what the server says. None if the password cannot be read: then it was not sent."""
    with contextlib.suppress(ConfigError):
        return forms(_password(config), config.username)
    return ()


def reply_of(error: Exception, secrets: Sequence[str] = ()) -> tuple[int, str]:
    """The code of the server's reply (0 without a reply), and one safe line about the error.

    secrets: texts to remove, because servers can repeat them.
    """
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, reply = next(iter(error.recipients.values()))
    elif isinstance(error, smtplib.SMTPResponseException):
        code, reply = error.smtp_code, error.smtp_error  # type: ignore[assignment]
    else:
        return 0, scrub(str(error), secrets, 200) or type(error).__name__
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    return code, scrub(f"{code} {' '.join(text.split())}", secrets)


def deliver(
    outbox: Outbox,
    config: Mail,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    frequency: Callable[[str], str],
    outcome: Outcome,
    connect: Connect = connect_smtp,
) -> None:
    """Try every message that is due. outcome gets counts and faults. Raises ConfigError, StoreError.

    frequency: gives a user's current choice (`preferences.read`). It also applies to mail that is queued already.
    """
    if not config.server:
        raise ConfigError("mail.server is not set, so no mail can be sent", "name the host of an SMTP server")
    sender_of(config)
    outcome.delivered.update(dict.fromkeys(("sent", "failed", "given_up", "held", LEFT), 0))
    run = _DeliveryRun(outbox, config, lambda: int(clock()), sleep, frequency, outcome, connect)
    try:
        run.deliver()
    finally:
        if run.server is not None:
            hang_up(run.server, config)


def send_now(message: Message, config: Mail, connect: Connect = connect_smtp) -> str:
    """Send one message at once, past the outbox (`almanac report --mail`), and its blind copy to mail.bcc.

    Returns why there is no blind copy, or "". Raises ServerError, ConfigError.
    """
    try:
        server = connect(config)
        try:
            send(server, config, message.recipient, message.raw)
            return _copy_fault(server, message, config)
        finally:
            hang_up(server, config)
    except _FAILURES as error:
        raise ServerError(
            f"{config.server}:{config.port} did not take the mail: {reply_of(error, secrets_of(config))[1]}",
            "see `almanac doctor`",
        ) from error


def _copy_fault(server: smtplib.SMTP, message: Message, config: Mail) -> str:
    """Send the blind copy. A refusal changes nothing of the mail that the server has taken."""
    if config.bcc in ("", message.recipient):
        return ""
    try:
        send(server, config, config.bcc, message.raw)
    except _FAILURES as error:
        return f"mail.bcc: no blind copy: {reply_of(error, secrets_of(config))[1]}"
    return ""


def hang_up(server: smtplib.SMTP, config: Mail) -> None:
    """A mail that the server has taken is sent, whatever the server answers here."""
    with contextlib.suppress(OSError, smtplib.SMTPException), within(TIMEOUT_S):
        server.quit()
    server.close()


@dataclass
class _DeliveryRun:
    """refused: recipients that the server has refused since the last mail that it took.

    fault: what is wrong with the server; it ends the run. has_copies: whether the server takes copies for mail.bcc.
    """

    outbox: Outbox
    config: Mail
    now_s: Callable[[], int]
    sleep: Callable[[float], None]
    frequency: Callable[[str], str]
    outcome: Outcome
    connect: Connect
    server: smtplib.SMTP | None = None
    refused: set[str] = field(default_factory=set)
    fault: str = ""
    has_copies: bool = True

    def deliver(self) -> None:
        start_s = self.now_s()
        while not self.fault and (messages := self.outbox.ready(self.now_s(), BATCH)):
            for message in messages:
                if self.now_s() - start_s >= RUN_S:
                    self.outcome.delivered[LEFT] = self.outbox.counts().queued
                    return
                if self._is_wanted(message):
                    self._wait_for_minute()
                    self._try(message)
                if self.fault:
                    self.outcome.delivered["fault"] = 1
                    self.outcome.faults.append(f"mail server: {self.fault}")
                    break
        self._give_up()

    def _is_wanted(self, message: Message) -> bool:
        """Whether the user still wants such mail. The mail waits while the system does not know the user."""
        wanted = self.frequency(message.user)
        if wanted == UNKNOWN:
            self.outbox.hold(message, self.now_s() + RETRY_S, NOT_KNOWN)
            self.outcome.delivered["held"] += 1
        elif wanted == "off" or (wanted == "digest" and message.kind != "weekly"):
            self.outbox.withdraw(message, NOT_WANTED[wanted], self.now_s())
        else:
            return True
        return False

    def _wait_for_minute(self) -> None:
        while self.outbox.sent_since(self.now_s() - 59) >= self.config.per_minute:
            self.sleep(1)

    def _try(self, message: Message) -> None:
        """Send one message, or set the fault."""
        name = f"{self.config.server}:{self.config.port}"
        try:
            self.server = self.server or self.connect(self.config)
        except _FAILURES as error:
            self.fault = f"{name}: {reply_of(error, secrets_of(self.config))[1]}"
            return
        self.outbox.trying(message, self.now_s() + RETRY_S)
        try:
            send(self.server, self.config, message.recipient, message.raw)
        except _FAILURES as error:
            code, text = reply_of(error, secrets_of(self.config))
            self.outbox.failed(message, text)
            self.outcome.delivered["failed"] += 1
            if code >= 500:
                self.refused.add(message.recipient)
            if not _is_about_mail(error, code) or len(self.refused) >= MOST_REFUSED:
                self.fault = f"{name} takes no mail: {text}"
        else:
            self.outbox.sent(message, self.now_s())
            self.outcome.delivered["sent"] += 1
            self.refused.clear()
            self._copy(message)

    def _copy(self, message: Message) -> None:
        """Send the blind copy, as a mail of its own: no answer about it must change what became of the user's mail."""
        bcc = self.config.bcc
        if self.server is None or not bcc or not self.has_copies or bcc == message.recipient:
            return
        try:
            send(self.server, self.config, bcc, message.raw)
        except _FAILURES as error:
            self.has_copies = False
            hang_up(self.server, self.config)
            self.server = None
            text = reply_of(error, secrets_of(self.config))[1]
            self.outcome.faults.append(f"no more blind copies to {bcc} in this run: {text}")

    def _give_up(self) -> None:
        """Drop old mail, so that it does not fill the disk while there is no server."""
        now_s = self.now_s()
        if old := self.outbox.give_up(now_s - GIVE_UP_S, now_s, self.fault):
            self.outcome.delivered["given_up"] += len(old)
            self.outcome.faults.append(f"mails that will never be sent: {len(old)}, the last one to {old[-1]}")


def _is_about_mail(error: Exception, code: int) -> bool:
    """Whether the server refuses this recipient or this content only, and the connection can be used again.

    After 421 the server hangs up. smtplib gives -1 if the server's line is no reply.
    """
    return isinstance(error, smtplib.SMTPRecipientsRefused | smtplib.SMTPDataError) and code >= 200 and code != 421
