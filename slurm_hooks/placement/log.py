"""The record of placed jobs: one JSON line for each change, on disk before Slurm hears of it.

Lines lie in `actions/place-YYYY-MM-DD.jsonl` (UTC days) below the store's root. They name no user.
"""

from __future__ import annotations

import os
import stat
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from almanac.errors import StoreError
from almanac.units import DAY_S, HOUR_S
from slurm_hooks.json_lines import JsonLines
from slurm_hooks.last_look import standing
from slurm_hooks.placement.request import MAX_TEXT, Key
from telemetry.slurm.placement_queue import QueueJob

REQUEUE_DELAY_S = 121.0
"""Seconds from a requeue to the next start: Slurm holds a requeued job for 120 s."""
KEEP_DAYS = 90
"""Older lines are not looked at: a job that waits longer keeps the request that it has."""
LEAST_DELAYS, MOST_DELAYS = 3, 20
"""Measured delays that a median needs, and the newest ones that it counts."""
ENDING_S = HOUR_S
"""Longest time that the processes of a requeued job take to end (own choice)."""
Kind = Literal[
    "place", "placed", "refused", "undo", "undone", "release", "owner", "requeue", "requeued", "stopped", "restarted",
    "dropped",
]  # fmt: skip


@dataclass(frozen=True)
class PlacementLine:
    """One line. what: "place", "undo", "release", and "requeue" are about to be sent to Slurm. "placed": Slurm shows
    the new request; "refused": it shows the job's own; "undone": it shows its own again; "owner": somebody else changed
    the request, and the job is never touched again; "requeued": the job waits again; "stopped": it was not requeued;
    "restarted": it runs again; "dropped": the job changed, so that the order of the line before was not sent.

    own, new: the owner's text and almanac's. gpu_type: of the new one. restarts: of the job at that time. was: the text
    that Slurm showed before the change: almanac's of an earlier change, or the owner's; None in older records.
    done: share of the work that is done, of a requeue. delay_s: from the requeue to the next start.
    """

    what: Kind
    time_s: int
    cluster: str
    job_id: int
    submit_s: int
    restarts: int
    key: Key
    own: str
    new: str
    gpu_type: str
    reason: str
    done: float = 0.0
    delay_s: float | None = None
    almanac: str = ""
    was: str | None = None

    @property
    def texts(self) -> frozenset[str]:
        """What the job can show after this line as long as nobody else changed its request."""
        was = self.own if self.was is None else self.was
        if self.what in ("refused", "stopped"):
            return frozenset({self.own, was})
        return frozenset({self.own, self.new, was if self.what in ("place", "requeue", "restarted") else self.own})

    def is_about(self, job: QueueJob) -> bool:
        """Whether it is the same submission: Slurm uses job numbers again. A requeue gives a job another time of
        submission, 22.05 only when its processes have ended: up to ENDING_S after the line of the requeue.
        """
        later_s, more = job.gres.submit_s - self.submit_s, job.gres.restarts - self.restarts
        is_ending = more == 0 < self.restarts and job.gres.submit_s - self.time_s < ENDING_S
        return self.job_id == job.job_id and (later_s == 0 or (later_s > 0 and (more > 0 or is_ending)))


@dataclass(frozen=True)
class PlacementHistory:
    """What the record says of one cluster. newest: last line of each number. requeues: of each number, oldest first;
    without those that were stopped.

    delays_s: measured requeue delays, oldest first.
    """

    newest: Mapping[int, PlacementLine] = field(default_factory=dict)
    requeues: Mapping[int, tuple[PlacementLine, ...]] = field(default_factory=dict)
    delays_s: tuple[float, ...] = ()

    def line_of(self, job: QueueJob) -> PlacementLine | None:
        """The newest line about this submission of the job."""
        line = self.newest.get(job.job_id)
        return line if line is not None and line.is_about(job) else None

    def requeues_of(self, job: QueueJob) -> tuple[PlacementLine, ...]:
        """The requeues of this submission of the job, oldest first."""
        return tuple(line for line in self.requeues.get(job.job_id, ()) if line.is_about(job))

    def requeue_delay_s(self) -> float:
        """The median of the newest measured delays, once there are a few; until then REQUEUE_DELAY_S."""
        known = self.delays_s[-MOST_DELAYS:]
        return statistics.median(known) if len(known) >= LEAST_DELAYS else REQUEUE_DELAY_S


