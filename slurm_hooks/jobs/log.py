"""The record of changed jobs: one JSON line for each change, on disk before Slurm hears of it.

Lines lie in `actions/<planner>-YYYY-MM-DD.jsonl` (UTC days) below the store's root. They name no user.
"""

from __future__ import annotations

import os
import stat
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from almanac.errors import StoreError
from almanac.units import DAY_S, HOUR_S
from slurm.queued_job import QueuedJob
from slurm_hooks.orders import JsonLines

KEEP_DAYS = 90
"""Older lines are not looked at: what a job was given then is taken for its owner's."""
MAX_TEXT = 1024
"""Characters of a request; Slurm refuses longer ones."""
ENDING_S = HOUR_S
"""Longest time that the processes of a requeued job take to end (own choice)."""
REQUEUE_DELAY_S = 121.0
"""Seconds from a requeue to the next start: Slurm holds a requeued job for 120 s."""
LEAST_DELAYS, MOST_DELAYS = 3, 20
"""Measured delays that a median needs, and the newest ones that it counts."""
PLANNERS = {
    "reprioritize": "is setting site factors", "mig-raise": "is raising jobs", "place": "is placing jobs",
    "watch": "is acting on running jobs",
}  # fmt: skip
"""The work of each planner's run; the names are those of its lines and of its lock."""
Key = Literal["Features", "TresPerJob", "TresPerNode", "TresPerTask", "SiteFactor", "State"]
"""Names of the changed fields in `scontrol update`; State is that of a running job."""
Kind = Literal[
    "raise", "raised", "place", "placed", "set", "refused", "ignored", "undo", "undone", "release", "owner", "agreed",
    "requeue", "requeued", "stopped", "restarted", "dropped", "failed", "message", "warn", "warned", "operators",
    "cancel", "cancelled",
]  # fmt: skip
TAKEN: dict[str, Kind] = {"raise": "raised", "place": "placed"}
"""The words for a change that Slurm took, by those for one that is sent. A site factor that was taken gets no line."""
SENT = frozenset({*TAKEN, "set"})
IN_FORCE = frozenset({
    "raise", "raised", "place", "placed", "set", "refused", "ignored", "undo", "requeue", "requeued", "stopped",
    "restarted",
})  # fmt: skip
"""Lines after which the job may have something else than its owner's."""


@dataclass(frozen=True)
class JobLine:
    """A change of a job. what: "raise", "place", "set", "undo", "release", and "requeue" are about to be sent.
    "raised", "placed": Slurm shows the new request, or the job waits no more; "refused": it shows the one of before;
    "ignored": the same, and Slurm had said nothing against it; "undone": it shows the job's own again; "owner":
    somebody else changed it; "agreed": the job had this site factor already, and nothing was sent; "requeued": the job
    waits again; "stopped": it was not requeued; "restarted": it runs again; "dropped": the job changed, so that the
    order of the line before was not sent; "failed": an operator has to look at the job. Of running jobs, "message",
    "warn", and "operators" are about to be mailed; "warned": the mail server took the warning; "cancel", "cancelled".

    own, new: the owner's text and almanac's; own is "0" for a site factor. gpu_type: of the new request. restarts: of
    the job at that time. was: the text that Slurm showed before the change: almanac's of an earlier change, or the
    owner's; None in older records. done: share of the work that is done, of a requeue. delay_s: from the requeue to the
    next start. gpu_time_s: the predicted GPU-seconds that a site factor stands for; model: version of the predictor.
    finding: kind of the finding behind a step; cancel_s: the time before which a warning says that no cancel comes.
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
    reason: str
    gpu_type: str = ""
    address: str = ""
    done: float = 0.0
    delay_s: float | None = None
    almanac: str = ""
    was: str | None = None
    gpu_time_s: float | None = None
    model: str = ""
    finding: str = ""
    cancel_s: int = 0

    def __post_init__(self) -> None:
        texts = (self.own, self.new, self.was or "")
        if not all(is_sendable(text) for text in texts):
            raise ValueError("not a request that can be sent")
        if self.key == "SiteFactor" and not all(text.removeprefix("-").isdigit() for text in texts[:2]):
            raise ValueError("not a site factor")

    @property
    def text(self) -> str:
        """The text that the job is to show."""
        return self.own if self.what in ("undo", "undone", "release") else self.new

    @property
    def texts(self) -> frozenset[str]:
        """Texts that the job can show after this line as long as nobody else changed it."""
        was = self.own if self.was is None else self.was
        if self.what in ("refused", "stopped"):
            return frozenset({self.own, was})
        is_open = self.what in (*SENT, "requeue", "restarted", "ignored", "agreed")
        return frozenset({self.own, self.new, was if is_open else self.own})

    def is_about(self, job: QueuedJob) -> bool:
        """Return True if it is the same submission: Slurm uses job numbers again. A requeue gives a job another time of
        submission, 22.05 only when its processes have ended: up to ENDING_S after the line of the requeue.

        The site factor of an array is that of its tasks.
        """
        later_s, more = job.submit_s - self.submit_s, job.restarts - self.restarts
        is_ending = more == 0 < self.restarts and job.submit_s - self.time_s < ENDING_S
        is_its = self.job_id == job.job_id or (self.key == "SiteFactor" and self.job_id == job.array_job_id)
        return is_its and (later_s == 0 or (later_s > 0 and (more > 0 or is_ending)))

    def is_shown(self, job: QueuedJob) -> bool:
        """Return True if the job shows a text of almanac's: that of this line, or one of before."""
        return self.what in IN_FORCE and shown_text(job, self.key) in self.texts - {self.own}


