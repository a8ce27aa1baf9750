"""What an SMTP server's failure means, in words for operators and for the next try."""

from __future__ import annotations

import smtplib
from collections.abc import Sequence
from dataclasses import dataclass

from almanac.scrub import scrub


@dataclass(frozen=True)
class Reply:
    """text: one safe line. is_lost: the connection cannot be used again. is_refusal: a 5xx reply.

    is_of_sender: the reply is to the sender's address.
    """

    text: str
    is_lost: bool = False
    is_refusal: bool = False
    is_of_sender: bool = False


def reply_of(error: Exception, secrets: Sequence[str] = ()) -> Reply:
    """The reply in an error of smtplib. secrets: texts to remove (almanac.scrub.forms), as servers can repeat them."""
    said: bytes | str
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, said = next(iter(error.recipients.values()))
    elif isinstance(error, smtplib.SMTPResponseException):
        code, said = error.smtp_code, error.smtp_error
    else:
        return Reply(scrub(str(error), secrets, 200) or type(error).__name__, is_lost=True)
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    # 421: the server hangs up. smtplib gives -1 if the server's line is no reply.
    is_lost = code == 421 or code < 200
    said = scrub(f"{code} {' '.join(text.split())}", secrets)
    return Reply(said, is_lost, code >= 500, isinstance(error, smtplib.SMTPSenderRefused))
