"""Records of what almanac told Slurm: JSON lines in one file a day, on disk before Slurm hears of them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from almanac.errors import StoreError
from almanac.plain_file import parse_json, read_plain
from telemetry.store.atomic import hand_over, make_inner_folder

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
        """The lines of the days from since_s on, oldest first; what is no JSON object is passed over.

        A file of a later day is of a clock that was ahead: every other may be newer. Raises StoreError.
        """
        oldest, newest = self._name(since_s), self._name(now_s)
        with self._reading():
            for path in sorted(self._files(), key=lambda path: (path.name <= newest, path.name)):
                if path.name >= oldest:
                    yield from _objects(read_plain(path).splitlines())

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.prefix}????-??-??.jsonl"))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
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


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content
