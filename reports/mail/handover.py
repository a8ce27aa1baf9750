"""Mails as bytes, and their hand-over to the site's mail server, by SMTP or to a sendmail program.

Text that a user wrote never gets into an address, and into no header except the subject, as one printable line. A mail
that the server has taken is the server's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import smtplib
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from almanac import __version__, bounded
from almanac.bounded import watch, within
from almanac.config import Config, Mail
from almanac.errors import ConfigError, ServerError
from almanac.files import read_trusted, require_trusted, trust_fault
from almanac.names import is_address, is_domain
from almanac.scrub import forms, scrub
from almanac.units import printable
from reports.job.render import MAX_SUBJECT, Rendered
from reports.mail.record import EndedRun, Message

MAX_MAIL_BYTES = 200_000


@cache
def _host_name() -> str:
    name = socket.getfqdn()
    return name if is_domain(name) else "localhost"


def sender_of(config: Mail) -> str:
    """Return the sender of mail: mail.sender, or almanac at this host. Raises ConfigError if that is not an address."""
    sender = config.sender or f"almanac@{_host_name()}"
    if "@" not in sender or not is_address(sender):
        raise ConfigError(f"mail.sender is {sender!r}, which is no address", "write such as almanac@example.org")
    return sender


def compose(
    rendered: Rendered,
    runs: Sequence[EndedRun],
    recipient: str,
    config: Config,
    now_s: int,
    *,
    cluster: str = "",
    user: str = "",
    kind: str = "job",
    key: str = "",
) -> Message:
    """The mail to a recipient. cluster and user: by default those of the runs. key: such as the week of a digest.

    The same cluster, user, kind, runs, and key give the same Message-ID. Raises ConfigError for a bad sender, and
    ValueError for a bad recipient.
    """
    if not is_address(recipient):
        raise ValueError(f"no address: {recipient!r}")
    cluster, user = cluster or runs[0].cluster, user or runs[0].user
    sender = sender_of(config.mail)
    domain = sender.partition("@")[2]
    message_id = message_id_of(cluster, user, kind, runs, key)
    headers: dict[str, str | Address] = {
        "From": Address(f"almanac of {_one_line(cluster, 60)}", addr_spec=sender),
        "To": recipient,
        "Subject": _one_line(rendered.subject, MAX_SUBJECT),
        "Date": format_datetime(datetime.fromtimestamp(now_s, UTC)),
        "Message-ID": message_id,
        "Auto-Submitted": "auto-generated",
        "Precedence": "bulk",
        "X-Auto-Response-Suppress": "All",
        "List-Id": _list_id(cluster, domain),
        "X-Mailer": f"almanac {__version__}",
    }
    if config.mail.reply_to:
        headers["Reply-To"] = config.mail.reply_to
    raw = _fitting(headers, rendered, _unsubscribe(config.mail, sender))
    return Message(message_id, user, recipient, kind, raw, tuple(runs))


def message_id_of(cluster: str, user: str, kind: str, runs: Sequence[EndedRun], key: str) -> str:
    """The Message-ID. It does not use the host name, which can change when name lookup fails."""
    keys = sorted((run.cluster, run.job_id, run.submit_s, run.end_s) for run in runs)
    digest = hashlib.sha256(json.dumps([cluster, user, kind, keys, key]).encode()).hexdigest()
    return f"<{kind}.{digest[:32]}@{_label(cluster)}.almanac>"


def _list_id(cluster: str, domain: str) -> str:
    """A header for mail filters (RFC 2919)."""
    return f"GPU job reports <{_label(cluster)}.almanac.{domain}>"


def _unsubscribe(config: Mail, sender: str) -> bytes:
    """The header with the way out (RFC 2369): the site's page or address, or else a mail to those who get answers.

    As bytes, because Python's email would encode a long address, and no mail client would know it then.
    """
    way = config.unsubscribe or config.reply_to or sender
    return f"List-Unsubscribe: <{way if '://' in way else f'mailto:{way}?subject=unsubscribe'}>\r\n".encode("ascii")


def _label(cluster: str) -> str:
    """The cluster's name without the characters that a domain label must not hold."""
    return re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")[:40].rstrip("-") or "cluster"


def _fitting(headers: Mapping[str, str | Address], rendered: Rendered, top: bytes) -> bytes:
    """The mail with as many pictures as fit into MAX_MAIL_BYTES. The others are replaced by their text."""
    images = dict(rendered.images)
    html = rendered.html
    while True:
        raw = top + _built(headers, rendered.text, html, images)
        if len(raw) <= MAX_MAIL_BYTES or not images:
            return raw
        largest = max(images, key=lambda name: len(images[name]))
        del images[largest]
        html = re.sub(rf'<img [^>]*src="cid:{re.escape(largest)}" alt="([^"]*)"[^>]*>', _left_out, html)


def _left_out(picture: re.Match[str]) -> str:
    """The words for a picture. An attribute may hold "<" and ">", and a paragraph may not."""
    alt = picture[1].replace("<", "&lt;").replace(">", "&gt;")
    return f"({alt}: left out)"


