"""Small sites, and the engine run on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from almanac.config import Config
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.engine import compute, prepare
from telemetry.store.database import connect
from telemetry.store.store import Store

sys.path.insert(0, str(Path(__file__).parent))
from small_sites import OPEN, telemetry

Run = Callable[..., tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the engine: (frame, jobs, ...) -> job rows by job id, GPU rows. One sample per 10 s is expected."""
    numbers = iter(range(1000))

    def run_once(
        frame: pd.DataFrame,
        jobs: Sequence[JobRun],
        *,
        config: Config = OPEN,
        stored: bool = True,
        threads: int = 1,
    ) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        root = tmp_path / str(next(numbers))
        if stored:
            store = Store.create(root)
            store.of("c").write("telemetry", telemetry(frame))
            paths = store.of("c").files("telemetry")
        else:
            root.mkdir()
            half = len(frame) // 2
            paths = [root / "b.parquet", root / "a.parquet"]
            for path, part in zip(paths, (frame[:half], frame[half:]), strict=True):
                pq.write_table(telemetry(part), path)
        with connect([], memory_limit_mib=512, threads=threads) as db:
            results = compute(db, prepare(db, paths, jobs, [], config), config)
        return {row["job_id"]: row for row in results.jobs.to_pylist()}, results.gpus.to_pylist()

    return run_once
