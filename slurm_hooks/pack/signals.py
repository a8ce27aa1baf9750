"""The signals that almanac-pack takes, one by one between its other work."""

from __future__ import annotations

import signal

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""After these no further task starts, and those that run get time to end."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def awaited() -> set[signal.Signals]:
    """Signals that this process takes. What it was started to ignore stays so: nohup ignores HUP."""
    ignored = {number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) == signal.SIG_IGN}
    return {*ENDING, *PASSED_ON, signal.SIGCHLD} - (ignored - {signal.SIGTERM})
