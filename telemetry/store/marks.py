"""The store's record of its progress: how far sources were read, and which days and runs are stale.

A day becomes stale just before rows change that its jobs' metrics depend on. It stays stale until a summary that began
after the change is stored. Each change gives the day a new number, so a summary clears a day only if no change
followed. A run is stale in the same way if only its own record changes: then few jobs of its days are computed again.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from almanac.errors import StoreError
from almanac.plain_file import read_json, with_checksum
from telemetry.store.atomic import make_inner_folder, write_atomically, writing

CLOCK_TOLERANCE_S = 60
"""A mark that is later than now by no more than this is no fault: clocks are set back by seconds all the time, and
every source leaves out or reads again more than that."""

MOST_RUNS = 1000
"""If more runs are stale, their days become stale instead."""

_EPOCH = dt.date(1970, 1, 1)
_MOST_BYTES = 2**26
_LAST_S = 253_402_300_799  # 9999-12-31
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SOURCE = re.compile(r"(?!open-days|complete-from)[A-Za-z0-9_-]+")
_Value = TypeVar("_Value")


def day_text(day: int) -> str:
    """A day since 1970 as YYYY-MM-DD."""
    return (_EPOCH + dt.timedelta(days=day)).isoformat()


def is_safe_name(name: str) -> bool:
    """Whether a name can be that of a file of ours."""
    return _NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """The name, where it can be that of a file. Raises StoreError."""
    if not is_safe_name(name):
        raise StoreError(f"{name!r} cannot name a folder", "use letters, digits, '.', '_', and '-' in cluster names")
    return name


def ahead_s(mark_s: int | None, now_s: int) -> int:
    """Seconds by which a mark lies in the future: a clock was ahead when it was written. 0 where it does not."""
    ahead = 0 if mark_s is None else mark_s - now_s
    return ahead if ahead > CLOCK_TOLERANCE_S else 0


@dataclass(frozen=True, order=True)
class StaleRun:
    """A run with a changed record: metrics of jobs that had one of its nodes on one of its days depend on it.

    node_list: a Slurm hostlist; empty if only the metrics of its own job depend on it. The days since 1970 are
    [first_day, end_day).
    """

    job_id: int
    node_list: str
    first_day: int
    end_day: int

    @property
    def days(self) -> range:
        return range(self.first_day, self.end_day)


@dataclass(frozen=True)
class Stale:
    """Days since 1970 and runs, each with the number of its last change; last: the number of the last change of any."""

    last: int = 0
    days: Mapping[int, int] = field(default_factory=dict)
    runs: Mapping[StaleRun, int] = field(default_factory=dict)

    def all_days(self) -> dict[int, int]:
        """The stale days and the days of stale runs, each with its highest number."""
        found = dict(self.days)
        for run, number in self.runs.items():
            found |= {day: max(number, found.get(day, 0)) for day in run.days}
        return found

    def with_changes(self, changes: Iterable[int | StaleRun]) -> Stale:
        """A copy with these days and runs, which get the next number."""
        number = self.last + 1
        runs = dict(self.runs)
        days = dict(self.days)
        for change in changes:
            if isinstance(change, StaleRun):
                runs[change] = number
            else:
                days[change] = number
        if len(runs) > MOST_RUNS:
            days |= dict.fromkeys((day for run in runs for day in run.days), number)
            runs = {}
        return Stale(number, days, runs)

    def without(self, done: Stale) -> Stale:
        """A copy without the days and runs of `done` that have not changed again."""
        return Stale(
            self.last,
            {day: number for day, number in self.days.items() if done.days.get(day) != number},
            {run: number for run, number in self.runs.items() if done.runs.get(run) != number},
        )


@dataclass(frozen=True)
class Marks:
    """Small JSON files in one folder, each replaced whole, used while the store's lock is held.

    Then no writer is between opening a day and changing its rows, and what is open is all that has changed.
    """

    folder: Path

    def watermark(self, source: str, cluster: str) -> int | None:
        """Up to when (s since 1970) a source has been read into the store; None before its first run."""
        path = self._path(source, cluster)
        return _read(path, _parse_mark, None, "remove it: the source is then read again")

    def set_watermark(self, source: str, cluster: str, until_s: int) -> None:
        """Remember how far a source has been read; it never moves back."""
        known = self.watermark(source, cluster)
        if known is None or until_s > known:
            self._write(self._path(source, cluster), {"until_s": until_s})

    def remove(self, source: str, cluster: str) -> None:
        """Remove a watermark, if there is one."""
        path = self._path(source, cluster)
        with writing(path):
            path.unlink(missing_ok=True)

    def pull_back(self, source: str, cluster: str, now_s: int, to_s: int) -> int:
        """Set a mark that lies in the future to to_s, and return by how many seconds it was ahead; else return 0."""
        ahead = ahead_s(self.watermark(source, cluster), now_s)
        if ahead:
            self._write(self._path(source, cluster), {"until_s": to_s})
        return ahead

    def watermarks(self, cluster: str) -> dict[str, int]:
        """Every watermark of a cluster, by its source, sorted."""
        end = f".{safe_name(cluster)}.json"
        names = sorted(path.name.removesuffix(end) for path in self.folder.glob(f"*{end}"))
        marks = {name: self.watermark(name, cluster) for name in names if _SOURCE.fullmatch(name)}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def stale(self, cluster: str) -> Stale:
        """The stale days and runs. Raises StoreError where the marks cannot be read."""
        return _read(self._path("open-days", cluster), _parse_stale, Stale(), _again(cluster))

    def reopen(self, cluster: str, changes: Iterable[int | StaleRun]) -> None:
        """Make days (since 1970) and runs stale, also those that are."""
        wanted = set(changes)
        if wanted:
            self._write_stale(cluster, self.stale(cluster).with_changes(wanted))

    def close(self, cluster: str, done: Stale) -> None:
        """Close what `done` has (as `stale` gave it), except what has changed again."""
        before = self.stale(cluster)
        left = before.without(done)
        if left != before:
            self._write_stale(cluster, left)

    def _write_stale(self, cluster: str, stale: Stale) -> None:
        days = {day_text(day): number for day, number in sorted(stale.days.items())}
        runs = [
            [number, run.job_id, run.node_list, day_text(run.first_day), day_text(run.end_day)]
            for run, number in sorted(stale.runs.items())
        ]
        content = {"last": stale.last, "days": days, **({"runs": runs} if runs else {})}
        self._write(self._path("open-days", cluster), content)

    def _path(self, name: str, cluster: str) -> Path:
        return self.folder / f"{safe_name(name)}.{safe_name(cluster)}.json"

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        with writing(path):
            make_inner_folder(path.parent)
            write_atomically(path, with_checksum(json.dumps(content)), is_handed_over=True)


def _read(path: Path, parse: Callable[[Any], _Value], absent: _Value, hint: str) -> _Value:
    try:
        return parse(read_json(path, _MOST_BYTES))
    except FileNotFoundError:
        return absent
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path}: not a watermark: {error}", hint) from error


def _parse_mark(content: Any) -> int:
    """Raises ValueError for a time that is no date: no clock was ever there."""
    until_s = int(content["until_s"])
    if abs(until_s) > _LAST_S:
        raise ValueError(f"{until_s:.0e} s is no date")
    return until_s


def _parse_stale(content: Any) -> Stale:
    days = {_parse_day(day): int(number) for day, number in content["days"].items()}
    runs = {
        StaleRun(int(job_id), str(node_list), _parse_day(first), _parse_day(end)): int(number)
        for number, job_id, node_list, first, end in content.get("runs", ())
    }
    return Stale(int(content["last"]), days, runs)


def _parse_day(text: str) -> int:
    return (dt.date.fromisoformat(text) - _EPOCH).days


def _again(cluster: str) -> str:
    return f"remove it, then compute all metrics: almanac -M {cluster} summarize -S 1970-01-01"