@dataclass(frozen=True)
class PlacementLog:
    """The record below one folder, which need not be there yet."""

    folder: Path

    def append(self, lines: Sequence[PlacementLine], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError."""
        self._lines.append([asdict(line) for line in lines], now_s)

    def read(self, now_s: int) -> list[PlacementLine]:
        """The lines of the last KEEP_DAYS, oldest first; what a crash cut off is passed over. Raises StoreError."""
        self._require_safe()
        return list(_lines(self._lines.read(now_s - KEEP_DAYS * DAY_S, now_s)))

    def history(self, cluster: str, now_s: int) -> PlacementHistory:
        """Raises StoreError."""
        lines = [line for line in self.read(now_s) if line.cluster == cluster]
        requeues: dict[int, tuple[PlacementLine, ...]] = {}
        for line in lines:
            if line.what == "requeue":
                requeues[line.job_id] = (*requeues.get(line.job_id, ()), line)
            elif line.what == "stopped":
                requeues[line.job_id] = requeues.get(line.job_id, ())[:-1]
        delays = tuple(line.delay_s for line in lines if line.delay_s is not None and line.what == "restarted")
        newest = standing(lines, lambda line: line.job_id, lambda line: line.what == "dropped")
        return PlacementHistory(newest, requeues, delays)

    def _require_safe(self) -> None:
        """Raises StoreError where anybody else could have written the record: its texts go to Slurm."""
        if not self.folder.is_dir():
            return
        owners = {0, os.geteuid(), self.folder.parent.stat().st_uid}
        for path in (self.folder, *sorted(self.folder.glob("place-*.jsonl"))):
            about = path.lstat()
            is_kind = stat.S_ISDIR(about.st_mode) if path == self.folder else stat.S_ISREG(about.st_mode)
            if not is_kind or about.st_uid not in owners or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StoreError(
                    f"{path}: others than the store's owner can write it", "check who did, then chmod go-w and chown it"
                )

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.folder, "place-")


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[PlacementLine]:
    for row in rows:
        try:
            yield _line(row)
        except (ValueError, TypeError, KeyError):
            continue


_TEXTS = ("what", "cluster", "key", "own", "new", "gpu_type", "reason")


def _line(row: Mapping[str, Any]) -> PlacementLine:
    """Raises KeyError, TypeError, or ValueError. Fields of later versions are passed over."""
    numbers = {name: int(row[name]) for name in ("time_s", "job_id", "submit_s", "restarts")}
    texts = {name: str(row[name]) for name in _TEXTS}
    if texts["what"] not in get_args(Kind) or texts["key"] not in get_args(Key):
        raise ValueError("not a line of this log")
    if not all(is_sendable(texts[name]) for name in ("own", "new")):
        raise ValueError("not a request that can be sent")
    done, delay_s = float(row.get("done") or 0.0), row.get("delay_s")
    late_s = None if delay_s is None else float(delay_s)
    was = None if row.get("was") is None else str(row["was"])
    if was is not None and not is_sendable(was):
        raise ValueError("not a request that can be sent")
    return PlacementLine(**texts, **numbers, done=done, delay_s=late_s, was=was)  # type: ignore[arg-type]


def is_sendable(text: str) -> bool:
    """Whether a request is one word of scontrol's input."""
    return len(text) <= MAX_TEXT and text.isascii() and text.isprintable() and not set(text) & set(" \"'\\#;")
