"""The file in which a job notes its iterations for the predictor on allocator requests (Algorithm 1).

One line per iteration, appended when it ends: four numbers, separated by tabs or spaces:

    iteration   last iteration   MiB requested in it   MiB held for it, at its peak

The last iteration is "-" where the program does not know it. torch_memory.py writes such a file for PyTorch.
"""

from __future__ import annotations

import math
import os
import stat

from advisor.memory.allocator import Iteration

MOST_BYTES = 1 << 20


class IterationFile:
    """The file as it grows; what is not there, is no regular file, or is malformed is passed over."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new(self) -> list[tuple[Iteration, float | None]]:
        """Iterations added since the last call, each with the number of the last one."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size < self._offset:
                return []
            file.seek(self._offset)
            text = file.read(MOST_BYTES)
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        return [found for line in lines if (found := _parsed(line)) is not None]


def _parsed(line: bytes) -> tuple[Iteration, float | None] | None:
    words = line.decode("ascii", "replace").split()
    try:
        last = None if words[1] == "-" else float(words[1])
        requested, held = float(words[2]), float(words[3])
    except (IndexError, ValueError):
        return None
    if not (math.isfinite(requested) and math.isfinite(held) and requested > 0 and held > 0):
        return None
    return Iteration(requested, held), last
