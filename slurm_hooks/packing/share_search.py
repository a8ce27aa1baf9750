"""The search for GPU shares in a run of almanac-pack: the share of the next task, and the throughput of those that run.

A share is fixed when a task makes its CUDA context. So the search moves between tasks, and never inside one: a task
that goes on keeps its share, and only the tasks that start next get others.

A task's program writes its progress to a file of one line: a count that only grows, of steps, samples, or
floating-point operations. "1234", "step 1234", and "step 1234/5000" (of 5,000 in all) are understood. Progress is
unknown if the file is missing or holds anything else.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from advisor.packing.shares import (
    Objective,
    PackedJob,
    Shares,
    ShareSearch,
    ShareTry,
    next_shares,
    record,
)
from almanac.files import open_plain
from slurm_hooks.packing.options import Item, say
from slurm_hooks.packing.search_file import Claim, Saved, SearchFile
from slurm_hooks.packing.task import Slot

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
    """Read a task's progress file; None if it is not a regular file with progress. Never waits, as for a FIFO."""
    try:
        with open_plain(path) as file:
            return parse_progress(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return None


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
        """Forget what was measured, but not the count: another task of this GPU started or ended."""
        self._first = self._newest = None
        self._changes = 0

    def observe(self, now_s: float, progress: Progress | None) -> None:
        """Call it at least once a second. None changes nothing: a file that is being replaced may be absent."""
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


VARIABLE = b"ALMANAC_PACK_PROGRESS"
Found = TypeVar("Found")


@dataclass(frozen=True)
class SearchGoal:
    """The goal of a search.

    jobs: tasks that share a GPU. deadline_s: unix time by which every task must end; None: no deadline.
    """

    objective: Objective
    jobs: int
    deadline_s: float | None = None


@dataclass
class _Task:
    path: str
    is_client: bool
    meter: ProgressMeter = field(default_factory=ProgressMeter)
    is_recorded: bool = False


@dataclass
class _GpuSet:
    """Tasks on one GPU, by position. planned: shares for those that start next. is_recorded: since the last start."""

    shares: dict[int, int] = field(default_factory=dict)
    planned: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, _Task] = field(default_factory=dict)
    is_recorded: bool = False


