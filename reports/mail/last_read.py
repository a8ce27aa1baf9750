"""When the mail timer last read the folder of the users' choices: a file `last-read` in it, for `almanac mail`.

A host without the shared folder has a folder of its own, which no timer reads. The file is there to be shown only:
nothing acts on it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from telemetry.store.atomic import replacing

NAME = "last-read"
WRITE_S = 600
"""The timer runs every minute. It writes the file again only when it is this old."""
_LINE = re.compile(r"([0-9]{1,11}) ([A-Za-z0-9._-]{1,255})\n")
_MOST_BYTES = 300


@dataclass(frozen=True)
class LastRead:
    """time_s: seconds since 1970. host: where the timer runs."""

    time_s: int
    host: str


def mark_read(folder: Path, now_s: int, host: str, owner_uid: int) -> None:
    """Note that the timer on this host reads the folder. Does nothing if it cannot be written: mail matters more.

    owner_uid: the store's owner, who gets a file that root writes: the folder is sticky, so the timer could not replace
    it. Another user can take the name before the first run. Then the file stays theirs, and doctor names them.
    """
    known = last_read(folder)
    if known and known.host == host and 0 <= now_s - known.time_s < WRITE_S:
        return
    with contextlib.suppress(OSError), replacing(folder / NAME, 0o644) as out:
        out.write(f"{now_s} {host}\n".encode())
        if os.geteuid() == 0:
            os.fchown(out.fileno(), owner_uid, -1)


def last_read(folder: Path) -> LastRead | None:
    """None if no timer has noted that it reads the folder."""
    try:
        handle = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            about = os.fstat(handle)
            is_valid = stat.S_ISREG(about.st_mode) and is_from_service(about, folder.stat())
            found = _LINE.fullmatch(file.read(_MOST_BYTES).decode("ascii")) if is_valid else None
    except (OSError, ValueError):
        return None
    return LastRead(int(found[1]), found[2]) if found else None


def is_from_service(about: os.stat_result, folder: os.stat_result) -> bool:
    """Whether root or a member of almanac's group, to which the folder belongs, owns a file in it.

    Also an account that this host does not know: who can log in to this host has an account here. A folder of an older
    release does not belong to the group, so there anybody counts.
    """
    if about.st_uid == 0 or not folder.st_mode & stat.S_ISGID:
        return True
    try:
        account = pwd.getpwuid(about.st_uid)
    except KeyError:
        return True
    return folder.st_gid in os.getgrouplist(account.pw_name, account.pw_gid)
