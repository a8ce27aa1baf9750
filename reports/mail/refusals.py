"""What a mail server refuses in a run in which it has taken nothing: is it the messages, or is the server set wrong?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from reports.mail.outbox import Message
from reports.mail.smtp_replies import Reply

REFUSED_FAULT, MOST_REFUSED = 3, 10
"""Recipients that are refused before the server is named as at fault, and before it is left alone."""


@dataclass
class Refusals:
    """by_id: by Message-ID the message, without its bytes, and the reply to its last try."""

    by_id: dict[str, tuple[Message, Reply]] = field(default_factory=dict)

    def add(self, message: Message, reply: Reply) -> None:
        self.by_id[message.message_id] = replace(message, raw=b""), reply

    def drop(self, message: Message) -> None:
        """It is tried again, in the same run."""
        self.by_id.pop(message.message_id, None)

    def pop_all(self) -> list[tuple[Message, Reply]]:
        found = list(self.by_id.values())
        self.by_id.clear()
        return found

    @property
    def recipients(self) -> int:
        return len({message.recipient for message, _ in self.by_id.values()})

    @property
    def fault(self) -> str:
        """In words, to follow the server's name; "" while few recipients were refused."""
        if self.recipients < REFUSED_FAULT:
            return ""
        *_, (_, reply) = self.by_id.values()
        return f"has refused {self.recipients} recipients and taken no mail: {reply.text}"
