"""How many hours of telemetry are looked at together."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.metrics.chunks import BYTES_A_ROW, _workers
from telemetry.metrics.hours import Files
from telemetry.store.database import connect

ROWS = 400_000


@pytest.fixture
def chunks(tmp_path: Path) -> list[Files]:
    pq.write_table(pa.table({"gpu": pa.nulls(ROWS, pa.int16())}), tmp_path / "0000.parquet")
    return [Files((tmp_path / "0000.parquet",), 0, 1, is_sorted=False)] * 9


@pytest.mark.parametrize(("limit_mib", "workers"), [(64, 1), (128, 1), (256, 2), (512, 5), (2048, 8)])
def test_hours_take_at_most_half_of_the_memory(chunks: list[Files], limit_mib: int, workers: int) -> None:
    with connect([], memory_limit_mib=limit_mib, threads=8) as db:
        assert _workers(db, chunks) == workers
    assert workers == 1 or workers * ROWS * BYTES_A_ROW <= limit_mib * 2**20 / 2


def test_without_a_limit_there_are_as_many_as_threads(chunks: list[Files]) -> None:
    with connect([], threads=3) as db:
        db.execute("SET memory_limit = '100TiB'").fetchall()
        assert _workers(db, chunks) == 3
        assert _workers(db, []) == 3
