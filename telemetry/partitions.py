"""Which partition file of the store a row belongs to, and which span of time a file or a question is of."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from telemetry.schema import Table


def partition_start(path: Path) -> int:
    """Start of a partition file, s since 1970."""
    text = f"{path.parent.name.removeprefix('date=')} {path.stem}"
    return int(dt.datetime.strptime(text, "%Y-%m-%d %H%M").replace(tzinfo=dt.UTC).timestamp())


def by_partition(spec: Table, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Start (s) of each partition that rows belong to, and its rows."""
    part = rows[spec.time_column].to_numpy() // (spec.part_s * spec.ticks_per_s)
    for number in np.unique(part).tolist():
        yield number * spec.part_s, rows.filter(pa.array(part == number))


def span_ticks(spec: Table, since_s: int | None, until_s: int | None) -> tuple[int, int]:
    """A span in the unit of the table's time column; where it has no end, beyond every time."""
    low = -(2**62) if since_s is None else since_s * spec.ticks_per_s
    return low, 2**62 if until_s is None else until_s * spec.ticks_per_s
