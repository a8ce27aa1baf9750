"""The end of a run, whoever brings it about: its launcher, its watchdog, or the next run of the same user.

A client of MPS that is killed with work outstanding leaves its server in an undefined state. So tasks get a signal and
time, then MPS ends their work, then the daemon quits, and only then is anything killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from slurm_hooks.pack import folder as private_folder
from slurm_hooks.pack.mps import Mps, MpsError
from slurm_hooks.pack.processes import DAEMON_MARK, TASK_MARK, marked, send, wait_until_gone

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
    private_folder.remove(folder)
    return faults


def _at_once(actions: Sequence[Callable[[], None]]) -> list[str]:
    """What went wrong. A daemon that hangs does not use up the others' time before Slurm kills all."""
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
