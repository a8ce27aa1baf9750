"""The end of a run: its processes, the watchdog that outlives the launcher, and the order in which all of them end.

A client of MPS that is killed with work outstanding leaves its server in an undefined state. So tasks get a signal and
time, then MPS ends their work, then the daemon quits, and only then is anything killed. Launcher, watchdog, and the
next run of the same user end a run alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from slurm_hooks.packing.job import TASK_MARK, remove_folder
from slurm_hooks.packing.mps import DAEMON_MARK, Mps, MpsError


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
    """Return the environment of a process, empty for another user's, although root can read it."""
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
    """Return the ids of process `pid` and of its descendants; stops once it has `most`."""
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


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Signals after which no further task starts, and running ones get time to end."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def awaited() -> set[signal.Signals]:
    """Signals that this process takes. What it was started to ignore stays so: nohup ignores HUP."""
    ignored = {number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) == signal.SIG_IGN}
    return {*ENDING, *PASSED_ON, signal.SIGCHLD} - (ignored - {signal.SIGTERM})


AFTER_TERMINATE_S = 2.0
AFTER_QUIT_S = 2.0
AFTER_TERM_S = 1.0
AFTER_KILL_S = 5.0


def end_run(
    token: str,
    folder: str,
    daemons: Sequence[Mps],
    grace_s: float,
    *,
    must_signal: bool = True,
    own_tasks: Callable[[], set[int]] = set,
) -> list[str]:
    """End all processes of a run, and remove its folder; what went wrong on the way.

    must_signal: tasks get SIGTERM first; False: they have had it. own_tasks: of the caller that still run, marked or
    not: a program can change its environment.
    """

    def tasks() -> set[int]:
        return marked(TASK_MARK, token) | own_tasks()

    faults: list[str] = []
    if must_signal:
        send(tasks(), signal.SIGTERM)
    if wait_until_gone(tasks, grace_s):
        faults += _at_once([mps.terminate_clients for mps in daemons])
        wait_until_gone(tasks, AFTER_TERMINATE_S if daemons else 0.0)
    if daemons and marked(DAEMON_MARK, token):
        faults += _at_once([mps.quit for mps in daemons])
    _end_daemons(token)
    if left := tasks():
        send(left, signal.SIGKILL)
        wait_until_gone(tasks, AFTER_KILL_S)
    remove_folder(folder)
    return faults


def _at_once(actions: Sequence[Callable[[], None]]) -> list[str]:
    """Return what went wrong. A daemon that hangs does not use up the others' time before Slurm kills all."""
    if not actions:
        return []
    from concurrent.futures import ThreadPoolExecutor  # takes 0.01 s, and only MPS needs it

    with ThreadPoolExecutor(len(actions)) as pool:
        return [fault for fault in pool.map(_fault_of, actions) if fault]


def _fault_of(action: Callable[[], None]) -> str:
    try:
        action()
    except MpsError as error:
        return str(error)
    return ""


def _end_daemons(token: str) -> None:
    """Control daemons and servers that are still there."""

    def left() -> set[int]:
        return marked(DAEMON_MARK, token)

    if not wait_until_gone(left, AFTER_QUIT_S):
        return
    for number, seconds in ((signal.SIGTERM, AFTER_TERM_S), (signal.SIGKILL, AFTER_KILL_S)):
        send(left(), number)
        if not wait_until_gone(left, seconds):
            return


DONE = b"done"


class Watchdog:
    """A process that calls `end` once the launcher is gone without dismiss()."""

    def __init__(self, end: Callable[[], object]) -> None:
        """Start the process. Raises OSError if none can be started."""
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
