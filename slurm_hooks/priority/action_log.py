"""The record of what almanac told Slurm: one JSON line for each change, on disk before Slurm hears of it.

Lines lie in `actions/reprioritize-YYYY-MM-DD.jsonl` (UTC days) below the store's root. They name no user and no job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from almanac.units import DAY_S
from slurm_hooks.json_lines import JsonLines
from slurm_hooks.last_look import standing

KEEP_DAYS = 90
"""Older lines are not looked at: what they say a job was given is then taken for somebody else's."""


ActionKind = Literal["set", "clear", "ignored", "agreed", "dropped"]


@dataclass(frozen=True)
class LoggedAction:
    """One line. what: "set" (sent to Slurm), "clear" (sent 0 to Slurm), "ignored" (Slurm reported no error, but the
    factor stayed `old`), "agreed" (the job already had its site factor, so nothing was sent), or "dropped" (the job
    changed, so that the order of the line before was not sent).
    old, new: site factors. model: version of the trained model.

    gpu_time_s: the GPU-time that the new factor stands for, GPU-seconds; None of a clearing.
    """

    what: ActionKind
    time_s: int
    cluster: str
    job_id: int
    address: str
    submit_s: int
    old: int
    new: int
    reason: str
    gpu_time_s: float | None = None
    model: str = ""
    almanac: str = ""


@dataclass(frozen=True)
class ActionLog:
    """The record below one folder, which need not be there yet."""

    folder: Path

    def append(self, actions: Sequence[LoggedAction], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError."""
        self._lines.append([asdict(action) for action in actions], now_s)

    def newest(self, cluster: str, now_s: int) -> dict[int, LoggedAction]:
        """The last line of each job of a cluster, of the last KEEP_DAYS. A line that a crash cut off is passed over.

        Raises StoreError.
        """
        rows = self._lines.read(now_s - KEEP_DAYS * DAY_S, now_s)
        actions = (action for action in _actions(rows) if action.cluster == cluster)
        return standing(actions, lambda action: action.job_id, lambda action: action.what == "dropped")

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.folder, "reprioritize-")


def _actions(rows: Iterable[Mapping[str, Any]]) -> Iterator[LoggedAction]:
    for row in rows:
        try:
            yield _action(row)
        except (ValueError, TypeError, KeyError):
            continue


def _action(content: Mapping[str, Any]) -> LoggedAction:
    """Raises KeyError, TypeError or ValueError. Fields of later versions are passed over."""
    numbers = {name: int(content[name]) for name in ("time_s", "job_id", "submit_s", "old", "new")}
    texts = {name: str(content[name]) for name in ("what", "cluster", "address", "reason")}
    gpu_time_s = content.get("gpu_time_s")
    return LoggedAction(**texts, **numbers, gpu_time_s=None if gpu_time_s is None else float(gpu_time_s))  # type: ignore[arg-type]
