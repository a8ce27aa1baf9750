"""Addresses to which mail may go: fewer characters than RFC 5321 allows, as mail systems give some of the others
("|", "/", "%", "!") a meaning.
"""

from __future__ import annotations

import re

_LOCAL = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{0,20}}")
_USER = re.compile(_LOCAL)
_LONGEST_USER = "u" * 32  # of useradd


def is_domain(text: str) -> bool:
    return bool(_DOMAIN.fullmatch(text)) and len(text) <= 253


def is_address(text: str) -> bool:
    """Whether that is an address to which mail may go: a local user's name, or name@domain, in ASCII."""
    local, at, domain = text.partition("@")
    is_local = bool(_USER.fullmatch(local)) and ".." not in local and not local.endswith(".")
    return is_local and (not at or is_domain(domain))


def address_of(user: str, pattern: str) -> str | None:
    """The address by mail.recipient; None where that gives none: "@" in a user's name must not say where mail goes."""
    address = pattern.replace("{user}", user)
    return address if _USER.fullmatch(user) and is_address(address) else None


def is_pattern(pattern: str) -> bool:
    """Whether it gives each user with a usual name an address of their own."""
    local, _, domain = pattern.partition("@")
    if "{user}" not in local or "{user}" in domain:  # not every user's name is that of a host
        return False
    return None not in (address_of(user, pattern) for user in ("u", _LONGEST_USER))
