"""Day partials: how small they are, and whether their merge is what one run over everything gives."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from almanac.config import Config
from telemetry.metrics.chunks import map_partials
from telemetry.metrics.partials import Files, Partials, merge_partials
from telemetry.runs import load_jobs
from telemetry.store import Store
from telemetry.summary import Prepared, complete, prepare

DAY_MS = 86_400_000


def compare(root: Path) -> dict[str, float]:
    """rows, bytes: of the day partials by those of the input (in memory). difference: largest relative one."""
    store = Store.open(root)
    jobs = load_jobs(store, "bench", 0, 2**40)
    paths = store.files("telemetry", "bench")
    with store.connect() as db:
        prepared = prepare(db, paths, jobs, [], Config())
        days = [
            _map(db, prepared, list(chunks))
            for _, chunks in groupby(prepared.chunks, key=lambda chunk: chunk.from_ms // DAY_MS)
        ]
        split, _ = complete(db, prepared, merge_partials(db, days), Config())
        first, last = prepared.chunks[0], prepared.chunks[-1]
        together = Files(tuple(paths), first.from_ms, last.until_ms, is_sorted=True)
        whole, _ = complete(db, prepared, _map(db, prepared, [together]), Config())
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    return {
        "rows": sum(table.num_rows for day in days for table in day.tables[:2]) / 2 / rows,
        "bytes": sum(day.nbytes for day in days) / _decoded_bytes(paths[len(paths) // 2], rows),
        "difference": _difference(split.jobs, whole.jobs),
    }


def _map(db: Any, prepared: Prepared, chunks: list[Files]) -> Partials:
    return map_partials(db, chunks, prepared.claims, prepared.options, prepared.counted_ms, lambda *_: None)


def _decoded_bytes(path: Path, rows: int) -> float:
    sample = pq.read_table(path, partitioning=None)
    return sample.nbytes / sample.num_rows * rows


def _difference(one: pa.Table, other: pa.Table) -> float:
    worst = 0.0
    for name in one.column_names:
        for a, b in zip(one[name].to_pylist(), other[name].to_pylist(), strict=True):
            if isinstance(a, float) and isinstance(b, float):
                scale = max(abs(a), abs(b), 1.0)
                worst = max(worst, abs(a - b) / scale)
            elif a != b:
                return math.inf
    return worst
