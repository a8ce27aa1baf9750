"""The interface of all sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from almanac.records import Counts


@dataclass(frozen=True)
class RowBatch:
    """Rows of one table of the store (`telemetry.store.schema.TABLES`), and counts of the records behind them.

    Text can be dictionary-encoded. watermark_s: when this batch is stored, everything up to this time (s since 1970)
    has been read; None if the source has no watermark.
    """

    table: str
    rows: pa.Table
    counts: Counts
    watermark_s: int | None = None


class Source(Protocol):
    """A source that can be read once per span."""

    @property
    def name(self) -> str:
        """Name under which its watermark is kept."""
        ...

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of [since_s, until_s), in time order. Raises SourceError where nothing can be read."""
        ...


@runtime_checkable
class FileOfRows(Source, Protocol):
    """A source that gives the same rows each time, as long as its file is the same."""

    def key(self, since_s: int, until_s: int) -> str | None:
        """Hash of the file and of all that decides which rows `read` gives; None where that cannot be known."""
        ...

    def is_final(self) -> bool:
        """Return True if reading the file that `key` hashed again gives no other rows. Call after `read`."""
        ...
