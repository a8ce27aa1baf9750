"""The record of a cluster's progress: how far sources were read, imported files, and stale days and runs.

A day becomes stale just before rows change that its jobs' metrics depend on. It stays stale until a summary that began
after the change is stored. Each change gives the day a new number, so a summary clears a day only if no change
followed. A run is stale in the same way if only its own record changes: then few jobs of its days are computed again.

The record of imported files is one JSON file among the partition files, used while the store's lock is held. For each
import it lists the partition files, and for each of these its size, time of change, and inode. An import is forgotten
when a later write changes a value in one of its partition files. If anything else changed the partition file, its
import does not count. Rows that a later write only adds leave an import as it is.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from almanac.atomic import FileState, make_inner_folder, safe_name, state_of, write_atomically, writing
from almanac.errors import StoreError
from almanac.files import read_json, with_checksum
from almanac.records import Counts

CLOCK_TOLERANCE_S = 60
"""A mark that is later than now by no more than this is no fault: clocks are set back by seconds all the time, and
every source leaves out or reads again more than that."""

MOST_RUNS = 1000
"""Most stale runs; with more, their days become stale instead."""

COMPLETE_FROM = "complete-from"
_EPOCH = dt.date(1970, 1, 1)
_MOST_BYTES = 2**26
_LAST_S = 253_402_300_799  # 9999-12-31
_STALE = "open-days"
_SOURCE = re.compile(rf"(?!{_STALE}|{COMPLETE_FROM})[A-Za-z0-9_-]+")
_Value = TypeVar("_Value")


def day_text(day: int) -> str:
    """A day since 1970 as YYYY-MM-DD."""
    return (_EPOCH + dt.timedelta(days=day)).isoformat()


def ahead_s(mark_s: int | None, now_s: int) -> int:
    """Seconds by which a mark lies in the future: a clock was ahead when it was written. Else 0."""
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


class Marks:
    """The progress of one cluster: small JSON files, each replaced whole.

    Methods that change a file take the lock of the store, and so does `stale`: then no writer is between opening a day
    and changing its rows, and what is open is all that has changed.
    """

    def __init__(self, root: Path, cluster: str, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.root, self.cluster, self.lock = root, cluster, lock

    def watermark(self, source: str) -> int | None:
        """Return the time (unix seconds) up to which a source is in the store; None before its first run."""
        return _read(self._path(source), _parse_mark, None, "remove it: the source is then read again")

    def watermarks(self) -> dict[str, int]:
        """Every watermark (s since 1970) by its source, sorted."""
        end = f".{safe_name(self.cluster)}.json"
        names = sorted(path.name.removesuffix(end) for path in (self.root / "watermarks").glob(f"*{end}"))
        marks = {name: self.watermark(name) for name in names if _SOURCE.fullmatch(name)}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def complete_from(self) -> int:
        """Since when (s since 1970) all is stored that job metrics are computed from. Retention removed what is older.

        Jobs that began before keep the metrics that they have.
        """
        return self.watermark(COMPLETE_FROM) or 0

    def telemetry_mark(self, sources: Sequence[str]) -> int | None:
        """The time (s) up to which these sources were read; None if none was. Those an hour late are left out."""
        known = [mark for mark in map(self.watermark, sources) if mark is not None]
        return min((mark for mark in known if mark > max(known) - 3600), default=None)

    def set_watermark(self, source: str, until_s: int) -> None:
        """Remember how far a source has been read; it never moves back."""
        with self.lock():
            known = self.watermark(source)
            if known is None or until_s > known:
                self._write(source, {"until_s": until_s})

    def pull_back_watermark(self, source: str, now_s: int, to_s: int) -> int:
        """Set a watermark that lies in the future to to_s. Returns how many seconds it was ahead; 0 if it is right."""
        if not ahead_s(self.watermark(source), now_s):
            return 0
        with self.lock():
            ahead = ahead_s(self.watermark(source), now_s)
            if ahead:
                self._write(source, {"until_s": to_s})
            return ahead

    def stale(self) -> Stale:
        """Days and runs that changed since their jobs' metrics were computed. Raises StoreError."""
        with self.lock():
            return self._stale()

    def peek_open_days(self) -> dict[int, int]:
        """Stale days, also those of stale runs, for readers: needs no right to write, and waits for no lock."""
        return self._stale().all_days()

    def reopen(self, changes: Iterable[int | StaleRun]) -> None:
        """Make days (since 1970) and runs stale, also those that are. To be called under the lock."""
        wanted = set(changes)
        if wanted:
            self._write_stale(self._stale().with_changes(wanted))

    def close(self, done: Stale) -> None:
        """Close days and runs as `stale` gave them, except those that have changed again."""
        with self.lock():
            before = self._stale()
            left = before.without(done)
            if left != before:
                self._write_stale(left)

    def _stale(self) -> Stale:
        todo = f"remove it, then compute all metrics: almanac -M {self.cluster} summarize -S 1970-01-01"
        return _read(self._path(_STALE), _parse_stale, Stale(), todo)

    def _write_stale(self, stale: Stale) -> None:
        days = {day_text(day): number for day, number in sorted(stale.days.items())}
        runs = [
            [number, run.job_id, run.node_list, day_text(run.first_day), day_text(run.end_day)]
            for run, number in sorted(stale.runs.items())
        ]
        self._write(_STALE, {"last": stale.last, "days": days, **({"runs": runs} if runs else {})})

    def _path(self, name: str) -> Path:
        return self.root / "watermarks" / f"{safe_name(name)}.{safe_name(self.cluster)}.json"

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = self._path(name)
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


