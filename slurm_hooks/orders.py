"""Safety of every order to Slurm: a record on disk before it, and a last look at Slurm right before it.

What an owner or an operator did since the decision wins. Every hook calls `must_still_hold` after the line of its log,
after each wait, and right before the command that changes something. What is left is the time of that one command:
Slurm has no order that names the state it expects. Records are JSON lines in one file a day.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from almanac.atomic import hand_over, make_inner_folder
from almanac.errors import StoreError
from almanac.files import parse_json, read_plain
from slurm.nodes import SlurmNode

if TYPE_CHECKING:
    from slurm.queued_job import QueuedJob


AT_ONCE = 20
"""Jobs that one look and one command are for: the last one is told some 50 ms after its look."""
Key = TypeVar("Key")
Facts = Mapping[str, Any]
"""Grounds of a decision, by name: the identity of a job or node, its owner's choices, and operators' marks."""
GONE = "it is gone"
_OF_SLURM = {"priority", "reason", "task_count", "tasks", "address", "cpu_count", "memory_mib", "expected_start_s"}
_OF_SLURM |= {"end_s", "exit_code", "exit_signal", "error_file"}
"""Fields that Slurm itself changes while a job waits, or that tell of its last run alone: 26.05 fills in its node."""
_OF_A_RUN = {"submit_s", "restarts", "states", "start_s", "eligible_s", "node_list", "detail", "hosts", "node_count"}
_OF_A_RUN |= {"partition", "gpu_type", "given_memory_mib", "ran_before_s", "suspend_s"}
"""Fields that a requeue changes."""


def must_still_hold(
    relied_on: Mapping[Key, Facts | None], read: Callable[[Collection[Key]], Mapping[Key, Facts]]
) -> dict[Key, str]:
    """Return why a target must be left alone, for each job or node that is not as the decision saw it.

    relied_on: None for a target that was not there. read: looks at these targets in Slurm now; gone ones are left out.
    Raises what it raises.
    """
    seen = read(relied_on.keys()) if relied_on else {}
    return {key: why for key, facts in relied_on.items() if (why := _why(facts, seen.get(key)))}


def _why(facts: Facts | None, seen: Facts | None) -> str:
    if facts is None:
        return "" if seen is None else "it came back meanwhile"
    if seen is None:
        return GONE
    changed = sorted(name for name, value in facts.items() if seen.get(name) != value)
    return f"changed meanwhile: {', '.join(changed)}" if changed else ""


def job_facts(job: QueuedJob) -> Facts:
    """Return all that is known about a job but what Slurm itself changes while it waits."""
    facts = {each.name: getattr(job, each.name) for each in fields(job) if each.name not in _OF_SLURM}
    # Slurm's own hold, BadConstraints, has priority 0 as an owner's hold has.
    return {**facts, "hold": (job.reason_key or "held") if job.is_held else ""}


def requeued_facts(before: QueuedJob, now: QueuedJob) -> Facts:
    """The facts of a job that a requeue by Slurm keeps. Compare those of (before, before) and (before, now)."""
    kept = {name: value for name, value in job_facts(now).items() if name not in _OF_A_RUN}
    is_next = 0 <= now.restarts - before.restarts <= 1
    return {**kept, "restarts": is_next, "partitions": set(before.partitions) <= set(now.partitions)}


def node_facts(node: SlurmNode) -> Facts:
    """A node's state, reason, Gres, and reservation."""
    return {"states": node.states, "reason": node.reason, "gres": node.gres, "reservation": node.reservation}


KEEP_DAYS = 400
"""Older files are removed, so that a year can be looked back on."""


@dataclass(frozen=True)
class JsonLines:
    """The files `<prefix>YYYY-MM-DD.jsonl` (UTC days) of one folder, which need not be there yet."""

    folder: Path
    prefix: str

    def append(self, rows: Sequence[Mapping[str, Any]], now_s: int) -> None:
        """Add lines to the day's file; they are on disk when this returns. Raises StoreError.

        The first ones of a day remove the files that are older than KEEP_DAYS.
        """
        if not rows:
            return
        path = self.folder / self._name(now_s)
        lines = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        try:
            make_inner_folder(self.folder)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            is_first = not os.path.lexists(path)
            handle = os.open(path, flags, 0o640)
            with open(handle, "r+b") as file:  # noqa: PTH123 - of a descriptor
                hand_over(handle, self.folder)
                if _is_cut_off(file):
                    file.write(b"\n")
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
            if is_first:
                self._remove_old(path.name)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written: {error.strerror}",
                "check space and rights; Slurm is told nothing that is not written down",
            ) from error

    def read(self, since_s: int, now_s: int) -> Iterator[dict[str, Any]]:
        """The lines of the days from since_s on, oldest first; without anything but JSON objects.

        A file of a later day is of a clock that was ahead: every other may be newer. Raises StoreError.
        """
        oldest, newest = self._name(since_s), self._name(now_s)
        try:
            for path in sorted(
                self.folder.glob(f"{self.prefix}????-??-??.jsonl"), key=lambda path: (path.name <= newest, path.name)
            ):
                if path.name >= oldest:
                    yield from _objects(read_plain(path).splitlines())
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be read: {error.strerror}", "run this as its owner") from error

    def _remove_old(self, newest: str) -> None:
        """Files older than KEEP_DAYS before the day that was the last until now: one clock that is far ahead removes
        nothing. What cannot be removed stays: the lines that were just written matter more.
        """
        earlier = sorted(path.name for path in self.folder.glob(f"{self.prefix}????-??-??.jsonl") if path.name < newest)
        if not earlier:
            return
        with contextlib.suppress(ValueError):  # a name that is no day
            last = dt.date.fromisoformat(earlier[-1].removeprefix(self.prefix)[:10])
            oldest = f"{self.prefix}{last - dt.timedelta(days=KEEP_DAYS)}.jsonl"
            for name in earlier:
                if name < oldest:
                    with contextlib.suppress(OSError):
                        (self.folder / name).unlink()

    def _name(self, time_s: int) -> str:
        return f"{self.prefix}{dt.datetime.fromtimestamp(time_s, dt.UTC):%Y-%m-%d}.jsonl"


def _is_cut_off(file: IO[bytes]) -> bool:
    """Return True if the last line has no end: the disk was full, or the host went down."""
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


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content
