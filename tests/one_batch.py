"""A generated site that is ingested at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from almanac.records import Counts
from telemetry.sources.source import RowBatch, Source


@dataclass(frozen=True)
class OneBatch:
    """A source's rows of each table at once: a tenth of the transactions."""

    source: Source
    name: str = "sacct"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        tables: dict[str, list[pa.Table]] = {}
        for batch in self.source.read(since_s, until_s):
            tables.setdefault(batch.table, []).append(batch.rows)
        for table, parts in tables.items():
            rows = pa.concat_tables(parts, promote_options="default")
            yield RowBatch(table, rows, Counts(len(rows), len(rows)), until_s)
