"""A real SMTP server on loopback that keeps the mails it takes, and refuses or hangs up on demand."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP

HANG_UP = "hang up"
Says = Callable[[str], str | None]


def _agrees(about: str) -> str | None:
    return None


@dataclass
class MailServer:
    """says_mail, says_rcpt, says_data: of a sender, a recipient, a Message-ID the reply; None: as usual; HANG_UP.
    says_quit: the reply to QUIT.

    taken: sender, recipients and mail of each that it took; connections: how many there were.
    """

    says_mail: Says = _agrees
    says_rcpt: Says = _agrees
    says_data: Says = _agrees
    says_quit: str = "221 Bye"
    options: dict[str, Any] = field(default_factory=dict)
    taken: list[tuple[str, list[str], EmailMessage]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def __enter__(self) -> MailServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port, **self.options)
        self._controller.start()
        self.connections = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._controller.stop()

    @property
    def ids(self) -> list[str]:
        return [str(mail["Message-ID"]) for _, _, mail in self.taken]

    async def handle_EHLO(self, server: SMTP, session: Any, envelope: Any, hostname: str, replies: list[str]) -> Any:  # noqa: N802
        self.connections += 1
        session.host_name = hostname
        return replies

    async def handle_MAIL(self, server: SMTP, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if reply := self.says_mail(address):
            return reply
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if reply := self.says_rcpt(address):
            return reply
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Any) -> str:  # noqa: N802
        mail = message_from_bytes(envelope.content, policy=default)
        assert isinstance(mail, EmailMessage)
        reply = self.says_data(str(mail["Message-ID"]))
        if reply in (None, HANG_UP):
            self.taken.append((envelope.mail_from, envelope.rcpt_tos, mail))
            self.raw.append(envelope.content)
        if reply == HANG_UP:
            server.transport.abort()
            return "421 gone"
        return reply or "250 OK"

    async def handle_QUIT(self, server: SMTP, session: Any, envelope: Any) -> str:  # noqa: N802
        return self.says_quit
