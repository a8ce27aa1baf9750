"""Rows that wait to be written, so that each partition file is written once, for rows in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from telemetry.store.atomic import writing
from telemetry.store.merge import conform
from telemetry.store.partitions import by_partition
from telemetry.store.schema import Table

_MOST_IN_MEMORY = 1_000_000
"""Rows: about 130 MB of telemetry."""
_MOST_ROWS = 30_000_000
"""About 4 GB of telemetry on disk."""


class Staging:
    """Rows of one table by partition. Those that do not fit in memory are in one file of `folder`.

    folder: None keeps all rows in memory; the staging is then full sooner. file_key: of the file that the rows come
    from. is_written: whether rows were cleared before.
    """

    def __init__(self, spec: Table, folder: Path | None, file_key: str | None = None) -> None:
        self.spec, self.file_key, self.is_written = spec, file_key, False
        self._path = folder / f"staged-{spec.name}" if folder else None
        self._in_memory: dict[int, list[pa.Table]] = {}
        self._on_disk: dict[int, list[tuple[int, int]]] = {}
        self._rows_in_memory = self._rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows."""
        return not self._rows

    @property
    def is_full(self) -> bool:
        """Whether to write the rows before more are added."""
        return self._rows >= (_MOST_ROWS if self._path else _MOST_IN_MEMORY)

    def add(self, rows: pa.Table) -> None:
        """Keep rows. Raises StoreError, also for null keys."""
        for start_s, chosen in by_partition(self.spec, conform(rows, self.spec)):
            self._in_memory.setdefault(start_s, []).append(chosen)
        self._rows += rows.num_rows
        self._rows_in_memory += rows.num_rows
        if self._path and self._rows_in_memory >= _MOST_IN_MEMORY:
            self._spill(self._path)

    def parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Start (s) of each partition, in time order, and its rows in the order given."""
        for start_s in sorted({*self._on_disk, *self._in_memory}):
            yield start_s, pa.concat_tables([*self._read(start_s), *self._in_memory.get(start_s, [])])

    def clear(self) -> None:
        """Forget all rows, which are written."""
        self.is_written = True
        self._in_memory, self._on_disk = {}, {}
        self._rows_in_memory = self._rows = 0
        if self._path:
            self._path.unlink(missing_ok=True)

    def _spill(self, path: Path) -> None:
        """Move the rows in memory to the file, with one Arrow stream for each partition."""
        with writing(path), path.open("ab") as out:
            for start_s, tables in self._in_memory.items():
                rows, offset = pa.concat_tables(tables).combine_chunks(), out.tell()
                with pa.ipc.new_stream(out, rows.schema) as stream:
                    stream.write_table(rows)
                self._on_disk.setdefault(start_s, []).append((offset, out.tell() - offset))
        self._in_memory, self._rows_in_memory = {}, 0

    def _read(self, start_s: int) -> Iterator[pa.Table]:
        if self._path and start_s in self._on_disk:
            with self._path.open("rb") as file:
                for offset, length in self._on_disk[start_s]:
                    file.seek(offset)
                    yield pa.ipc.open_stream(file.read(length)).read_all()
