"""The real job traces of ../shared/data, which the benchmarks read."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pyarrow as pa

from telemetry.history import load_history
from telemetry.sources.files import FileSource
from telemetry.store.store import Store

DATA = Path(os.environ.get("ALMANAC_SHARED_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
TRACES = {
    "helios": ("helios_jobs_15k.parquet", 0.61),
    "mason": ("mason_named_jobs_oct_nov.parquet", 0.67),
    "clustercockpit": ("clustercockpit_jobs.parquet", None),
}
"""File and goal of the rank correlation. The last has too few jobs for a model, and so no such goal."""
FOREVER = 2**40


def read_trace(path: Path) -> pa.Table:
    """The trace's jobs, through the same import as an operator's; CPU-only jobs count as one GPU a slot."""
    parts = []
    for batch in FileSource(path, "jobs").read(-FOREVER, FOREVER):
        rows = batch.rows
        if not any(rows["gpu_count"].to_pylist()):
            at = rows.schema.get_field_index("gpu_count")
            rows = rows.set_column(at, rows.schema.field(at), rows["cpu_count"])
        parts.append(rows)
    return pa.concat_tables(parts)


def load_trace(path: Path, folder: Path) -> pd.DataFrame:
    """Its history, as an operator's."""
    store = Store.create(folder)
    store.of("trace").write("jobs", read_trace(path))
    return load_history(store.of("trace"), running=True)
