"""Rights of a published file: root's, and readable by one user, as closely as the file system allows.

In this order: an ACL; mode 0440 with a group that only this user is in; a file of the user's own, which they can fill.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import stat
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from almanac.submit_config import SITE
from telemetry.store.atomic import TEMPORARY

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
        """Raises OSError, also if the file system takes the ACL and does not keep it."""
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
