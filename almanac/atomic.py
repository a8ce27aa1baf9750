"""Files that are replaced whole or not at all, locks between processes, and names and states of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from almanac.errors import BusyError, StoreError

TEMPORARY = ".tmp-"
"""Prefix of the files that a killed writer may leave behind."""
FileState = tuple[int, ...]
"""Size, time of change (ns), and inode of a file; empty without a file."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def state_of(path: Path) -> FileState:
    """The state of a file; empty where there is none that can be seen."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


def is_safe_name(name: str) -> bool:
    """True if a name can be that of a file of ours."""
    return _NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """Return the name if a file can have it. Raises StoreError."""
    if not is_safe_name(name):
        raise StoreError(f"{name!r} cannot name a folder", "use letters, digits, '.', '_', and '-' in cluster names")
    return name


def hand_over(handle: int, folder: Path) -> None:
    """Give what root made, by its descriptor, to the owner of the folder that it is in, whose service works there.

    A file of root's with a second name is left alone: it may be one that root did not make here.
    """
    if os.geteuid() != 0:
        return
    found, owner = os.fstat(handle), folder.stat()
    is_mine = found.st_uid == 0 and (stat.S_ISDIR(found.st_mode) or found.st_nlink == 1)
    if is_mine and owner.st_uid != 0:
        os.fchown(handle, owner.st_uid, owner.st_gid)


@contextlib.contextmanager
def opened(folder: Path | str, within: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no link; within: descriptor of the one that it is in. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(folder, flags, dir_fd=within)
    try:
        yield handle
    finally:
        os.close(handle)


def make_inner_folder(folder: Path) -> None:
    """Make a folder of a store unless it exists; root's is handed over, but for one on another disk that a link names.

    Root follows a link only if it is root's, or leads to a folder of the link's owner (as with fs.protected_symlinks):
    the store's owner must not choose where else root writes. Raises OSError.
    """
    folder.mkdir(mode=0o750, exist_ok=True)
    if os.geteuid() != 0:
        return
    if folder.is_symlink():
        refuse_foreign_link(folder)
    else:
        with opened(folder) as handle:
            hand_over(handle, folder.parent)


def refuse_foreign_link(folder: Path) -> None:
    """Raise PermissionError if a folder is another user's link, unless it leads to a folder of that user.

    In /tmp, such a link would choose where almanac writes.
    """
    if folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid(), folder.stat().st_uid):
        raise PermissionError(errno.EPERM, "a link of another user to a folder that is not theirs", str(folder))


def make_folders(folder: Path, mode: int = 0o750) -> None:
    """A folder, and those above it that are not there (0755): others can write to none, whatever the umask is.

    Raises OSError, also for a link of another user.
    """
    refuse_foreign_link(folder)
    if not folder.is_dir():
        make_folders(folder.parent, 0o755)
        folder.mkdir(mode=mode, exist_ok=True)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o640, *, is_handed_over: bool = False) -> Iterator[IO[Any]]:
    """A file to write that takes path's place, by rename, once it is on disk: readers see the old one or the new."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fchmod(out.fileno(), mode)
            if is_handed_over:
                hand_over(out.fileno(), path.parent)
            os.fsync(out.fileno())
            Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into StoreError with the fix. With `replacing`, the old file then stays as it was."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(
            f"{path}: cannot be written: {error.strerror or error}",
            "free disk space or raise the quota, then run this again"
            if is_full
            else "check what is there, and run this as its owner",
        ) from error


def write_atomically(path: Path, content: bytes, mode: int = 0o640, *, is_handed_over: bool = False) -> None:
    """Replace the content of a file."""
    with replacing(path, mode, is_handed_over=is_handed_over) as out:
        out.write(content)


def write_output(path: Path, content: bytes) -> None:
    """Replace a file that the caller asked for by name: 0640, or 0600 where its group would be another's choice.

    That is in a folder of another user, and for root in a folder with setgid. A link of that name is replaced. Raises
    OSError.
    """
    folder = path.parent.stat()
    is_foreign = folder.st_uid not in (0, os.geteuid())
    is_shared = os.geteuid() == 0 and folder.st_mode & stat.S_ISGID and folder.st_gid != 0
    write_atomically(path, content, 0o600 if is_foreign or is_shared else 0o640)


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Waits for another holder; with `busy`, what it does, raises BusyError instead. Raises StoreError where the lock
    may not be taken. Root takes locks in folders of others: no link is followed, no file is emptied, and one that root
    made is handed over.
    """
    try:
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660), "r+b", 0)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{path} is a symbolic link, so it cannot be a lock", "remove the link") from error
        raise StoreError(f"{path.parent}: cannot be written: {error.strerror}", "run this as its owner") from error
    with handle:
        hand_over(handle.fileno(), path.parent)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise BusyError(f"{path.parent}: another process {busy}", "run this again when it is done") from error
        yield
