"""Root's files among those of other accounts: rights for one reader, folders that may be hostile, and choices of mail.

A published file is root's and readable by one user, as closely as the file system allows: by an ACL; by mode 0440 with
a group that only this user is in; by a file of the user's own, which they can fill.

Of a folder that may be hostile, nothing is followed, waited for, or read beyond a bound. All checks are of descriptors:
what the account swaps meanwhile is checked as it is opened, and read once.

In the folder where every user can make files, only each user's choice of mail stays.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import itertools
import os
import pwd
import re
import secrets
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from almanac.atomic import TEMPORARY, opened
from almanac.errors import StoreError
from almanac.files import open_plain
from almanac.submit_config import SITE

ACL = "system.posix_acl_access"
NOBODY = 65534


@dataclass(frozen=True)
class Rights:
    """Owner, group, mode, and ACL of a file."""

    uid: int
    gid: int
    mode: int
    acl: bytes | None = None

    def apply(self, handle: int) -> None:
        """Give an open file these rights.

        Raises OSError, also if the file system accepts the rights but does not keep them.
        """
        os.fchown(handle, self.uid, self.gid)
        os.fchmod(handle, self.mode)
        if self.acl:
            os.setxattr(handle, ACL, self.acl)
        elif acl_on(handle):  # of the folder's default
            os.removexattr(handle, ACL)
            os.fchmod(handle, self.mode)
        if not self.are_on(os.fstat(handle), acl_on(handle)):
            raise OSError("the file system does not keep these rights")

    def are_on(self, found: os.stat_result, acl: bytes | None) -> bool:
        now = found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), acl
        return now == (self.uid, self.gid, self.mode, self.acl)


def acl_for(uid: int) -> bytes:
    """The kernel's form (version 2) of user::r--, user:<uid>:r--, group::---, mask::r--, other::---."""
    none = 0xFFFFFFFF
    entries = (0x01, 4, none), (0x02, 4, uid), (0x04, 0, none), (0x10, 4, none), (0x20, 0, none)
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def acl_on(file: int | str) -> bytes | None:
    """The ACL of a file beyond its mode; None if there is none, or if the file system has none. No link is followed."""
    with contextlib.suppress(OSError):
        return os.getxattr(file, ACL) if isinstance(file, int) else os.getxattr(file, ACL, follow_symlinks=False)
    return None


@dataclass(frozen=True)
class Readers:
    """Gives the rights of files by their reader. folder: a descriptor of a folder on the file system in question."""

    folder: int

    def __call__(self, name: str) -> Rights:
        """name: a uid, or SITE. Without root, all files are the caller's own."""
        me = os.geteuid()
        if name == SITE or me != 0 or name == "0":
            return Rights(me, os.getegid(), 0o444 if name == SITE else 0o400)
        uid = int(name)
        if self.has_acl:
            return Rights(0, 0, 0o440, acl_for(uid))
        gid = self._groups.get(uid)
        return Rights(uid, 0, 0o400) if gid is None else Rights(0, gid, 0o440)

    @cached_property
    def has_acl(self) -> bool:
        """True if a file there takes an ACL and keeps it."""
        name, flags = f"{TEMPORARY}{secrets.token_hex(8)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600, dir_fd=self.folder)
        try:
            Rights(os.geteuid(), os.getegid(), 0o440, acl_for(NOBODY)).apply(handle)
        except OSError:
            return False
        finally:
            os.close(handle)
            os.unlink(name, dir_fd=self.folder)
        return True

    @cached_property
    def _groups(self) -> dict[int, int]:
        """By uid, the primary group that nobody else is in; two names of one uid, or of one gid, count together.

        A directory service that lists no users leaves its users without an entry here: nobody knows who is in a group.
        """
        members: dict[int, set[int]] = defaultdict(set)
        users, strange = pwd.getpwall(), set[int]()
        uids = {user.pw_name: user.pw_uid for user in users}
        for user in users:
            members[user.pw_gid].add(user.pw_uid)
        for group in grp.getgrall():
            members[group.gr_gid] |= {uids[name] for name in group.gr_mem if name in uids}
            if not uids.keys() >= {*group.gr_mem}:
                strange.add(group.gr_gid)
        return {
            user.pw_uid: user.pw_gid
            for user in users
            if members[user.pw_gid] == {user.pw_uid} and user.pw_gid not in strange
        }


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LeftOutError(Exception):
    """A file or folder of the source that is not used, and why."""


@contextlib.contextmanager
def opened_below(source: Path, below: Sequence[str]) -> Iterator[int]:
    """A descriptor of the folder of users' folders. Without it, nothing is removed: a disk may be missing."""
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            owner = os.fstat(folder).st_uid
            for name in below:
                folder = stack.enter_context(opened(name, folder))
                if os.fstat(folder).st_uid != owner:
                    raise PermissionError(errno.EPERM, f"{name} does not belong to the owner of {source}")
        except OSError as error:
            path = source.joinpath(*below)
            raise StoreError(f"{path}: cannot be opened: {error.strerror}", "run `almanac publish`") from error
        yield folder


def first_names(folder: int, most: int) -> list[str]:
    """Return the names of the first entries of a folder, and of one more if there are more."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, most + 1)]


@contextlib.contextmanager
def within(name: str, folder: int) -> Iterator[int]:
    """A descriptor of a folder of the source. Raises LeftOutError."""
    try:
        handle = os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        raise LeftOutError(f"left out, folder cannot be opened ({error.strerror})") from error
    try:
        yield handle
    finally:
        os.close(handle)


def read(folder: int, name: str, owner: int, most: int, is_text: bool) -> tuple[bytes, int]:
    """Content and time (ns) of a file of the source. Raises LeftOutError."""
    try:
        with open_plain(name, os.O_NOFOLLOW, folder) as file:
            about = os.fstat(file.fileno())
            check(about, owner, most)
            content = file.read(most + 1)
        if len(content) > most:
            raise LeftOutError("left out, too large")
        if is_text:
            content.decode("utf-8")
    except OSError as error:
        raise LeftOutError(f"left out, cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise LeftOutError("left out, not UTF-8") from error
    return content, about.st_mtime_ns


def check(about: os.stat_result, owner: int, most: int) -> None:
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
        raise LeftOutError("left out, not a plain file under one name")
    if about.st_uid != owner:
        raise LeftOutError("left out, of another owner than its folder")
    if about.st_size > most:
        raise LeftOutError("left out, too large")


MAIL = "mail"
READ = "last-read"
"""The mail service's own file (reports/mail/recipients.py)."""
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
