"""The lines of one user in the record of published reports, and how they are removed, for `almanac forget`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from almanac.errors import NotAllowedError
from almanac.kept import Kept
from almanac.plain_file import read_json, with_checksum
from reports.published.folder import MANIFEST
from telemetry.store.atomic import write_atomically
from telemetry.store.outgoing import all_outgoing


def manifest_uids(store: Path, user: str) -> set[int]:
    """The uids under which lists were written for the user, who may have no account any more."""
    named = (uid for outgoing in all_outgoing(store) for uid in _theirs(_read(outgoing.root), user))
    return {int(uid) for uid in named if uid.isascii() and uid.isdecimal()}


def manifest_place(root: Path, user: str) -> Kept:
    """Which of the user's lists were written. The next run of publish drops the names of their reports."""
    return Kept("record of lists", len(_theirs(_read(root), user)), "line", lambda: _remove(root, user))


def _remove(root: Path, user: str) -> None:
    document = _read(root)
    theirs = _theirs(document, user)
    if theirs:
        users = {uid: listed for uid, listed in document["users"].items() if uid not in theirs}
        write_atomically(root / MANIFEST, with_checksum(json.dumps({**document, "users": users})))


def _read(root: Path) -> dict[str, Any]:
    """Empty if there is none, or if it is damaged: publish then makes a new one."""
    try:
        document = read_json(root / MANIFEST)
    except (FileNotFoundError, ValueError):
        return {}
    except PermissionError as error:
        raise NotAllowedError(
            f"{root / MANIFEST}: cannot be read", "run this as root, or as the store's owner"
        ) from error
    return document if isinstance(document, dict) else {}


def _theirs(document: dict[str, Any], user: str) -> set[str]:
    users = document.get("users")
    found = users.items() if isinstance(users, dict) else ()
    return {uid for uid, listed in found if isinstance(listed, dict) and listed.get("user") == user}
