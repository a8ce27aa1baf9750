"""What a mail server's refusal means for the message: never, later, or nothing until an operator has seen to it."""

from __future__ import annotations

import re
import smtplib
from dataclasses import dataclass

from almanac.units import printable


@dataclass(frozen=True)
class Reply:
    """text: what was said. is_final: the same message will always be refused. is_lost: the connection cannot be used.

    is_sender: the server takes no mail from us at all, so no message is to blame.
    """

    text: str
    is_final: bool = False
    is_lost: bool = False
    is_sender: bool = False


def reply_of(error: Exception) -> Reply:
    """4xx and a lost connection: later. 5xx: never, but for a matter of policy (5.7.x), which the site can correct."""
    code: int
    said: bytes | str
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, said = next(iter(error.recipients.values()))
    elif isinstance(error, smtplib.SMTPResponseException):
        code, said = error.smtp_code, error.smtp_error
    elif isinstance(error, ValueError):
        return Reply(f"cannot be sent: {printable(str(error))}", is_final=True, is_lost=True)
    else:
        return Reply(printable(str(error)) or type(error).__name__, is_lost=True)
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    reply = printable(f"{code} {' '.join(text.split())}", 300)
    if code == 421 or code < 200:  # it closes; smtplib says -1 of what is no reply
        return Reply(reply, is_lost=True)
    is_policy = re.match(r"5\.7\.\d", text) is not None
    is_size = code == 552
    if isinstance(error, smtplib.SMTPSenderRefused) and code >= 500 and not is_size:
        return Reply(reply, is_sender=True)
    return Reply(reply, is_final=code >= 500 and not is_policy)
