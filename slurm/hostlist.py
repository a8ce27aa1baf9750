"""Slurm's host lists ("n[1-3,7]"), expanded and folded by ClusterShell, within a limit.

ClusterShell's node groups, operators and wildcards ("@all", "n1!n2", "n*") are no part of Slurm's host lists; they
are refused, so that no text from a file can make it run a group's command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_HOSTS = 100_000
MAX_TEXT = 1 << 20

_ALLOWED = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_TERM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str, limit: int = MAX_HOSTS) -> tuple[str, ...]:
    """Host names of a host list, each once, in natural order ("n2" before "n10"); "" gives ().

    Raises ValueError if it is not a host list, or would name more than `limit` hosts: it is counted first.
    """
    if not text:
        return ()
    if _size(text) > limit:
        raise ValueError(f"host list of more than {limit} hosts: {text[:80]!r}")
    # Late: slurm-almanac-client lacks it, and it reads settings that `cli.main` first drops if they are another user's.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f"not a host list: {text[:80]!r} ({error})") from error


def count(text: str, limit: int = MAX_HOSTS) -> int:
    """Count the hosts that a host list names. Raises ValueError as `expand` does."""
    return len(expand(text, limit))


def checked_terms(text: str, limit: int = MAX_HOSTS) -> list[str]:
    """The terms of a host list, "a[1-2],b" as ["a[1-2]", "b"]. Raises ValueError as `expand` does, but for names that
    only ClusterShell refuses.
    """
    if _size(text) > limit:
        raise ValueError(f"host list of more than {limit} hosts: {text[:80]!r}")
    return _TERM.findall(text)


def fold(hosts: Iterable[str]) -> str:
    """A host list of these names, "n[1-3,7]"; "" for none. Raises ValueError where a name is not a host's."""
    names = list(hosts)
    for name in names:
        if not _ALLOWED.fullmatch(name) or "," in name or "[" in name or "]" in name:
            raise ValueError(f"not a host name: {name[:80]!r}")
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))


def _size(text: str) -> int:
    """An upper bound of the hosts named, without expanding anything. Raises ValueError."""
    bare = _BRACKET.sub("", text)
    if len(text) > MAX_TEXT or not _ALLOWED.fullmatch(text) or "[" in bare or "]" in bare:
        raise ValueError(f"not a host list: {text[:80]!r}")
    return sum(_term_size(term) for term in _TERM.findall(text))


def _term_size(term: str) -> int:
    size = 1
    for inside in _BRACKET.findall(term):
        size *= sum(_range_size(part) for part in inside.split(","))
    return size


def _range_size(text: str) -> int:
    match = _RANGE.fullmatch(text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"not a range of host numbers: {text[:80]!r}")
    return int(match[2] or match[1]) - int(match[1]) + 1