@dataclass(frozen=True)
class ChangeHistory:
    """Lines of one planner and cluster. newest: last line of each number. requeues: of each number, oldest first;
    without those that were stopped.

    delays_s: measured requeue delays, oldest first.
    """

    newest: Mapping[int, JobLine] = field(default_factory=dict)
    requeues: Mapping[int, tuple[JobLine, ...]] = field(default_factory=dict)
    delays_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, lines: Iterable[JobLine]) -> ChangeHistory:
        """From lines, oldest first. A dropped order's lines do not count, as nothing was sent."""
        found: dict[int, list[JobLine]] = {}
        requeues: dict[int, tuple[JobLine, ...]] = {}
        delays = []
        for line in lines:
            own, before = found.setdefault(line.job_id, []), requeues.get(line.job_id, ())
            if line.what == "dropped":
                del own[-1:]
            elif line.what != "failed":
                own.append(line)
            if line.what == "requeue":
                requeues[line.job_id] = (*before, line)
            elif line.what == "stopped":
                requeues[line.job_id] = before[:-1]
            elif line.what == "restarted" and line.delay_s is not None:
                delays.append(line.delay_s)
        return cls({number: own[-1] for number, own in found.items() if own}, requeues, tuple(delays))

    def line_of(self, job: QueuedJob) -> JobLine | None:
        """The newest line about this submission of the job."""
        lines = (self.newest.get(number) for number in (job.job_id, job.array_job_id) if number is not None)
        return next((line for line in lines if line is not None and line.is_about(job)), None)

    def requeues_of(self, job: QueuedJob) -> tuple[JobLine, ...]:
        """The requeues of this submission of the job, oldest first."""
        return tuple(line for line in self.requeues.get(job.job_id, ()) if line.is_about(job))

    def requeue_delay_s(self) -> float:
        """The median of the newest measured delays, once there are a few; until then REQUEUE_DELAY_S."""
        known = self.delays_s[-MOST_DELAYS:]
        return statistics.median(known) if len(known) >= LEAST_DELAYS else REQUEUE_DELAY_S


@dataclass(frozen=True)
class JobLog:
    """The lines of one planner below one folder, which need not be there yet."""

    folder: Path
    planner: str

    @property
    def prefix(self) -> str:
        return f"{self.planner}-"

    def append(self, lines: Sequence[JobLine], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError."""
        JsonLines(self.folder, self.prefix).append([msgspec.to_builtins(line) for line in lines], now_s)

    def read(self, cluster: str, now_s: int, days: int = KEEP_DAYS) -> list[JobLine]:
        """Return the lines of the last days, oldest first, without damaged ones. Raises StoreError."""
        self._require_safe()
        lines = []
        for row in JsonLines(self.folder, self.prefix).read(now_s - days * DAY_S, now_s):
            try:
                line = msgspec.convert(_as_now(row), JobLine, strict=False)
            except (msgspec.ValidationError, UnicodeError):
                continue
            if line.cluster == cluster:
                lines.append(line)
        return lines

    def day(self, cluster: str, now_s: int) -> list[JobLine]:
        """Return the lines of the last 24 hours, oldest first. Raises StoreError."""
        return [line for line in self.read(cluster, now_s, days=1) if now_s - DAY_S < line.time_s <= now_s]

    def history(self, cluster: str, now_s: int) -> ChangeHistory:
        """Read the record of a cluster as a history of changes. Raises StoreError."""
        return ChangeHistory.of(self.read(cluster, now_s))

    def _require_safe(self) -> None:
        """Raises StoreError where anybody else could have written the record: its texts go to Slurm."""
        if not self.folder.is_dir():
            return
        owners = {0, os.geteuid(), self.folder.parent.stat().st_uid}
        for path in (self.folder, *sorted(self.folder.glob(f"{self.prefix}*.jsonl"))):
            about = path.lstat()
            is_kind = stat.S_ISDIR(about.st_mode) if path == self.folder else stat.S_ISREG(about.st_mode)
            if not is_kind or about.st_uid not in owners or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StoreError(
                    f"{path}: others than the store's owner can write it", "check who did, then chmod go-w and chown it"
                )


def _as_now(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of a site factor that an earlier version wrote, with numbers `old` and `new`, as it is written now."""
    if "key" in row or not {"old", "new"} <= row.keys():
        return row
    old, is_clearing = str(row["old"]), row.get("what") == "clear"
    new = old if is_clearing else str(row["new"])
    texts = {"key": "SiteFactor", "own": "0", "new": new, "was": old, "restarts": 0}
    return {**row, **texts, "what": "undo" if is_clearing else row.get("what")}


def shown_text(job: QueuedJob, key: Key) -> str:
    """Return the changed field as Slurm shows it; "" for the site factor of a job that Slurm does not rank."""
    if key == "SiteFactor":
        return "" if job.site_factor is None else str(job.site_factor)
    if key == "State":
        return "RUNNING" if job.is_running else ""
    return job.constraints if key == "Features" else job.requests.get(key, "")


def is_sendable(text: str) -> bool:
    """Return True if a request is one word of scontrol's input."""
    return len(text) <= MAX_TEXT and text.isascii() and text.isprintable() and not set(text) & set(" \"'\\#;")
