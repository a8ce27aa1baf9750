"""Write users' files into the store, each whole or not at all; root's program `almanac-distribute` copies them.

    <store>/published/<cluster>/user/<uid>/<name>     of the store's owner, until `almanac-distribute` copies them
    <store>/published/<cluster>/user/_site/<name>     for everybody

The layout is that of hooks.advice_dir. Only the store's owner writes below published/. The files there are the list of
what is published.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from almanac.atomic import TEMPORARY, locked, make_folders, opened
from almanac.errors import StoreError
from almanac.files import read_plain
from almanac.published.files import REPORTS, user_folder

PUBLISHED = "published"
"""Folder in a store where files wait for root's program."""
FOLDER_MODE = 0o750
_LIBC = ctypes.CDLL(None, use_errno=True)
Uids = Callable[[str], int | None]
Names = Callable[[int], str | None]


def uid_of(name: str) -> int | None:
    """Return a user's uid from the system's user database; None if it does not know the name."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def name_of(uid: int) -> str | None:
    """Return a user's name from the system's user database; None if it does not know the uid."""
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
    """Users by whether they get files. uids: who do. unknown: without a uid here; shared: several of one uid."""

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


def flush_file_system(folder: Path) -> None:
    """Bring to disk what has been written to its file system: one wait for thousands of files. Raises OSError.

    syncfs(2), which reports what could not be written from Linux 5.8 on.
    """
    with opened(folder) as handle:
        if _LIBC.syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def writable_by_others(root: Path, owner_uid: int) -> list[str]:
    """Return the faults by which others could change what is below root: owner and mode of it, its folders, all above.

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


@dataclass(frozen=True)
class Outgoing:
    """Files by user and name. user: a uid, or `_site`; name: may have a folder, as in `reports/7`."""

    root: Path

    def path(self, user: str, name: str) -> Path:
        return user_folder(self.root, user) / name

    def users(self) -> list[str]:
        """Users with files, sorted; none before the first run."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in (self.root / "user").iterdir())
        return []

    def read(self, user: str, name: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return read_plain(self.path(user, name), flags=os.O_NOFOLLOW)
        return None

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the folder for publishing.

        Raises BusyError if another run publishes, StoreError if the folder is not writable.
        """
        with explained(self.root, self.root):
            make_folders(self.root, FOLDER_MODE)
        return locked(self.root / ".lock", "publishes now")

    def prepare(self) -> None:
        """Remove what a killed publisher left. To be called under the lock. Raises StoreError.

        The folder `user` comes with the first file: an empty one would say that nothing is published any more.
        """
        with explained(self.root, self.root):
            make_folders(self.root, FOLDER_MODE)
            for stale in self.root.glob(f"{TEMPORARY}*"):
                stale.unlink()

    def write(self, files: Iterable[tuple[str, str, bytes]]) -> None:
        """Replace files (user, name, content), each whole or not at all. Raises StoreError.

        All are on disk before the first is put in its place: after an error, old files are as before, or replaced.
        """
        staged = list[tuple[Path, Path]]()
        try:
            with explained(self.root, self.root):
                for user, name, content in files:
                    temporary = self.root / f"{TEMPORARY}{secrets.token_hex(8)}"
                    staged.append((temporary, self.path(user, name)))
                    temporary.touch(0o600)
                    temporary.write_bytes(content)
                flush_file_system(self.root)
                for temporary, path in staged:
                    make_folders(path.parent, FOLDER_MODE)
                    temporary.rename(path)
        finally:
            for temporary, _ in staged:
                temporary.unlink(missing_ok=True)

    def remove(self, user: str, names: Iterable[str]) -> None:
        """Remove files, and folders that are empty then. Raises StoreError."""
        folder = user_folder(self.root, user)
        with explained(folder, self.root):
            for name in names:
                (folder / name).unlink(missing_ok=True)
        for empty in (folder / REPORTS, folder):
            with contextlib.suppress(OSError):
                empty.rmdir()


def outgoing_of(store: Path, cluster: str) -> Outgoing:
    """Return the files of a cluster: one hooks.advice_dir serves one cluster. store: its folder."""
    return Outgoing(store / PUBLISHED / cluster)


def all_outgoing(store: Path) -> list[Outgoing]:
    """Return the files of all clusters of a store."""
    return [Outgoing(path) for path in sorted((store / PUBLISHED).glob("*")) if path.is_dir()]
