"""This user's processes of one run, found by a variable in their environment: also those of a task's children."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

TASK_MARK = "ALMANAC_PACK_TASK"
DAEMON_MARK = "ALMANAC_PACK_DAEMON"


def marked(name: str, token: str) -> set[int]:
    """Living processes of this run that were started with name=token. Those that hide their environment are not found.

    A job that a task submits gets the task's environment, but has a job id of its own: it is none of the run.
    """
    job = token.partition("-")[0]
    wanted = {f"{name}={token}".encode()} | ({f"SLURM_JOB_ID={job}".encode()} if job != "0" else set())
    found = set()
    own = os.getpid()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        if entry.isdecimal() and int(entry) != own and wanted <= set(_environment(entry).split(b"\0")):
            found.add(int(entry))
    return {pid for pid in found if _is_alive(pid)}


def _environment(pid: str) -> bytes:
    """That of another user's process does not count, although root can read it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - pathlib is slower, and there are many
            is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116 - as above
            return file.read() if is_own else b""
    except OSError:
        return b""


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def children_of(pid: int, most: int = 200) -> set[int]:
    """This process and those below it, at most so many."""
    found, todo = {pid}, [pid]
    while todo and len(found) < most:
        each = todo.pop()
        try:
            with open(f"/proc/{each}/task/{each}/children", encoding="ascii") as file:  # noqa: PTH123 - as above
                below = {int(word) for word in file.read().split()} - found
        except (OSError, ValueError):
            continue
        found |= below
        todo += below
    return found


def send(pids: Iterable[int], number: signal.Signals | int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def wait_until_gone(look: Callable[[], set[int]], seconds: float) -> set[int]:
    """The processes that are left after at most so many seconds."""
    until = time.monotonic() + seconds
    while (left := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return left
