"""Small sites, and the engine run on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.config import Config, Filters
from telemetry.attribution import Job
from telemetry.counters import COUNTER_COLUMNS
from telemetry.metrics.options import Options
from telemetry.schema import TELEMETRY
from telemetry.store import Store
from telemetry.summary import compute

sys.path.insert(0, str(Path(__file__).parent))

Run = Callable[..., tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]]

# Nothing is set aside, so that small examples are measured.
OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))


def telemetry(frame: pd.DataFrame) -> pa.Table:
    """A telemetry table of a frame; missing columns are null, NaN is null."""
    columns: dict[str, Any] = {"mig": "", "model": "NVIDIA A100-SXM4-40GB", "uuid": None, "job_label": None}
    full = frame.assign(**{name: value for name, value in columns.items() if name not in frame})
    full = full.assign(**{name: np.nan for name in COUNTER_COLUMNS if name not in frame})
    return pa.table([pa.Array.from_pandas(full[field.name], type=field.type) for field in TELEMETRY], schema=TELEMETRY)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the engine: (frame, jobs, ...) -> job rows by job id, GPU rows. One sample per 10 s is expected."""
    numbers = iter(range(1000))

    def run_once(
        frame: pd.DataFrame,
        jobs: Sequence[Job],
        *,
        config: Config = OPEN,
        stored: bool = True,
        threads: int = 2,
        options: Options | None = None,
    ) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        root = tmp_path / str(next(numbers))
        if stored:
            store = Store.create(root)
            store.write("telemetry", "c", telemetry(frame))
            paths = store.files("telemetry", "c")
        else:
            root.mkdir()
            half = len(frame) // 2
            paths = [root / "b.parquet", root / "a.parquet"]
            for path, part in zip(paths, (frame[:half], frame[half:]), strict=True):
                pq.write_table(telemetry(part), path)
        with duckdb.connect(config={"threads": threads, "memory_limit": "512MiB"}) as db:
            results, _ = compute(db, paths, jobs, [], config, options=options)
        return {row["job_id"]: row for row in results.jobs.to_pylist()}, results.gpus.to_pylist()

    return run_once
