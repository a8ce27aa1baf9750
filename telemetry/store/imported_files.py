"""Record of the imported files whose rows a cluster's telemetry still holds, so that none is read twice.

It is one JSON file beside the partition files, used while the store's lock is held. For each import it lists the
partition files, and for each of these its size, time of change, and inode. An import is forgotten when a later write
changes a value in one of its partition files. If anything else changed the partition file, its import does not count.
Rows that a later write only adds leave an import as it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from almanac.plain_file import read_json, with_checksum
from almanac.records import Counts
from telemetry.store.atomic import make_inner_folder, write_atomically, writing

_NAME = ".imported-files.json"
_MOST_IMPORTS = 10_000
"""The record then takes about 2 MB, with a day in each file. The oldest imports are forgotten first."""

FileState = tuple[int, ...]
"""Size, time of change (ns), and inode of a partition file; empty without a file."""


class Change(NamedTuple):
    """States of a partition file before and after a write, and whether the write changed a value of a known row."""

    before: FileState
    after: FileState
    is_replaced: bool


@dataclass(frozen=True)
class ImportOutcome:
    """What an import read, without examples, and how many rows it has in the store."""

    counts: Counts
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `parse`."""
        counts = self.counts
        return {"seen": counts.seen, "kept": counts.kept, "dropped": dict(counts.dropped), "notes": dict(counts.notes),
                "rows": self.rows}  # fmt: skip

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ImportOutcome:
        """Raises KeyError, TypeError, ValueError, AttributeError."""
        dropped, notes = ({str(k): int(n) for k, n in given[name].items()} for name in ("dropped", "notes"))
        counts = Counts(int(given["seen"]), int(given["kept"]), Counter(dropped), {}, Counter(notes))
        return cls(counts, int(given["rows"]))


@dataclass
class _Import:
    """starts: of its partition files. outcome: None until the import is complete."""

    starts: set[int] = field(default_factory=set)
    outcome: ImportOutcome | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"starts": sorted(self.starts), "outcome": self.outcome.as_dict() if self.outcome else None}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> _Import:
        outcome = given["outcome"]
        return cls(set(map(int, given["starts"])), None if outcome is None else ImportOutcome.parse(outcome))


@dataclass
class _Record:
    states: dict[int, FileState] = field(default_factory=dict)
    imports: dict[str, _Import] = field(default_factory=dict)

    def note(self, changes: Mapping[int, Change], own: str | None) -> None:
        """Forget the imports that the changes touch. own: the import that made them, which keeps its rows."""
        for start_s, (before, after, is_replaced) in changes.items():
            is_foreign = start_s in self.states and self.states[start_s] != before
            for key, known in list(self.imports.items()):
                if start_s in known.starts and (is_foreign or (is_replaced and key != own)):
                    del self.imports[key]
            self.states[start_s] = after
        if own in self.imports:
            self.imports[own].starts.update(changes)


def state_of(path: Path) -> FileState:
    """The state of a file; empty where there is none that can be seen."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(frozen=True)
class ImportedFiles:
    """The record of one cluster. key: hash of a file's content and of all that decides which rows it gives.

    cluster: folder of the partition files. partition: path of the partition file that starts then (s).
    """

    cluster: Path
    partition: Callable[[int], Path]

    def outcome(self, key: str) -> ImportOutcome | None:
        """The outcome of a complete import whose rows the store still holds; None without one."""
        record = self._read()
        known = record.imports.get(key)
        if known is None or known.outcome is None:
            return None
        is_held = all(record.states.get(start) == state_of(self.partition(start)) for start in known.starts)
        return known.outcome if is_held else None

    def note(self, changes: Mapping[int, Change], key: str | None = None, is_first: bool = False) -> None:
        """Note a write. key: of the import that it belongs to. is_first: whether it is the import's first write."""
        record = self._read()
        if key is not None and is_first:
            record.imports.pop(key, None)
            record.imports[key] = _Import()
        if record.imports and (key is not None or not changes.keys().isdisjoint(record.states)):
            record.note(changes, key)
            self._write(record)

    def complete(self, key: str, outcome: ImportOutcome) -> None:
        """Note that all rows of an import are stored; nothing where they were changed meanwhile."""
        record = self._read()
        if key in record.imports:
            record.imports[key].outcome = outcome
            self._write(record)

    def _read(self) -> _Record:
        """The record; an empty one where it is absent or damaged: files are then read again."""
        try:
            content = read_json(self.cluster / _NAME)
            states = {int(start): tuple(map(int, state)) for start, state in content["states"].items()}
            imports = {key: _Import.parse(one) for key, one in content["imports"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return _Record()
        return _Record(states, imports)

    def _write(self, record: _Record) -> None:
        newest = dict(list(record.imports.items())[-_MOST_IMPORTS:])
        starts = set().union(*(one.starts for one in newest.values()))
        content = {
            "states": {start: state for start, state in sorted(record.states.items()) if start in starts},
            "imports": {key: one.as_dict() for key, one in newest.items()},
        }
        path = self.cluster / _NAME
        with writing(path):
            for folder in (self.cluster.parent, self.cluster):
                make_inner_folder(folder)
            write_atomically(path, with_checksum(json.dumps(content)), is_handed_over=True)
