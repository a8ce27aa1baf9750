"""Bounds the folder where every user can make files: of each, only their choice of mail stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator

from telemetry.store.atomic import TEMPORARY, opened

MAIL = "mail"
READ = "last-read"
"""The mail service's own file (reports/mail/last_read.py)."""
CHOICE_BYTES, YOUNG_S = 4096, 600
MOST_BELOW = 100_000
"""Entries below users' folders that one run removes; the next one goes on."""
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
        for name, found in list(surplus(folder)):
            if found and _is_dropped(name, found, folder):
                note("removed from the folder mail, no choice, by uid", str(found.st_uid))
            else:
                note("cannot be looked at in the folder mail, is something mounted there?", name)
        _empty(_taken(folder), folder)


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


def _is_dropped(name: str, about: os.stat_result, folder: int) -> bool:
    """Remove a file, or take a folder away from its owner. Return False for what something is mounted on."""
    try:
        if stat.S_ISDIR(about.st_mode):
            _take(name, folder, folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _take(name: str, source: int, mail: int) -> str:
    """Move a folder to a new name in mail, and make it root's alone: its own name is free. Raises OSError."""
    taken = f"{TEMPORARY}{secrets.token_hex(8)}"
    os.rename(name, taken, src_dir_fd=source, dst_dir_fd=mail)
    with opened(taken, mail) as handle:
        os.fchown(handle, os.geteuid(), -1)
        os.fchmod(handle, 0o700)
    return taken


def _taken(mail: int) -> list[str]:
    """Names of folders that were taken, also by earlier runs, and of folders with the name of a choice."""
    taken = list[str]()
    for name in os.listdir(mail):
        if name.startswith(TEMPORARY) or name == READ or _CHOICE.fullmatch(name):
            with contextlib.suppress(OSError):  # a dead mount
                if stat.S_ISDIR(os.stat(name, dir_fd=mail, follow_symlinks=False).st_mode):
                    taken.append(name)
    return taken


def _empty(taken: list[str], mail: int) -> None:
    """Remove folders of root's, and what is below: inner folders are moved up first, so no tree is too deep."""
    left = MOST_BELOW
    while taken and left > 0:
        name = taken.pop()
        with contextlib.suppress(OSError), opened(name, mail) as folder:
            if os.fstat(folder).st_uid == os.geteuid():
                with os.scandir(folder) as entries:
                    inner = list(itertools.islice(entries, left))
                left -= len(inner) + 1
                for each in inner:
                    with contextlib.suppress(OSError):  # something mounted there: the next run tries again
                        if each.is_dir(follow_symlinks=False):
                            taken.append(_take(each.name, folder, mail))
                        else:
                            os.unlink(each.name, dir_fd=folder)
                os.rmdir(name, dir_fd=mail)
