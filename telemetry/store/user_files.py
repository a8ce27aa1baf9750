"""Files for users: whose they are, in which folder, and what a reader trusts.

<root>/user/<uid>/...  of root, readable by that user, in folders 0711 (slurm_hooks/distribute.py)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import FileFormatError, StoreError
from telemetry.store.atomic import opened

PUBLISHED, REPORTS = "published", "reports"
"""Names of the folder in a store where files wait for root's program, and of a user's folder of reports."""
Uids = Callable[[str], int | None]
Names = Callable[[int], str | None]


def uid_of(name: str) -> int | None:
    """By the system's user database; None for a name that it does not know."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def name_of(uid: int) -> str | None:
    """By the system's user database; None for a uid that it does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


@contextlib.contextmanager
def explained(path: Path, root: Path) -> Iterator[None]:
    """Raise StoreError, naming path and the fix, for an OSError inside. root: of the folders that root writes to."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = f"make room on the file system of {root}" if full else "run this as the folder's owner"
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}; the old files are still in place", todo
        ) from error


@dataclass(frozen=True)
class Owners:
    """uids: by user. unknown: users without a uid here; shared: several of one uid, of whom none is served."""

    uids: dict[str, int]
    unknown: list[str]
    shared: list[str]


def owners_of(users: Iterable[str], uids: Uids) -> Owners:
    found = {user: uids(user) for user in users}
    times = Counter(uid for uid in found.values() if uid is not None)
    return Owners(
        uids={user: uid for user, uid in found.items() if uid is not None and times[uid] == 1},
        unknown=[user for user, uid in found.items() if uid is None],
        shared=[user for user, uid in found.items() if uid is not None and times[uid] > 1],
    )


def user_folder(root: Path, name: str) -> Path:
    """Where a user's files are. name: uid, or `_site` for everybody else."""
    return root / "user" / name


def flush_file_system(folder: Path) -> None:
    """Bring to disk what has been written to its file system: one wait for thousands of files. Raises OSError.

    syncfs(2), which reports what could not be written from Linux 5.8 on.
    """
    with opened(folder) as handle:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_own(path: Path, uid: int, most_bytes: int) -> bytes:
    """Content of a file that was published for a user. Never waits, and follows no link.

    Raises FileFormatError where it is not theirs (or root's) alone to write, or larger; OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise FileFormatError("not a regular file", "tell an operator of almanac")
        if found.st_uid not in (0, uid) or found.st_mode & 0o022:
            raise FileFormatError("other users can write to it", "tell an operator of almanac")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FileFormatError(f"larger than {most_bytes} bytes", "tell an operator of almanac")
    return content


def writable_by_others(root: Path, owner_uid: int) -> list[str]:
    """Why others could change what is below root, in words: owner and mode of root, its folders and all above them.

    A folder above with the sticky bit (/tmp) lets nobody replace what is not theirs; another user's link in it would
    choose the folder.
    """
    real = root.resolve()
    links = [(link, link.lstat().st_uid) for link in _links_to(root.absolute())]
    faults = [f"{link} is a link of uid {uid}" for link, uid in links if uid not in (0, owner_uid)]
    for path in (*reversed(real.parents), real, real / "sched", real / "user"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            faults.append(f"{path} is not a folder")
        elif found.st_uid not in (0, owner_uid):
            faults.append(f"{path} belongs to uid {found.st_uid}")
        elif found.st_mode & 0o022 and not (found.st_mode & stat.S_ISVTX and path in real.parents):
            faults.append(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: others can write to it")
    return faults


def _links_to(path: Path) -> Iterator[Path]:
    """The links that are followed on the way to a path, which has no loop."""
    for each in (*reversed(path.parents), path):
        if each.is_symlink():
            yield each
            yield from _links_to(each.parent / each.readlink())
