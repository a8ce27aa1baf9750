"""Ask programs and servers: a deadline over the whole exchange, and a limit on what they answer.

A peer decides neither how long almanac waits nor how much it keeps. Programs run through `run`. The sockets of an
exchange with a server are named by `watch` and shut down by `within`; whoever reads from them counts the bytes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

LINGER_S = 1.0
"""Time for which programs that an ended program started may keep its output open (ssh's ControlPersist does)."""
AFTER_KILL_S = 5.0
MOST_ERROR_BYTES = 1 << 20
_PIECE = 1 << 16


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def said(self) -> str:
        """The end of its error output, in one line."""
        return "; ".join(self.stderr.decode("utf-8", "replace").split("\n")).strip("; ")[-500:]


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    most_bytes: int,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    see_error: Callable[[bytes], None] | None = None,
) -> Done:
    """Run a program in a process group of its own, which has ended when this returns or raises.

    most_bytes: of standard output; the error output may have MOST_ERROR_BYTES if that is more. see_error: gets each
    line of the error output as it comes, and may raise to end the program; no standard output is kept then. Raises
    OSError if the program cannot start, TimeoutError, ValueError if it prints too much, and for root ConfigError if
    others can change the program.
    """
    end_s = time.monotonic() + timeout_s
    program = shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH"))
    if os.geteuid() == 0:
        from almanac.files import require_trusted  # late: a user's sinfo at submission does not need it

        require_trusted(program or argv[0])
    output = subprocess.DEVNULL if see_error else subprocess.PIPE
    with _stdin(stdin) as source, subprocess.Popen(
        argv, executable=program, stdin=source, stdout=output, stderr=subprocess.PIPE, env=env, start_new_session=True
    ) as process:  # fmt: skip
        errors = _Lines(see_error)
        try:
            said = _collect(process, errors, end_s, most_bytes)
        except TimeoutError:
            raise TimeoutError(f"timed out after {timeout_s:g} s") from None
        finally:
            _end(process)
    errors.finish()
    return Done(process.returncode, said, b"".join(errors.parts))


@contextlib.contextmanager
def _stdin(content: bytes) -> Iterator[int]:
    """A file: a program that does not read its input cannot make the writer wait."""
    if not content:
        yield subprocess.DEVNULL
        return
    with open(os.memfd_create("stdin"), "w+b") as file:  # noqa: PTH123 - of a descriptor
        file.write(content)
        file.seek(0)
        yield file.fileno()


class _Lines:
    """Keeps output, and shows each line of it to `see`."""

    def __init__(self, see: Callable[[bytes], None] | None) -> None:
        self.parts: list[bytes] = []
        self._see, self._rest = see, b""

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        if self._see:
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self._see(line)

    def finish(self) -> None:
        if self._see and self._rest:
            self._see(self._rest)


def _collect(process: subprocess.Popen[bytes], errors: _Lines, end_s: float, most_bytes: int) -> bytes:
    """Standard output, once the program has ended. Raises TimeoutError, ValueError."""
    parts: list[bytes] = []
    pause_s, is_over = 0.0005, False
    with selectors.DefaultSelector() as selector:
        for stream, keep, most in (
            (process.stdout, parts.append, most_bytes),
            (process.stderr, errors.add, max(most_bytes, MOST_ERROR_BYTES)),
        ):
            if stream:
                selector.register(stream, selectors.EVENT_READ, _limited(keep, most))
        while not (is_over and not selector.get_map()):
            now_s = time.monotonic()
            if not is_over and _has_ended(process):
                is_over, end_s = True, min(end_s, now_s + LINGER_S)
            elif now_s >= end_s:
                if is_over:  # what it left behind holds the output open
                    break
                raise TimeoutError
            elif selector.get_map():
                for key, _ in selector.select(min(end_s - now_s, 0.1)):
                    part = os.read(key.fd, _PIECE)
                    if not part:
                        selector.unregister(key.fileobj)
                        continue
                    key.data(part)
            else:
                time.sleep(min(end_s - now_s, pause_s))
                pause_s = min(2 * pause_s, 0.05)
    return b"".join(parts)


def _limited(keep: Callable[[bytes], None], most_bytes: int) -> Callable[[bytes], None]:
    """Keeps parts until there are too many bytes. Raises ValueError then."""
    size = 0

    def add(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > most_bytes:
            raise ValueError(f"printed more than {most_bytes} bytes")
        keep(part)

    return add


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True once the program has ended. It stays a zombie, so that its number is nobody else's before `_end`."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and what it started. One that the kernel does not let go is left to it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(AFTER_KILL_S)
    if process.returncode is None:
        process.returncode = -signal.SIGKILL


class _Watch:
    """The sockets of one exchange. Copies: TLS moves the descriptor of a socket to an object of its own."""

    def __init__(self) -> None:
        self.is_over = False
        self._sockets: list[socket.socket] = []
        self._guard = threading.Lock()

    def add(self, connected: socket.socket) -> None:
        with self._guard:
            self._sockets.append(socket.socket(fileno=os.dup(connected.fileno())))
        if self.is_over:
            self.cut()

    def cut(self) -> None:
        with self._guard:
            self.is_over = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._guard:
            for each in self._sockets:
                each.close()
            self._sockets.clear()


_WATCH: ContextVar[_Watch | None] = ContextVar("_WATCH", default=None)


def watch(connected: socket.socket) -> None:
    """Let the innermost `within` of this thread shut the socket down when its time is over."""
    if current := _WATCH.get():
        current.add(connected)


@contextlib.contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """Bound the exchange in this block: after timeout_s its sockets are shut down. Raises TimeoutError then.

    A timeout for each read would let a peer that sends a byte now and then go on for ever.
    """
    current = _Watch()
    timer = threading.Timer(timeout_s, current.cut)
    timer.daemon = True
    token = _WATCH.set(current)
    timer.start()
    late = TimeoutError(f"no whole answer within {timeout_s:g} s")
    try:
        yield
    except Exception as error:
        if current.is_over:
            raise late from error
        raise
    finally:
        timer.cancel()
        _WATCH.reset(token)
        current.close()
    if current.is_over:
        raise late
