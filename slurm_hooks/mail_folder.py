"""Bounds the folder where every user can make files: of each, only their choice of mail stays."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from telemetry.store.atomic import TEMPORARY, opened

MAIL = "mail"
READ = "last-read"
"""The mail service's own file (reports/mail/last_read.py)."""
CHOICE_BYTES, YOUNG_S = 4096, 600
_CHOICE = re.compile(r"([0-9]{1,10})(\.[1-9][0-9]?)?")


def surplus(folder: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """Entries that are no choice of their owner; None: what a user has mounted on one, which root cannot look into.

    folder: a descriptor; what belongs to the folder's owner stays.
    """
    owner, writers = os.fstat(folder).st_uid, set[int]()
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                yield entry.name, None
                continue
            if found.st_uid != owner and not _is_choice(entry.name, found, writers):
                yield entry.name, found


def tidy_choices(target: int, note: Callable[[str, str], object]) -> None:
    """Remove them. target: a descriptor of hooks.advice_dir, which may have no such folder. note: gets reason and name.

    What is mounted on an entry stays: it fills its user's file system, not this one.
    """
    with contextlib.suppress(FileNotFoundError), opened(MAIL, target) as folder:
        for name, found in surplus(folder):
            if found:
                _drop(name, found, folder)
                note("removed from the folder mail, no choice, by uid", str(found.st_uid))
            else:
                note("cannot be looked at in the folder mail, is something mounted there?", name)


def _is_choice(name: str, about: os.stat_result, writers: set[int]) -> bool:
    """Return True for a small file named by its owner's uid, or READ, and for one that its owner writes now."""
    is_small = stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and about.st_size <= CHOICE_BYTES
    if match := _CHOICE.fullmatch(name):
        return is_small and int(match[1]) == about.st_uid
    if name == READ:
        return is_small
    is_young = name.startswith(TEMPORARY) and time.time() - about.st_ctime < YOUNG_S
    if not (is_small and is_young) or about.st_uid in writers:
        return False
    writers.add(about.st_uid)
    return True


def _drop(name: str, about: os.stat_result, folder: int) -> None:
    """Remove a file; take a folder that is not empty away from its owner."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(about.st_mode):
            os.unlink(name, dir_fd=folder)
        elif not _is_removed(name, folder):
            with opened(name, folder) as handle:
                os.fchown(handle, os.geteuid(), -1)
                os.fchmod(handle, 0o700)


def _is_removed(name: str, folder: int) -> bool:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True
