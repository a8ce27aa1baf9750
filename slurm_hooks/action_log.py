"""The record of what almanac told Slurm: one JSON line for each change, on disk before Slurm hears of it.

Lines lie in `actions/reprioritize-YYYY-MM-DD.jsonl` (UTC days) below the store's root. They name no user and no job.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from almanac.errors import StoreError
from telemetry.atomic import hand_over, make_inner_folder

DAY_S = 86_400
KEEP_DAYS = 90
"""Older lines are not looked at: what they say a job was given is then taken for somebody else's."""


@dataclass(frozen=True)
class Action:
    """One line. what: "set" (told Slurm), "clear" (told it 0 again), "ignored" (Slurm took a change without a word, and
    the factor stayed `old`) or "agreed" (the job had its term when it was first seen, and Slurm was told nothing).
    old, new: site factors. model: version of the trained model.

    gpu_time_s: the GPU-time that the new factor stands for, GPU-seconds; None of a clearing.
    """

    what: str
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

    def append(self, actions: Sequence[Action], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError."""
        if not actions:
            return
        path = self.folder / f"reprioritize-{_day(now_s)}.jsonl"
        lines = "".join(json.dumps(asdict(action), ensure_ascii=True) + "\n" for action in actions)
        try:
            make_inner_folder(self.folder)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(path, flags, 0o640)
            with open(handle, "r+b") as file:  # noqa: PTH123 - of a descriptor
                hand_over(handle, self.folder)
                if _is_cut_off(file):
                    file.write(b"\n")
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written: {error.strerror}",
                "check space and rights; Slurm is told nothing that is not written down",
            ) from error

    def newest(self, cluster: str, now_s: int) -> dict[int, Action]:
        """The last line of each job of a cluster, of the last KEEP_DAYS. A line that a crash cut off is passed over.

        Raises StoreError.
        """
        found = {}
        oldest, newest = (f"reprioritize-{_day(time_s)}.jsonl" for time_s in (now_s - KEEP_DAYS * DAY_S, now_s))
        try:
            # A file of a later day is of a clock that was ahead: every other may be newer.
            days = self.folder.glob("reprioritize-????-??-??.jsonl")
            for path in sorted(days, key=lambda path: (path.name <= newest, path.name)):
                if path.name >= oldest:
                    with path.open("rb") as file:
                        found.update({action.job_id: action for action in _actions(file) if action.cluster == cluster})
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be read: {error.strerror}", "run this as its owner") from error
        return found


def _day(time_s: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_s, dt.UTC):%Y-%m-%d}"


def _is_cut_off(file: IO[bytes]) -> bool:
    """Whether the last line has no end: the disk was full, or the host went down."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _actions(lines: Iterable[bytes]) -> Iterator[Action]:
    for line in lines:
        try:
            content = json.loads(line)
            if isinstance(content, dict):
                yield _action(content)
        except (ValueError, TypeError, KeyError):
            continue


def _action(content: Mapping[str, Any]) -> Action:
    """Raises KeyError, TypeError or ValueError. Fields of later versions are passed over."""
    numbers = {name: int(content[name]) for name in ("time_s", "job_id", "submit_s", "old", "new")}
    texts = {name: str(content[name]) for name in ("what", "cluster", "address", "reason")}
    gpu_time_s = content.get("gpu_time_s")
    return Action(**texts, **numbers, gpu_time_s=None if gpu_time_s is None else float(gpu_time_s))  # type: ignore[arg-type]
