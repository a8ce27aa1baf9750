"""Throughput of a task, by a file of one line that its program replaces or rewrites as it goes.

The line is a count that only grows: steps, samples, or floating-point operations. "1234", "step 1234", and
"step 1234/5000" (of 5,000 in all) are understood. Whatever else is in the file, or no file, means: not known.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field

MOST_BYTES = 256
MOST_COUNT = 1e30
"""Floating-point operations of 1,000 GPUs reach 1e24 in a day."""
LEAST_S, LEAST_STEPS = 60.0, 5.0
"""A rate needs one of both (Gimbal measures a try for 60 s or 5 steps)."""
STALL_S = 120.0
"""A count that stands for longer than this, and than three usual gaps, counts as a standstill so far."""
_NUMBER = r"[0-9]{1,30}(?:\.[0-9]{0,9})?(?:[eE]\+?[0-9]{1,2})?"
_LINE = re.compile(rf"(?:[A-Za-z]{{1,20}}[ \t]*[:=]?[ \t]*)?({_NUMBER})(?:[ \t]*/[ \t]*({_NUMBER}))?[ \t]*")


@dataclass(frozen=True)
class Progress:
    """Steps done, and steps in all; None: not said."""

    done: float
    total: float | None = None


def parse_progress(content: bytes) -> Progress | None:
    """The first line; None if it is not as described above."""
    lines = content[:MOST_BYTES].splitlines()
    found = _LINE.fullmatch(lines[0].decode("ascii", "replace").strip(" \t")) if lines else None
    if found is None or (len(lines) == 1 and len(content) >= MOST_BYTES):
        return None
    done, total = float(found[1]), float(found[2]) if found[2] else None
    if done > MOST_COUNT or (total is not None and not done <= total <= MOST_COUNT):
        return None
    return Progress(done, total)


def read_progress(path: str) -> Progress | None:
    """None without a regular file that says it. Never waits, as for a FIFO."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return parse_progress(os.read(handle, MOST_BYTES))
    except OSError:
        return None
    finally:
        os.close(handle)


@dataclass
class ProgressMeter:
    """Steps per second since the first change of the count that was seen, so that the start-up does not count.

    A count that falls (a restart in the task) begins the measurement again.
    """

    last: Progress | None = None
    _first: tuple[float, float] | None = None
    _newest: tuple[float, float] | None = None
    _changes: int = field(default=0)

    def restart(self) -> None:
        """Forget what was measured, but not the count: another task started or ended beside this one."""
        self._first = self._newest = None
        self._changes = 0

    def observe(self, now_s: float, progress: Progress | None) -> None:
        """Call it at least once a second. None is passed over: a file that is being replaced may be absent."""
        if progress is None:
            return
        before, self.last = self.last, progress
        if before is None or progress.done == before.done:
            return
        if progress.done < before.done:
            self.restart()
            return
        self._newest = now_s, progress.done
        self._changes += 1
        if self._first is None:
            self._first, self._changes = self._newest, 0

    @property
    def measured_s(self) -> float:
        """Seconds from the first change of the count to the last one."""
        return self._newest[0] - self._first[0] if self._first and self._newest else 0.0

    def rate(self, now_s: float) -> float | None:
        """Steps per second; None if too little was seen. Not zero: a standstill only lowers it."""
        if self._first is None or self._newest is None or not self._changes:
            return None
        (first_s, first), (newest_s, newest) = self._first, self._newest
        seconds, steps = newest_s - first_s, newest - first
        stalled_s = now_s - newest_s
        if stalled_s > max(STALL_S, 3 * seconds / self._changes):
            seconds += stalled_s
        if seconds <= 0 or (seconds < LEAST_S and steps < LEAST_STEPS):
            return None
        return steps / seconds
