"""The wrapped command: started with the caller's own environment and signals, watched without being touched."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH, signal.SIGXCPU,
)  # fmt: skip
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Command:
    """A running command. Signals to this process are kept back and handed to it by wait()."""

    def __init__(self, argv: Sequence[str], environ: Mapping[bytes, bytes], stderr: int | None) -> None:
        """Raises OSError where it cannot be started."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
        try:
            self._process = subprocess.Popen(argv, env=environ, stderr=stderr, preexec_fn=self._restore_signals)
        except BaseException:
            self._restore_signals()
            raise

    def _restore_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, seconds: float) -> int | None:
        """How it ended, as Popen.returncode, or None where it still runs after so many seconds."""
        until = time.monotonic() + seconds
        while self._process.poll() is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            got = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, min(left, 1.0))
            if got is not None and got.si_signo != signal.SIGCHLD:
                self.send(got.si_signo)
        return self._process.returncode

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def end_like(code: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """End this process as the command ended: with its exit code, or by the signal that ended it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    leave(128 - code if code < 0 else code)
