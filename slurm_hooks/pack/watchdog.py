"""A process beside the launcher that ends the run where the launcher is gone, kill -9 included.

It belongs to no process group or session of the job, so that it lives as long as the MPS daemon, which is started the
same way. Where Slurm confines jobs in cgroups, both end with the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

DONE = b"done"


class Watchdog:
    """end: what to do when the launcher is gone. keep: file descriptors that it keeps open."""

    def __init__(self, end: Callable[[], object]) -> None:
        """Raises OSError where no process can be started."""
        reader, self._writer = os.pipe()
        child = os.fork()
        if child == 0:
            _detach(reader, self._writer, end)
        os.close(reader)
        os.waitpid(child, 0)

    def dismiss(self) -> None:
        """The run has ended in order."""
        with contextlib.suppress(OSError):
            os.write(self._writer, DONE)
        os.close(self._writer)


def _detach(reader: int, writer: int, end: Callable[[], object]) -> None:
    """In the child; never returns."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(writer)
        os.chdir("/")
        _let_go_of_output()
        _watch(reader, end)
    finally:
        os._exit(0)


def _let_go_of_output() -> None:
    """srun waits until nobody has its output open."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def _watch(reader: int, end: Callable[[], object]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    if os.read(reader, len(DONE)) != DONE:
        end()
