"""What a mail server's refusal means for the message: never, later, or nothing until an operator has seen to it."""

from __future__ import annotations

import re
import smtplib
from collections.abc import Sequence
from dataclasses import dataclass

from almanac.scrub import scrub

_CODE = re.compile(r"[245]\.\d{1,3}\.\d{1,3}\b")
"""An enhanced status code (RFC 3463)."""
_POLICY = re.compile(
    r"relay|client host|not permitted|not allowed|denied|blocked|authenticat|authoriz|polic|too many|rate limit", re.I
)
"""What servers say of policy without such a code: Exim "relay not permitted", sendmail "Relaying denied"."""


@dataclass(frozen=True)
class Reply:
    """text: what was said. is_final: the same message will always be refused. is_lost: the connection cannot be used.

    is_refusal: of the recipient, the content or by policy (5xx): a server that gives nothing else may be set wrong.
    is_sender: the server takes no mail from us at all, so no message is to blame.
    """

    text: str
    is_final: bool = False
    is_lost: bool = False
    is_refusal: bool = False
    is_sender: bool = False


def reply_of(error: Exception, secrets: Sequence[str] = ()) -> Reply:
    """4xx and a lost connection: later. 5xx: never, but for a matter of policy, which the site can correct.

    secrets: what the text may not hold (almanac.scrub.forms): a server can say back what it was told.
    """
    code: int
    said: bytes | str
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, said = next(iter(error.recipients.values()))
    elif isinstance(error, smtplib.SMTPResponseException):
        code, said = error.smtp_code, error.smtp_error
    elif isinstance(error, ValueError):
        return Reply(f"cannot be sent: {scrub(str(error), secrets, 200)}", is_final=True, is_lost=True)
    else:
        return Reply(scrub(str(error), secrets, 200) or type(error).__name__, is_lost=True)
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    reply = scrub(f"{code} {' '.join(text.split())}", secrets)
    if code == 421 or code < 200:  # it closes; smtplib says -1 of what is no reply
        return Reply(reply, is_lost=True)
    is_size = code == 552
    if isinstance(error, smtplib.SMTPSenderRefused) and code >= 500 and not is_size:
        return Reply(reply, is_sender=True)
    return Reply(reply, is_final=code >= 500 and not _is_policy(text), is_refusal=code >= 500 and not is_size)


def _is_policy(text: str) -> bool:
    """By the enhanced code (5.7.x), which says it best; else by words, addresses left out."""
    if _CODE.match(text):
        return text.startswith("5.7.")
    return _POLICY.search(re.sub(r"\S*@\S*", "", text)) is not None
