"""Files that are replaced whole or not at all, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from almanac.errors import BusyError, StoreError

TEMPORARY = ".tmp-"
"""How the names of files begin that a killed writer may leave behind."""


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o640) -> Iterator[IO[Any]]:
    """A file to write that takes path's place, by rename, once it is on disk: readers see the old one or the new."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
            Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes, mode: int = 0o640) -> None:
    """Replace the content of a file."""
    with replacing(path, mode) as out:
        out.write(content)


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Waits for another holder; with `busy`, what it does, raises BusyError instead. Raises StoreError where the lock
    may not be taken. Root takes locks in folders of others: no link is followed, and no file is emptied.
    """
    try:
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660), "r+b", 0)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{path} is a symbolic link: no lock is taken through it", "remove the link") from error
        raise StoreError(f"{path.parent}: cannot be written: {error.strerror}", "run this as its owner") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise BusyError(f"{path.parent}: another process {busy}", "try again when it is done") from error
        yield