def _built(headers: Mapping[str, str | Address], text: str, html: str, images: Mapping[str, bytes]) -> bytes:
    mail = EmailMessage(policy=SMTP)
    for name, value in headers.items():
        mail[name] = value
    mail.set_content(_sendable(text), cte="quoted-printable")
    mail.add_alternative(_sendable(html), subtype="html", cte="quoted-printable")
    *_, page = mail.iter_parts()
    for content_id, content in images.items():
        name = f"{content_id.partition('.')[0]}.png"
        page.add_related(content, "image", "png", cid=f"<{content_id}>", disposition="inline", filename=name)
    return mail.as_bytes()


def _one_line(text: str, limit: int) -> str:
    """Text for a header. Python's email would decode an encoded word ("=?utf-8?q?a=0d=0aBcc:_b?=") in it, and fold the
    result into a header of its own.
    """
    return _sendable(printable(text, limit)).replace("=?", "= ?")


def _sendable(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


TIMEOUT_S = 30.0
"""Seconds after which almanac stops waiting for the server: relays answer within a few."""
REPLIES = 5
"""Replies of the server to one mail, or to a login: together they may take so many times TIMEOUT_S."""
MOST_REPLY_BYTES = 1 << 16
_FAILURES = (OSError, smtplib.SMTPException, ValueError)


class MailRefusedError(ServerError):
    """The server refuses this recipient or content. It may take the next mail. is_final: it will not take this one."""

    def __init__(self, message: str, is_final: bool) -> None:
        super().__init__(message, "see `almanac doctor`")
        self.is_final = is_final


def name_of(config: Mail) -> str:
    """The server, as messages name it."""
    return config.server if is_program(config) else f"{config.server}:{config.port}"


def is_program(config: Mail) -> bool:
    """True if mail.server is the path of a sendmail program."""
    return config.server.startswith("/")


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
            server = _BoundedSmtp(config.server, config.port, timeout=TIMEOUT_S)
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


@dataclass
class MailAgent:
    """The site's mail server, which takes one mail after the other over one connection. Use it as a context."""

    config: Mail
    _server: smtplib.SMTP | None = None

    def __enter__(self) -> MailAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def open(self) -> None:
        """Connect. Raises ServerError if no mail can be handed over now, and ConfigError for bad settings."""
        sender_of(self.config)
        if is_program(self.config):
            if fault := program_fault(self.config):
                raise fault
            return
        try:
            self._server = self._server or connect_smtp(self.config)
        except _FAILURES as error:
            raise self._fault(reply_of(error, secrets_of(self.config))[1]) from error

    def hand_over(self, message: Message) -> None:
        """Return once the server has taken the mail. Raises MailRefusedError, ServerError, ConfigError.

        After another error than MailRefusedError, the server may have taken it.
        """
        self.open()
        if self._server is None:
            self._run(message)
            return
        try:
            with within(REPLIES * TIMEOUT_S):
                self._server.sendmail(sender_of(self.config), [message.recipient], message.raw)
        except _FAILURES as error:
            code, text = reply_of(error, secrets_of(self.config))
            if _is_about_mail(error, code):
                raise MailRefusedError(f"{name_of(self.config)}: {text}", code >= 500) from error
            self.hang_up()
            raise self._fault(text) from error

    def hang_up(self) -> None:
        """End the connection. A mail that the server has taken is sent, whatever the server answers here."""
        if self._server is not None:
            with contextlib.suppress(OSError, smtplib.SMTPException), within(TIMEOUT_S):
                self._server.quit()
            self._server.close()
            self._server = None

    def _run(self, message: Message) -> None:
        """Give the mail to the program. It reads the recipient from the header To."""
        argv = (self.config.server, "-i", "-t", "-f", sender_of(self.config))
        raw = message.raw.replace(b"\r\n", b"\n")
        try:
            done = bounded.run(argv, timeout_s=TIMEOUT_S, most_bytes=MOST_REPLY_BYTES, stdin=raw)
        except (OSError, ValueError) as error:
            raise self._fault(scrub(str(error), (), 200)) from error
        if done.code:
            # No code says for sure if the fault is of the recipient or of the server (msmtp: 69 for a greylisted one).
            raise MailRefusedError(scrub(f"{self.config.server}: exit code {done.code}: {done.said}"), is_final=True)

    def _fault(self, said: str) -> ServerError:
        return ServerError(f"{name_of(self.config)} takes no mail: {said}", "see `almanac doctor`")


def program_fault(config: Mail) -> ConfigError | None:
    """Say why the sendmail program cannot run; None if it can."""
    path = Path(config.server)
    if not path.is_file() or not os.access(path, os.X_OK):
        return ConfigError(f"mail.server is {path}, which is no program that can run", "name one, or a host")
    return trust_fault(path)


def _is_about_mail(error: Exception, code: int) -> bool:
    """Return True if the server refuses this recipient or content only, and the connection can be used again.

    After 421 the server hangs up. smtplib gives -1 if the server's line is no reply.
    """
    return isinstance(error, smtplib.SMTPRecipientsRefused | smtplib.SMTPDataError) and code >= 200 and code != 421
