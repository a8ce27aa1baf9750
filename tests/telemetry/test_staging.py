"""Each telemetry file is written once per ingest, for rows in any order, and watermarks stay behind rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import SourceError, StoreError
from almanac.records import Counts
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.base import RowBatch
from telemetry.store import cluster_store, staging
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.merge import WriteResult
from telemetry.store.schema import TABLES
from telemetry.store.staging import Staging
from telemetry.store.store import Store

HOUR_S = 3600
TIMES = st.integers(-9999, 9999)


@pytest.fixture
def store(tmp_path: Path) -> ClusterStore:
    return Store.create(tmp_path / "store").of("c")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the partition files written, in order."""
    names: list[str] = []
    replace = cluster_store.write_partition

    def noted(path: Path, *rest: Any) -> None:
        names.append(path.name)
        replace(path, *rest)

    monkeypatch.setattr(cluster_store, "write_partition", noted)
    return names


def samples(host: str, *times_s: int) -> pa.Table:
    """Rows of one GPU with its time as power."""
    count = len(times_s)
    return pa.table(
        {
            "host": pa.array([host] * count, pa.string()),
            "gpu": pa.array([0] * count, pa.int16()),
            "mig": pa.array([""] * count, pa.string()),
            "time_ms": pa.array([time_s * 1000 for time_s in times_s], pa.int64()),
            "power_w": pa.array(times_s, pa.float32()),
        }
    )


@dataclass
class Batches:
    """A source of these rows, each with its watermark, and of a fault after them."""

    given: Sequence[tuple[pa.Table, int | None]]
    fault: Exception | None = None
    name: str = "test"

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        for rows, mark_s in self.given:
            yield RowBatch("telemetry", rows, Counts(rows.num_rows, rows.num_rows), mark_s)
        if self.fault:
            raise self.fault


def run(store: ClusterStore, source: Batches, progress: Any = lambda rows, reached_s: None) -> IngestResult:
    result = IngestResult("test", 0, 2**40)
    ingest(source, store, 0, 2**40, result, progress)
    return result


def test_files_in_order_of_host_are_written_once(store: ClusterStore, replaced: list[str]) -> None:
    day = range(0, 24 * HOUR_S, 600)
    result = run(store, Batches([(samples(host, *day), None) for host in "cab"]))
    assert replaced == [f"{hour:02}00.parquet" for hour in range(24)]
    assert result.written == {"telemetry": WriteResult(added=3 * len(day))}
    assert store.read("telemetry", ["host"])["host"].to_pylist()[:18] == ["a"] * 6 + ["b"] * 6 + ["c"] * 6


def test_an_hour_in_pieces_is_written_once_and_before_its_watermark(store: ClusterStore, replaced: list[str]) -> None:
    seen: list[tuple[int, int | None, int]] = []

    def progress(rows: int, reached_s: int) -> None:
        seen.append((reached_s, store.watermark("test"), len(replaced)))

    pieces = [(samples("a", time_s, time_s + 890), time_s + 900) for time_s in range(0, 3 * HOUR_S, 900)]
    run(store, Batches(pieces), progress)
    assert replaced == ["0000.parquet", "0100.parquet", "0200.parquet"]
    assert store.watermark("test") == 3 * HOUR_S
    marks = [(mark_s, files) for _, mark_s, files in seen]
    assert marks == [(None, 0)] * 4 + [(HOUR_S, 1)] * 4 + [(2 * HOUR_S, 2)] * 4


def test_rows_before_a_fault_of_the_source_are_stored(store: ClusterStore) -> None:
    pieces = [(samples("a", 0, 10), 20), (samples("a", 20), 30)]
    with pytest.raises(SourceError):
        run(store, Batches(pieces, SourceError("no answer", "wait")))
    assert store.watermark("test") == 30
    assert store.read("telemetry").num_rows == 3


def test_rows_that_are_not_stored_move_no_watermark(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("no space left", "free some")

    monkeypatch.setattr(cluster_store, "write_partition", full)
    with pytest.raises(StoreError, match="no space left"):
        run(store, Batches([(samples("a", 0, 10), 20)]))
    assert store.watermark("test") is None


def test_a_full_staging_is_stored_before_more_is_read(
    store: ClusterStore, replaced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MOST_ROWS", 4)
    result = run(store, Batches([(samples(host, 0, HOUR_S), None) for host in "abc"]))
    assert replaced == ["0000.parquet", "0100.parquet"] * 2
    assert result.written["telemetry"].added == 6


def test_a_disk_that_is_full_while_rows_wait_says_so(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "_MOST_IN_MEMORY", 1)
    monkeypatch.setattr("telemetry.store.staging.pa.ipc.new_stream", full)
    with pytest.raises(StoreError, match="cannot be written: No space left") as caught:
        run(store, Batches([(samples("a", 0), None)]))
    assert "free disk space" in caught.value.hint


def test_waiting_rows_lie_where_nobody_else_can_read_and_leave_nothing(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MOST_IN_MEMORY", 1)
    with store.staging("telemetry") as staged:
        staged.add(samples("a", 0))
        [file] = store.root.glob(".almanac-spill-*/staged-telemetry")
        assert file.parent.stat().st_mode & 0o077 == 0
    assert not list(store.root.glob(".almanac-spill-*"))


@given(
    st.lists(st.lists(st.integers(-9999, 9999), max_size=5), max_size=5),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_parts_hold_all_rows_in_the_order_given(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], most: int, has_disk: bool, is_encoded: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_MOST_IN_MEMORY", most)
        staged = Staging(TABLES["telemetry"], tmp_path_factory.mktemp("s") if has_disk else None)
        for _ in range(2):
            for number, times in enumerate(blocks):
                rows = samples(f"n{number}", *times)
                staged.add(rows.set_column(0, "host", rows["host"].dictionary_encode()) if is_encoded else rows)
            found = {start_s: part.select(["host", "time_ms"]).to_pylist() for start_s, part in staged.parts()}
            given_rows = [(f"n{number}", time_s) for number, times in enumerate(blocks) for time_s in times]
            assert list(found) == sorted({time_s // HOUR_S * HOUR_S for _, time_s in given_rows})
            for start_s, part in found.items():
                expected = [row for row in given_rows if row[1] // HOUR_S * HOUR_S == start_s]
                assert [(row["host"], row["time_ms"] // 1000) for row in part] == expected
            staged.clear()
            assert staged.is_empty
