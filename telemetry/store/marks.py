"""The store's record of its progress: how far sources were read, and which days are stale.

A day becomes stale just before rows change that its jobs' metrics depend on. It stays stale until a summary that began
after the change is stored. Each change gives the day a new number, so a summary clears a day only if no change
followed.
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
from telemetry.store.atomic import make_inner_folder, write_atomically, writing

CLOCK_TOLERANCE_S = 60
"""A mark that is later than now by no more than this is no fault: clocks are set back by seconds all the time, and
every source leaves out or reads again more than that."""

_EPOCH = dt.date(1970, 1, 1)
_LAST_S = 253_402_300_799  # 9999-12-31
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SOURCE = re.compile(r"(?!open-days)[A-Za-z0-9_-]+")
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


@dataclass(frozen=True)
class StaleDays:
    """Days since 1970, each with the number of its last opening; last: the number of the last opening of any."""

    last: int = 0
    days: Mapping[int, int] = field(default_factory=dict)


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

    def open_days(self, cluster: str) -> dict[int, int]:
        """Stale days (days since 1970), each with the number of its last change.

        Raises StoreError where the marks cannot be read.
        """
        return dict(self._opened(cluster).days)

    def reopen(self, cluster: str, days: Iterable[int]) -> None:
        """Open days, also those that are open."""
        wanted = sorted(set(days))
        if wanted:
            before = self._opened(cluster)
            number = before.last + 1
            self._write_opened(cluster, StaleDays(number, {**before.days, **dict.fromkeys(wanted, number)}))

    def close(self, cluster: str, done: Mapping[int, int]) -> None:
        """Close the days of `done` (as open_days gave them) that were not opened again."""
        before = self._opened(cluster)
        left = {day: number for day, number in before.days.items() if done.get(day) != number}
        if left != before.days:
            self._write_opened(cluster, StaleDays(before.last, left))

    def _opened(self, cluster: str) -> StaleDays:
        return _read(self._path("open-days", cluster), _parse_days, StaleDays(), _again(cluster))

    def _write_opened(self, cluster: str, opened: StaleDays) -> None:
        days = {day_text(day): number for day, number in sorted(opened.days.items())}
        self._write(self._path("open-days", cluster), {"last": opened.last, "days": days})

    def _path(self, name: str, cluster: str) -> Path:
        return self.folder / f"{safe_name(name)}.{safe_name(cluster)}.json"

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        with writing(path):
            make_inner_folder(path.parent)
            write_atomically(path, json.dumps(content).encode() + b"\n", is_handed_over=True)


def _read(path: Path, parse: Callable[[Any], _Value], absent: _Value, hint: str) -> _Value:
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return absent
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(f"{path}: not a watermark: {error}", hint) from error


def _parse_mark(content: Any) -> int:
    """Raises ValueError for a time that is no date: no clock was ever there."""
    until_s = int(content["until_s"])
    if abs(until_s) > _LAST_S:
        raise ValueError(f"{until_s:.0e} s is no date")
    return until_s


def _parse_days(content: Any) -> StaleDays:
    days = {(dt.date.fromisoformat(day) - _EPOCH).days: int(number) for day, number in content["days"].items()}
    return StaleDays(int(content["last"]), days)


def _again(cluster: str) -> str:
    return f"remove it, then compute all metrics: almanac -M {cluster} summarize -S 1970-01-01"
