"""The file of a task's output."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_hooks.pack.items import Item

TAIL_BYTES = 65_536


def output_path(pattern: str, item: Item, slot: int, environ: Mapping[str, str]) -> str:
    """The pattern with its words replaced. A name from outside never adds a folder."""
    job = environ.get("SLURM_JOB_ID", "")
    array = environ.get("SLURM_ARRAY_JOB_ID", "") or job
    is_array_sweep = item.is_of_sweep and "SLURM_ARRAY_JOB_ID" in environ
    if not pattern:
        pattern = "slurm-%A_%a.out" if is_array_sweep else "slurm-%j_%a.out" if job else "pack-%a.out"
    words = {
        "a": str(item.index),
        "A": array,
        "j": job,
        "s": str(slot),
        "x": environ.get("SLURM_JOB_NAME", ""),
        "%": "%",
    }
    safe = {letter: re.sub(r"[/\0]|^\.+", "_", word) for letter, word in words.items()}
    return re.sub("%([aAjsx%])", lambda match: safe[match[1]], pattern)


@dataclass(frozen=True)
class Output:
    """An open file. start: its length before this task. is_shared: it is the job's own output, as a pipe can be."""

    path: str
    fd: int
    start: int

    def tail(self) -> str:
        """The end of what the task wrote; "" where that cannot be read."""
        try:
            with open(self.path, "rb", opener=_quiet) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self.start, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def fault(self) -> str:
        """Why some of the output may be lost; "" where it is on the disk."""
        try:
            if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                return ""
            os.fsync(self.fd)
            space = os.fstatvfs(self.fd)
            return "" if space.f_bavail or not space.f_blocks else "No space left on device"  # FUSE may count nothing
        except OSError as error:
            return error.strerror or str(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _quiet(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def open_output(path: str, must_append: bool) -> Output:
    """Raises OSError. The job's own output, where the path is that, is continued: the last array index is its name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        status = os.fstat(fd)
        number = _of_job(status)
        if number is not None:  # with its offset: a file that is not open for appending would be written over
            os.close(fd)
            fd = os.dup(number)
        elif not must_append and stat.S_ISREG(status.st_mode):
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
        return Output(path, fd, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise


def _of_job(status: os.stat_result) -> int | None:
    """The number under which this process has the file as its own output; None where it has not."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None