class TaskSearch:
    """Search of SM shares over the tasks of one run.

    path_of: a task's progress file. file: keeps the measurements; None: they count in this run only. items: number of
    tasks.
    """

    def __init__(
        self,
        goal: SearchGoal,
        run: str,
        items: int,
        path_of: Callable[[Slot, Item], str],
        file: SearchFile | None,
        clock: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._goal, self._run, self._items_left = goal, run, items
        self._path_of, self._file, self._clock, self._now_s = path_of, file, clock, now_s
        self._saved = Saved()
        self._sets: dict[int, _GpuSet] = {}
        self._totals: dict[int, float] = {}
        self._said: set[str] = set()

    def share_of(self, slot: Slot) -> int:
        """Percent for the task that starts next in this slot."""
        found = self._sets.setdefault(slot.gpu, _GpuSet())
        self._items_left -= 1
        if slot.position not in found.planned:
            found.planned = self._plan(slot, found)
        share = found.planned.pop(slot.position)
        found.shares[slot.position] = share
        return share

    def _plan(self, slot: Slot, found: _GpuSet) -> dict[int, int]:
        held = {position: found.shares[position] for position in found.tasks}
        if len(held) + 1 + self._items_left < self._goal.jobs:
            return {slot.position: 100}  # the last tasks have nobody beside them

        def claim(saved: Saved) -> tuple[Saved, Shares]:
            others = {run: one for run, one in saved.claims.items() if run != self._owner(slot.gpu)}
            shares = next_shares(self._search(saved, others, found), held)
            if any(one.shares == shares and one.is_measured for one in saved.tries):
                return replace(saved, claims=others), shares
            return replace(saved, claims={**others, self._owner(slot.gpu): Claim(shares, self._now_s())}), shares

        shares = self._change(claim)
        return {position: share for position, share in enumerate(shares) if position not in held}

    def _owner(self, gpu: int) -> str:
        return f"{self._run}:{gpu}"

    def _search(self, saved: Saved, claims: Mapping[str, Claim], found: _GpuSet) -> ShareSearch:
        pending = tuple(one.shares for one in claims.values())
        jobs = tuple(self._job(position, saved.tries, found) for position in range(self._goal.jobs))
        return ShareSearch(self._goal.objective, jobs, saved.tries, pending)

    def _job(self, position: int, tries: tuple[ShareTry, ...], found: _GpuSet) -> PackedJob:
        """Steps that are left; without a total, as many as the task made in a second of the first try."""
        total = self._totals.get(position)
        if total is None:
            first = next((one for one in tries if one.is_measured and all(one.steps_per_s)), None)
            rate = first.steps_per_s[position] if first else None
            return PackedJob(rate or 1.0)
        last = found.tasks[position].meter.last if position in found.tasks else None
        left = max(1.0, total - (last.done if last else 0.0))
        return PackedJob(left, None if self._goal.deadline_s is None else self._goal.deadline_s - self._now_s())

    def variables(self, slot: Slot, item: Item) -> dict[bytes, bytes]:
        """Return the environment variable that tells the task where to write its progress."""
        return {VARIABLE: os.fsencode(os.path.abspath(self._path_of(slot, item)))}  # noqa: PTH100 - it may hold ".."

    def started(self, slot: Slot, item: Item, is_client: bool) -> None:
        """A task runs. What was measured so far ends, since it had other neighbors."""
        found = self._sets.setdefault(slot.gpu, _GpuSet())
        found.tasks[slot.position] = _Task(os.path.abspath(self._path_of(slot, item)), is_client)  # noqa: PTH100
        found.shares.setdefault(slot.position, 100)
        found.is_recorded = False
        for task in found.tasks.values():
            task.meter.restart()

    def look(self) -> None:
        """Read all progress files. Call it about once a second."""
        for gpu, found in self._sets.items():
            self._read(found)
            if all(task.meter.measured_s >= LEAST_S for task in found.tasks.values()):
                self._record(gpu, found)

    def _read(self, found: _GpuSet) -> None:
        now_s = self._clock()
        for position, task in found.tasks.items():
            progress = read_progress(task.path)
            task.meter.observe(now_s, progress)
            if progress is not None and progress.total:
                self._totals[position] = progress.total

    def ended(self, slot: Slot, code: int) -> None:
        """A task has ended. One that failed before it was ever measured makes the try one without a result."""
        found = self._sets[slot.gpu]
        self._read(found)
        self._record(slot.gpu, found, failed=slot.position if code else None)
        found.tasks.pop(slot.position, None)

    def _record(self, gpu: int, found: _GpuSet, failed: int | None = None) -> None:
        """Keep the rates if all tasks of the GPU ran together, and long enough."""
        tasks = found.tasks
        if found.is_recorded or len(tasks) < self._goal.jobs or not all(task.is_client for task in tasks.values()):
            return
        now_s = self._clock()
        rates = [tasks[position].meter.rate(now_s) for position in range(self._goal.jobs)]
        missing = [position for position, rate in enumerate(rates) if rate is None]
        if missing and (failed not in missing or tasks[failed].is_recorded):
            if all(tasks[position].meter.last is None for position in missing):
                self._say_once(f"no progress in {tasks[missing[0]].path}: this run does not count for the search")
            return
        shares = tuple(found.shares[position] for position in range(self._goal.jobs))
        found.is_recorded = True
        for task in tasks.values():
            task.is_recorded = True

        def keep(saved: Saved) -> tuple[Saved, ShareSearch]:
            claims = {run: one for run, one in saved.claims.items() if run != self._owner(gpu)}
            search = record(self._search(saved, claims, found), shares, rates)
            return replace(saved, tries=search.tries, claims=claims), search

        self._say_result(shares, rates, self._change(keep))

    def _say_result(self, shares: Shares, rates: list[float | None], search: ShareSearch) -> None:
        reached = ", ".join("not measured" if rate is None else f"{rate:.4g}/s" for rate in rates)
        best = f"; best so far {_text(search.best.shares)}" if search.best else ""
        if search.is_done and search.best:
            best = f"; the search is done, the next tasks get {_text(search.best.shares)}"
        say(f"shares {_text(shares)}: {reached} (try {len(search.tries)} of at most {search.most_tries}){best}")

    def close(self) -> None:
        """Let go of the shares that were to be tried."""
        owners = {self._owner(gpu) for gpu in self._sets}

        def release(saved: Saved) -> tuple[Saved, None]:
            return replace(saved, claims={run: one for run, one in saved.claims.items() if run not in owners}), None

        self._change(release)

    def _change(self, change: Callable[[Saved], tuple[Saved, Found]]) -> Found:
        """Of the file; of what this run knows by itself, once the file cannot be used."""
        if self._file is not None:
            try:
                self._saved, found = self._file.change(lambda saved: change(self._read_from(saved)))
            except OSError as error:
                self._say_once(
                    f"{self._file.path} cannot be used: {error.strerror or error}; the search ends with this run"
                )
                self._file = None
            else:
                return found
        self._saved, found = change(self._saved)
        return found

    def _read_from(self, saved: Saved) -> Saved:
        """Content to change. It is remembered unchanged, because the file may turn out not to be writable."""
        if saved.fault:
            self._say_once(saved.fault)
        self._saved = replace(saved, fault="")
        return self._saved

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def _text(shares: Shares) -> str:
    return "+".join(f"{share}%" for share in shares)