_NAME = ".imported-files.json"
_MOST_IMPORTS = 10_000
"""The record then takes about 2 MB, with a day in each file. The oldest imports are forgotten first."""


class PartitionChange(NamedTuple):
    """States of a partition file before and after a write, and whether the write changed a value of a known row."""

    before: FileState
    after: FileState
    is_replaced: bool


@dataclass(frozen=True)
class ImportOutcome:
    """Counts of an import, without examples, and how many rows it has in the store."""

    counts: Counts
    rows: int


class ImportedFiles:
    """The record of one cluster; without one, or with a damaged one, files are read again.

    key: hash of a file's content and of all that decides which rows it gives.
    cluster: folder of the partition files. partition: path of the partition file that starts then (s).
    """

    def __init__(self, cluster: Path, partition: Callable[[int], Path]) -> None:
        self._path, self._partition = cluster / _NAME, partition
        self._states: dict[int, FileState] = {}
        self._starts: dict[str, set[int]] = {}
        self._outcomes: dict[str, ImportOutcome] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(self._path)
            states = {int(start): tuple(map(int, state)) for start, state in content["states"].items()}
            starts = {key: set(map(int, one["starts"])) for key, one in content["imports"].items()}
            outcomes = {key: _outcome(one["outcome"]) for key, one in content["imports"].items() if one["outcome"]}
            self._states, self._starts, self._outcomes = states, starts, outcomes

    def outcome(self, key: str) -> ImportOutcome | None:
        """The outcome of a complete import whose rows the store still holds; None without one."""
        starts = self._starts.get(key, ())
        is_held = all(self._states.get(start) == state_of(self._partition(start)) for start in starts)
        return self._outcomes.get(key) if is_held else None

    def note(self, changes: Mapping[int, PartitionChange], key: str | None, is_first: bool) -> None:
        """Note a write. key: of the import that it belongs to. is_first: it is the import's first write."""
        if key is not None and is_first:
            self._forget(key)
            self._starts[key] = set()
        if not self._starts or (key is None and changes.keys().isdisjoint(self._states)):
            return
        for start_s, change in changes.items():
            is_foreign = self._states.get(start_s, change.before) != change.before
            for other in [other for other, starts in self._starts.items() if start_s in starts]:
                if is_foreign or (change.is_replaced and other != key):
                    self._forget(other)
            self._states[start_s] = change.after
        if key in self._starts:
            self._starts[key].update(changes)
        self._write()

    def complete(self, key: str, outcome: ImportOutcome) -> None:
        """Note that all rows of an import are stored; nothing where they were changed meanwhile."""
        if key in self._starts:
            self._outcomes[key] = outcome
            self._write()

    def _forget(self, key: str) -> None:
        self._starts.pop(key, None)
        self._outcomes.pop(key, None)

    def _write(self) -> None:
        newest = list(self._starts)[-_MOST_IMPORTS:]
        used = set[int]().union(*(self._starts[key] for key in newest))
        content = {
            "states": {start: state for start, state in sorted(self._states.items()) if start in used},
            "imports": {key: {"starts": sorted(self._starts[key]), "outcome": self._as_dict(key)} for key in newest},
        }
        with writing(self._path):
            for folder in (self._path.parent.parent, self._path.parent):
                make_inner_folder(folder)
            write_atomically(self._path, with_checksum(json.dumps(content)), is_handed_over=True)

    def _as_dict(self, key: str) -> dict[str, Any] | None:
        """Plain values of an outcome, for `_outcome`; None until the import is complete."""
        if not (known := self._outcomes.get(key)):
            return None
        counts = known.counts
        return {"seen": counts.seen, "kept": counts.kept, "dropped": counts.dropped, "notes": counts.notes,
                "rows": known.rows}  # fmt: skip


def _outcome(given: Mapping[str, Any]) -> ImportOutcome:
    dropped, notes = (Counter({str(k): int(n) for k, n in given[name].items()}) for name in ("dropped", "notes"))
    return ImportOutcome(Counts(int(given["seen"]), int(given["kept"]), dropped, {}, notes), int(given["rows"]))
