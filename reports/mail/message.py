"""Turn a rendered report into a mail: headers, text and HTML alternatives, and pictures by Content-ID.

Text that a user wrote never gets into an address, and into no header except the subject, as one printable line.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from functools import cache

from almanac import __version__
from almanac.addresses import is_address, is_domain
from almanac.config import Config, Mail
from almanac.errors import ConfigError
from almanac.units import printable
from reports.job.report import MAX_SUBJECT, Rendered
from reports.mail.outbox import EndedRun, Message

MAX_MAIL_BYTES = 200_000


@cache
def _host_name() -> str:
    name = socket.getfqdn()
    return name if is_domain(name) else "localhost"


def sender_of(config: Mail) -> str:
    """The address that mail comes from. Raises ConfigError."""
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
    raw = _fitting(headers, rendered)
    return Message(message_id, user, recipient, kind, raw, tuple(runs), put_s=now_s)


def message_id_of(cluster: str, user: str, kind: str, runs: Sequence[EndedRun], key: str) -> str:
    """The Message-ID. It does not use the host name, which can change when name lookup fails."""
    keys = sorted((run.cluster, run.job_id, run.submit_s, run.end_s) for run in runs)
    digest = hashlib.sha256(json.dumps([cluster, user, kind, keys, key]).encode()).hexdigest()
    return f"<{kind}.{digest[:32]}@{_label(cluster)}.almanac>"


def _list_id(cluster: str, domain: str) -> str:
    """A header for mail filters (RFC 2919)."""
    return f"GPU job reports <{_label(cluster)}.almanac.{domain}>"


def _label(cluster: str) -> str:
    """The cluster's name without the characters that a domain label must not hold."""
    return re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")[:40].rstrip("-") or "cluster"


def _fitting(headers: Mapping[str, str | Address], rendered: Rendered) -> bytes:
    """The mail with as many pictures as fit into MAX_MAIL_BYTES. The others are replaced by their text."""
    images = dict(rendered.images)
    html = rendered.html
    while True:
        raw = _built(headers, rendered.text, html, images)
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
