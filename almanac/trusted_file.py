"""Files that say what almanac does, and that no user may have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path


def read_trusted(path: Path, owners: Collection[int], most_bytes: int) -> str:
    """Text of a file that only these owners, root, and the caller can write. Never waits. Links are followed.

    Raises OSError, and ValueError that says what is wrong with the file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a regular file")
        if about.st_uid not in {0, os.geteuid(), *owners}:
            raise ValueError(f"belongs to uid {about.st_uid}, expected root")
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"mode {stat.S_IMODE(about.st_mode):04o}: others than its owner can write to it")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"larger than {most_bytes} bytes")
    return content.decode("utf-8")
