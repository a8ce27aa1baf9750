"""Day partials: how small they are, and whether their merge is what one run over everything gives."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from telemetry_baselines import COLUMNS

from almanac.config import Config
from telemetry.attribution.runs import load_jobs
from telemetry.metrics.chunks import map_partials, silent
from telemetry.metrics.engine import Prepared, complete, prepare
from telemetry.metrics.hours import Files
from telemetry.metrics.partials import Partials, merge_partials
from telemetry.store.store import Store

DAY_MS = 86_400_000
SMALLEST = {"hbm_growth_mib_h": 1.0, "temporal_imbalance": 1e-3, "spatial_imbalance": 1e-3}
"""Differences of larger numbers are measured by these where they are close to 0."""


def compare(root: Path) -> dict[str, float]:
    """Of day partials of the full set.

    rows: GPUs of jobs by the day, by rows of the input. bytes: of all tables in memory, by those of the decoded input
    (COLUMNS, in Arrow memory). difference: largest relative one between the merged days and one run over everything.
    """
    store = Store.open(root)
    jobs = load_jobs(store.of("bench"), 0, 2**40)
    paths = store.of("bench").files("telemetry")
    with store.connect() as db:
        prepared = prepare(db, paths, jobs, [], Config())
        days = [
            _map(db, prepared, list(chunks))
            for _, chunks in groupby(prepared.work.chunks, key=lambda chunk: chunk.from_ms // DAY_MS)
        ]
        split, _ = complete(db, prepared, merge_partials(db, days), Config())
        first, last = prepared.work.chunks[0], prepared.work.chunks[-1]
        together = Files(tuple(paths), first.from_ms, last.until_ms, is_sorted=True)
        whole, _ = complete(db, prepared, _map(db, prepared, [together]), Config())
    decoded = [pq.read_table(path, columns=COLUMNS, partitioning=None) for path in paths[:: max(1, len(paths) // 50)]]
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    bytes_per_row = sum(table.nbytes for table in decoded) / sum(table.num_rows for table in decoded)
    return {
        "rows": sum(day.tables[0].num_rows for day in days) / rows,
        "bytes": sum(day.nbytes for day in days) / (bytes_per_row * rows),
        "difference": max(_difference(split.jobs, whole.jobs), _difference(split.gpus, whole.gpus)),
    }


def _map(db: Any, prepared: Prepared, chunks: list[Files]) -> Partials:
    return map_partials(db, replace(prepared.work, chunks=chunks), silent)


def _difference(one: pa.Table, other: pa.Table) -> float:
    worst = 0.0
    for name in one.column_names:
        for a, b in zip(one[name].to_pylist(), other[name].to_pylist(), strict=True):
            if isinstance(a, float) and isinstance(b, float):
                scale = max(abs(a), abs(b), SMALLEST.get(name, 0.0))
                worst = max(worst, abs(a - b) / scale if scale else 0.0)
            elif a != b:
                return math.inf
    return worst
