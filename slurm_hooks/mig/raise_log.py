"""The record of raised jobs: one JSON line for each change, on disk before Slurm hears of it.

Lines lie in `actions/mig-raise-YYYY-MM-DD.jsonl` (UTC days) below the store's root. They name no user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from almanac.units import DAY_S
from slurm_hooks.json_lines import JsonLines
from slurm_hooks.last_look import standing
from slurm_hooks.mig.raise_types import OneSlice, one_slice
from telemetry.slurm.gres_queue import GresJob, RequestKey

KEEP_DAYS = 90
"""Older lines are not looked at: a job that waits longer with its new type keeps it."""
RaiseKind = Literal["raise", "raised", "started", "undo", "undone", "refused", "release", "owner", "dropped"]


@dataclass(frozen=True)
class RaiseLine:
    """One line. what: "raise" and "undo" (about to be sent to Slurm), "raised" (Slurm shows the new type), "started"
    (the job waits no more), "undone" (it shows its own type again), "refused" (Slurm kept the own type), "release"
    (about to be sent, after BadConstraints), "owner" (somebody else changed the request: never touched again), or
    "dropped" (the job changed, so that the order of the line before was not sent).

    own, new: the request's text before and after. type, new_type: GRES types. restarts: of the job, at that time.
    """

    what: RaiseKind
    time_s: int
    cluster: str
    job_id: int
    address: str
    submit_s: int
    restarts: int
    key: RequestKey
    own: str
    new: str
    type: str
    new_type: str
    reason: str
    almanac: str = ""

    @property
    def request(self) -> OneSlice:
        """The job's own request."""
        return OneSlice(self.key, self.own, self.type)

    def is_about(self, job: GresJob) -> bool:
        """Whether it is the same submission: numbers come again, and a requeue is a new submission of the same job."""
        return self.job_id == job.job_id and (self.submit_s == job.submit_s or job.restarts > self.restarts)


@dataclass(frozen=True)
class RaiseLog:
    """The record below one folder, which need not be there yet."""

    folder: Path

    def append(self, lines: Sequence[RaiseLine], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError."""
        self._lines.append([asdict(line) for line in lines], now_s)

    def newest(self, cluster: str, now_s: int) -> dict[int, RaiseLine]:
        """The last line of each job of a cluster, of the last KEEP_DAYS. A line that a crash cut off is passed over.

        Raises StoreError.
        """
        rows = self._lines.read(now_s - KEEP_DAYS * DAY_S, now_s)
        lines = (line for line in _lines(rows) if line.cluster == cluster)
        return standing(lines, lambda line: line.job_id, lambda line: line.what == "dropped")

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.folder, "mig-raise-")


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[RaiseLine]:
    for row in rows:
        try:
            yield _line(row)
        except (ValueError, TypeError, KeyError):
            continue


def _line(row: Mapping[str, Any]) -> RaiseLine:
    """Raises KeyError, TypeError, or ValueError. Fields of later versions are passed over."""
    numbers = {name: int(row[name]) for name in ("time_s", "job_id", "submit_s", "restarts")}
    texts = {name: str(row[name]) for name in _TEXTS}
    if texts["what"] not in get_args(RaiseKind) or texts["key"] not in get_args(RequestKey):
        raise ValueError("not a line of this log")
    line = RaiseLine(**texts, **numbers)  # type: ignore[arg-type]
    if one_slice({line.key: line.own}) != line.request or one_slice({line.key: line.new}) is None:
        raise ValueError("not a request that can be sent")
    return line


_TEXTS = ("what", "cluster", "address", "key", "own", "new", "type", "new_type", "reason")
