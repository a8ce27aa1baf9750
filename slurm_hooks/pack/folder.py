"""The private folder of one run: mode 0700, with a random name, locked while its run lives, and removed afterwards."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

PREFIX = "almanac-pack-"
YOUNG_S = 60.0
MOST_PATH = 36
"""Length of a place whose pipes still have a path short enough for a Unix socket (107 bytes)."""


def places(tmpdir: str | None) -> list[str]:
    """Where folders may lie: $TMPDIR if it is a short absolute path, then /tmp."""
    own = [tmpdir] if tmpdir and tmpdir.startswith("/") and len(os.fsencode(tmpdir)) <= MOST_PATH else []
    return list(dict.fromkeys([*own, "/tmp"]))


def is_safe(place: str) -> bool:
    """Return True if others cannot put a folder of theirs where ours is: neither in the place, nor in any folder above.

    Such are folders that only root and this user can change, and sticky ones such as /tmp.
    """
    try:
        folders = {str(each) for path in (place, os.path.realpath(place)) for each in [Path(path), *Path(path).parents]}
        return all(map(_is_closed, folders)) and os.access(place, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_closed(folder: str) -> bool:
    """Raises OSError."""
    status = os.stat(folder)  # noqa: PTH116 - as os.access above
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return not is_shared and status.st_uid in (0, os.getuid())


def new_token(job_id: str) -> str:
    """A name of the run that nobody can guess: its job's id ("0" outside Slurm), 8 digits of its host, 8 by chance."""
    return f"{job_id if job_id.isascii() and job_id.isdecimal() else 0}-{_host()}{os.urandom(4).hex()}"


def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def path_for(place: str, token: str) -> str:
    return f"{place.rstrip('/')}/{PREFIX}{token}"


def make(path: str) -> None:
    """Make the folder, and lock it. Raises OSError, also where the name is taken."""
    Path(path).mkdir(mode=0o700)
    lock(path)


def lock(path: str, *, must_wait: bool = True) -> int:
    """Lock the folder itself: a file in it could be removed as too old. Returns the descriptor; raises OSError.

    The lock ends with the process, however that ends. It is of this host, also where hosts share the folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if must_wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


def remove(path: str) -> None:
    """The folder and all in it, if it is this user's own folder."""
    if _is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def abandoned(place: str) -> Iterator[str]:
    """This user's folders whose run on this host has ended without removing them, each locked while it is yielded.

    Others' folders are never looked into.
    """
    try:
        names = os.listdir(place)  # noqa: PTH208 - names, not paths
    except OSError:
        return
    for name in names:
        path = f"{place.rstrip('/')}/{name}"
        if re.fullmatch(f"{PREFIX}[0-9]+-{_host()}[0-9a-f]{{8}}", name) and _is_own(path) and _is_old(path):
            try:
                fd = lock(path, must_wait=False)
            except OSError:
                continue
            yield path
            os.close(fd)


def token_of(path: str) -> str:
    return path.rpartition(PREFIX)[2]


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_old(path: str) -> bool:
    """A younger folder may be one that is not locked yet."""
    try:
        return time.time() - os.lstat(path).st_mtime > YOUNG_S
    except OSError:
        return False
