"""Text of a server, made fit to be shown and logged: no credentials, printable characters, bounded length."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from urllib.parse import quote

from almanac.units import printable

_HIDDEN = "***"
_MOST = 4096
"""Characters in which credentials of unknown value are looked for; what is shown is shorter."""
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization\W{1,4})(?:\w+ )?[^\s\"',;]+")
_SCHEME = re.compile(r"(?i)\b(basic|bearer|auth (?:plain|login|xoauth2)) (?=[^\s\"',;]*[0-9=])[^\s\"',;]{8,}")
_USER_INFO = re.compile(r"://[^/\s@]{1,500}@")


def forms(secret: str, user: str = "") -> tuple[str, ...]:
    """Return the forms of a secret, longest first: plain, in an address, Basic, AUTH PLAIN and LOGIN."""
    if not secret:
        return ()
    pairs = (secret, f"{user}:{secret}", f"\0{user}\0{secret}", f"{user}\0{user}\0{secret}")
    encoded = [base64.b64encode(text.encode("utf-8", "surrogateescape")).decode() for text in pairs]
    found = {secret, quote(secret, safe=""), *encoded, *(text.rstrip("=") for text in encoded)}
    return tuple(sorted(found, key=len, reverse=True))


def scrub(text: str, secrets: Sequence[str] = (), limit: int = 300) -> str:
    """Text of a server for people: its secrets (`forms`) and all that looks like a credential become "***"."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    text = _HEADER.sub(rf"\1{_HIDDEN}", text[:_MOST])
    text = _SCHEME.sub(rf"\1 {_HIDDEN}", text)
    return printable(_USER_INFO.sub(f"://{_HIDDEN}@", text).strip(), limit)
