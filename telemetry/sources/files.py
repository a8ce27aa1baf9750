"""Import of exports: job traces and telemetry in Parquet or CSV (layouts.toml names the columns)."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

import telemetry
from almanac.config import Tier
from almanac.records import Counts, Request
from almanac.tiers import requested_tier
from almanac.units import printable
from telemetry.sources.base import RowBatch
from telemetry.sources.blocks import open_columns, read_blocks, unreadable
from telemetry.sources.file_jobs import read_jobs
from telemetry.sources.file_telemetry import FUTURE, ReadSpan, read_telemetry, selection
from telemetry.sources.layouts import Kind, Layout, choose_layout
from telemetry.store.imported_files import FileState, state_of
from telemetry.store.schema import TABLES

_BLOCK_ROWS = {"jobs": 10_000, "telemetry": 500_000}
_CLOCK_TOLERANCE_S = 300


class FileSource:
    """A `Source` of one file. Its batches come in the file's own order, and it has no watermark.

    Counts are in rows for jobs, and in samples (one value of one counter at one time) for telemetry.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        layout: str | None = None,
        *,
        tiers: Sequence[Tier] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """tiers: what a job's request is matched against, where the file does not name its tier."""
        self.name = f"file:{path.name}"
        self._path, self._kind, self._layout, self._clock = path, kind, layout, clock
        self._tiers = tiers
        self._hashed: FileState = ()
        self._has_future = False

    def layout(self) -> Layout:
        """How the file is read. Raises FileFormatError."""
        return choose_layout(str(self._path), list(open_columns(self._path).types), self._kind, self._layout)

    def key(self, since_s: int, until_s: int) -> str | None:
        """Hash of a telemetry file, its layout, the span, and almanac's code. Raises FileFormatError.

        None for jobs, and for what is not a regular file.
        """
        self._hashed = state_of(self._path)
        if self._kind != "telemetry" or not self._path.is_file():
            return None
        layout = self.layout().name
        try:
            with self._path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self._path, error) from error
        # The name's end matters: Arrow decompresses by it.
        parts = (content, self._path.suffix, layout, since_s, until_s, _code_hash())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def is_final(self) -> bool:
        """False where the file changed since `key`, or has rows of the future, which a later read would give."""
        return not self._has_future and self._hashed == state_of(self._path)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of bounded size with the rows of [since_s, until_s): by submit time (jobs), by time (telemetry).

        Raises FileFormatError where the file cannot be read, or its columns are those of no known layout.
        """
        columns, layout = open_columns(self._path), self.layout()
        layout = replace(layout, is_typed=layout.is_own and not columns.delimiter)
        latest_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        span = ReadSpan(since_s * 1000, until_s * 1000, latest_s * 1000)
        counts = Counts()
        for name in layout.unknown(list(columns.types)):
            counts.note(f"column not known: {printable(name, 80)}")
        select = selection(columns, layout) if self._kind == "telemetry" else {
            name: columns.text(name) for name in layout.needed(list(columns.types))}  # fmt: skip
        for block in read_blocks(columns, select, _BLOCK_ROWS[self._kind], counts) if columns.has_rows else ():
            if self._kind == "jobs":
                rows = _with_tiers(read_jobs(block, layout, since_s, until_s, latest_s, counts), self._tiers)
            else:
                rows = read_telemetry(block, span, counts)
                self._has_future |= FUTURE in counts.dropped
            yield RowBatch(self._kind, rows, counts)
            counts = Counts()
        if counts.seen or counts.notes:
            yield RowBatch(self._kind, TABLES[self._kind].schema.empty_table(), counts)


@functools.cache
def _code_hash() -> str:
    """Hash of the package telemetry: other code can read the same file in another way."""
    folder, found = Path(telemetry.__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _with_tiers(rows: pa.Table, tiers: Sequence[Tier]) -> pa.Table:
    """The tier that each row's constraint, GPU type or partition asks for, where the row names none."""
    if not tiers:
        return rows
    columns = ("tier", "constraints", "gpu_type", "partition")
    names = []
    for known, constraints, gpu_type, partition in zip(*(rows[c].to_pylist() for c in columns), strict=True):
        request = Request(user="", constraints=constraints or "", gpu_type=gpu_type or "", partition=partition or "")
        tier = None if known else requested_tier(request, tiers)
        names.append(known or (tier.name if tier else None))
    place = rows.schema.get_field_index("tier")
    return rows.set_column(place, rows.schema.field(place), pa.array(names, pa.string()))
