"""Reading a folder of an account that may be hostile: nothing is followed, waited for, or read beyond a bound.

All checks are of descriptors: what the account swaps meanwhile is checked as it is opened, and read once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from almanac.errors import StoreError
from almanac.plain_file import open_plain
from telemetry.store.atomic import opened

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
    """Names of the first entries of a folder, and of one more if there are more."""
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
