"""Reading files whose content or kind somebody else may have changed: never waits, never reads without a bound.

Files of the store are read through here, so that a FIFO, a device, or a bomb in their place is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**28
"""More than any file of almanac's own but its tables has."""
DEEPEST = 32
"""Brackets within brackets: almanac's own JSON has fewer than 10."""


@contextmanager
def open_plain(path: Path | str, flags: int = 0, dir_fd: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading. flags: more flags of open(2). Raises OSError, also for another kind of file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_plain(path: Path | str, most_bytes: int = MOST_BYTES, flags: int = 0) -> bytes:
    """Return the content of a regular file. Raises OSError, also for another kind and for a larger file."""
    with open_plain(path, flags) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return content


def read_json(path: Path | str, most_bytes: int = MOST_BYTES, flags: int = 0) -> Any:
    """Return the content of a JSON file.

    Raises OSError, and ValueError for everything that is wrong with the content: its encoding, syntax, nesting, and a
    checksum that differs (`with_checksum`).
    """
    return parse_json(read_plain(path, most_bytes, flags))


def parse_json(content: bytes) -> Any:
    """Return what JSON says. Raises ValueError, as `read_json` does."""
    import json  # the client's start does without it

    try:
        found = json.loads(_checked(content).decode("utf-8"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [found]
    for _ in range(DEEPEST):
        level = [each for one in level for each in _inside(one) if isinstance(each, dict | list)]
        if not level:
            return found
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"brackets within brackets more than {DEEPEST} deep"
_CHECKSUM = b',"sum":"'
"""Begins the last member of an object whose text has a checksum. 16 hexadecimal digits and `"}` follow."""


def with_checksum(text: str) -> bytes:
    """Return the text of a JSON object with its checksum as the last member, sum, which `read_json` compares."""
    content = text.rstrip().encode()
    if content == b"{}":
        return b"{}\n"
    return content[:-1] + _CHECKSUM + _sum(content) + b'"}\n'


def _checked(content: bytes) -> bytes:
    """The text without its checksum. A text without one is from an older almanac, or from somebody's editor."""
    body, found, rest = content.rpartition(_CHECKSUM)
    if not found or len(rest.rstrip()) != 18:
        return content
    if rest.rstrip() != _sum(body + b"}") + b'"}':
        raise ValueError("its checksum differs: it was damaged, or changed by hand")
    return body + b"}"


def _sum(content: bytes) -> bytes:
    import hashlib

    return hashlib.blake2b(content, digest_size=8).hexdigest().encode()


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
