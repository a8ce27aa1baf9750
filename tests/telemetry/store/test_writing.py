"""Partition files hold each key once, sorted, for rows in any order, and are written once per ingest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_site import rows_of
from profiles import examples

from almanac.errors import SourceError, StoreError
from almanac.records import Counts
from telemetry.ingest import IngestResult, ingest
from telemetry.sources.source import RowBatch
from telemetry.store import writing
from telemetry.store.store import ClusterStore, Store
from telemetry.store.writing import WriteResult

HOUR_MS = 3_600_000
FAR = st.sampled_from([-(2**45), -1, 0, 1, HOUR_MS, 2**45])
KEYS = st.tuples(
    st.sampled_from(["", "a", "b", "Z", "é", "𝄞", "￿"]), st.integers(-3, 3), st.sampled_from(["", "1", "2"]), FAR
)
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
Row = tuple[str, int, int, float | None]
CONFLICTS: list[Row] = [
    ("n1", 0, 0, 5.0), ("n1", 0, 0, 3.0), ("n1", 0, 0, None), ("n1", 0, 0, float("nan")), ("n1", 0, 10, 1.0),
    ("n2", 1, 0, 4.0), ("n2", 1, 0, 6.0), ("n2", 1, 3600, 2.0), ("n2", 1, 3600, 2.5), ("n1", 0, 20, None),
]  # fmt: skip


def keyed(keys: list[tuple[str, int, str, int]]) -> pa.Table:
    """Telemetry rows of these keys; job_label numbers them."""
    return rows_of("telemetry", "host gpu mig time_ms job_label", ((*key, at) for at, key in enumerate(keys)))


def encoded(rows: pa.Table) -> pa.Table:
    """The rows in two chunks with different dictionaries. One dictionary repeats a text."""
    host = rows["host"].combine_chunks()
    twice = pa.DictionaryArray.from_arrays(pa.array(range(len(host)), pa.int32()), host)
    half = len(host) // 2
    chunks: Any = pa.chunked_array([host.slice(0, half).dictionary_encode(), twice.slice(half)])
    return rows.set_column(0, "host", chunks)


@given(st.lists(KEYS, max_size=12), st.booleans(), st.sampled_from([2**62, 9]))
def test_a_file_is_sorted_by_key_and_holds_each_key_once(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[str, int, str, int]], is_encoded: bool, most: int
) -> None:
    store = Store.create(tmp_path_factory.mktemp("s") / "s").of("c")
    rows = keyed(keys)
    first = {key: at for at, key in enumerate(keys)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_MOST_CODES", most)
        assert store.write("telemetry", encoded(rows) if is_encoded else rows) == WriteResult(added=len(first))
    assert store.write("telemetry", rows) == WriteResult(unchanged=len(first))
    expected = sorted(first, key=lambda key: (key[3] // HOUR_MS, key[0].encode(), *key[1:]))
    found = store.read("telemetry", ["host", "gpu", "mig", "time_ms", "job_label"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [(*key, first[key]) for key in expected]


def samples(rows: list[Row]) -> pa.Table:
    """Telemetry rows of (host, gpu, seconds after START_MS, hbm_used_mib)."""
    full = ((host, gpu, "", START_MS + at_s * 1000, f"GPU-{mib}", mib) for host, gpu, at_s, mib in rows)
    return rows_of("telemetry", "host gpu mig time_ms uuid hbm_used_mib", full)


def used(cluster: ClusterStore) -> list[float | None]:
    found: list[float | None] = cluster.read("telemetry")["hbm_used_mib"].to_pylist()
    return found


def test_the_last_of_job_records_given_twice_counts(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [7, 7], "submit_s": [1, 1], "state": ["RUNNING", "COMPLETED"]}))
    assert cluster.read("jobs")["state"].to_pylist() == ["COMPLETED"]


@given(order=st.permutations(range(len(CONFLICTS))))
@examples(0.25)
def test_the_order_of_conflicting_samples_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    def stored(rows: list[Row]) -> list[bytes]:
        cluster = Store.create(tmp_path_factory.mktemp("store") / "s").of("c")
        cluster.write("telemetry", samples(rows))
        assert used(cluster) == [5.0, 1.0, None, 6.0, 2.5]
        return [path.read_bytes() for path in cluster.files("telemetry")]

    assert stored([CONFLICTS[n] for n in order]) == stored(CONFLICTS)


def test_a_value_that_is_no_number_is_not_a_change(cluster: ClusterStore) -> None:
    nan = [("n1", 0, 0, float("nan")), ("n1", 0, 10, 1.0)]
    cluster.write("telemetry", samples(nan))
    assert cluster.write("telemetry", samples([*nan, ("n1", 0, 20, 2.0)])) == WriteResult(added=1, unchanged=2)


HOUR_S = 3600
TIMES = st.integers(-9999, 9999)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the partition files written, in order."""
    names: list[str] = []
    replace = writing.write_partition

    def noted(path: Path, *rest: Any) -> None:
        names.append(path.name)
        replace(path, *rest)

    monkeypatch.setattr(writing, "write_partition", noted)
    return names


def samples_at(host: str, *times_s: int) -> pa.Table:
    """Rows of one GPU with its time as power."""
    full = ((host, 0, "", time_s * 1000, time_s) for time_s in times_s)
    return rows_of("telemetry", "host gpu mig time_ms power_w", full)


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


def run(cluster: ClusterStore, source: Batches, progress: Any = lambda rows, reached_s: None) -> IngestResult:
    result = IngestResult("test", 0, 2**40)
    ingest(source, cluster, 0, 2**40, result, progress)
    return result


def test_files_in_order_of_host_are_written_once(cluster: ClusterStore, replaced: list[str]) -> None:
    day = range(0, 24 * HOUR_S, 600)
    result = run(cluster, Batches([(samples_at(host, *day), None) for host in "cab"]))
    assert replaced == [f"{hour:02}00.parquet" for hour in range(24)]
    assert result.written == {"telemetry": WriteResult(added=3 * len(day))}
    assert cluster.read("telemetry", ["host"])["host"].to_pylist()[:18] == ["a"] * 6 + ["b"] * 6 + ["c"] * 6


def test_an_hour_in_pieces_is_written_once_and_before_its_watermark(cluster: ClusterStore, replaced: list[str]) -> None:
    seen: list[tuple[int, int | None, int]] = []

    def progress(rows: int, reached_s: int) -> None:
        seen.append((reached_s, cluster.watermark("test"), len(replaced)))

    pieces = [(samples_at("a", time_s, time_s + 890), time_s + 900) for time_s in range(0, 3 * HOUR_S, 900)]
    run(cluster, Batches(pieces), progress)
    assert replaced == ["0000.parquet", "0100.parquet", "0200.parquet"]
    assert cluster.watermark("test") == 3 * HOUR_S
    marks = [(mark_s, files) for _, mark_s, files in seen]
    assert marks == [(None, 0)] * 4 + [(HOUR_S, 1)] * 4 + [(2 * HOUR_S, 2)] * 4


def test_rows_before_a_fault_of_the_source_are_stored(cluster: ClusterStore) -> None:
    pieces = [(samples_at("a", 0, 10), 20), (samples_at("a", 20), 30)]
    with pytest.raises(SourceError):
        run(cluster, Batches(pieces, SourceError("no answer", "wait")))
    assert cluster.watermark("test") == 30
    assert cluster.read("telemetry").num_rows == 3


def test_rows_that_are_not_stored_move_no_watermark(cluster: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("no space left", "free some")

    monkeypatch.setattr(writing, "write_partition", full)
    with pytest.raises(StoreError, match="no space left"):
        run(cluster, Batches([(samples_at("a", 0, 10), 20)]))
    assert cluster.watermark("test") is None


def test_a_full_staging_is_stored_before_more_is_read(
    cluster: ClusterStore, replaced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MOST_ROWS", 4)
    result = run(cluster, Batches([(samples_at(host, 0, HOUR_S), None) for host in "abc"]))
    assert replaced == ["0000.parquet", "0100.parquet"] * 2
    assert result.written["telemetry"].added == 6


def test_a_disk_that_is_full_while_rows_wait_says_so(cluster: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_MOST_IN_MEMORY", 1)
    monkeypatch.setattr("telemetry.store.writing.pa.ipc.new_stream", full)
    with pytest.raises(StoreError, match="cannot be written: No space left") as caught:
        run(cluster, Batches([(samples_at("a", 0), None)]))
    assert "free disk space" in caught.value.hint


def test_waiting_rows_lie_where_nobody_else_can_read_and_leave_nothing(
    cluster: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MOST_IN_MEMORY", 1)
    with cluster.writer("telemetry") as staged:
        staged.add(samples_at("a", 0))
        [file] = cluster.root.glob(".almanac-spill-*/staged-telemetry")
        assert file.parent.stat().st_mode & 0o077 == 0
    assert not list(cluster.root.glob(".almanac-spill-*"))


@given(st.lists(st.lists(TIMES, max_size=5), max_size=5), st.integers(1, 6), st.booleans(), st.booleans())
def test_rows_are_written_as_given_wherever_they_waited(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], most: int, has_disk: bool, is_encoded: bool
) -> None:
    cluster = Store.create(tmp_path_factory.mktemp("s") / "s").of("c")
    with pytest.MonkeyPatch.context() as patch, cluster.writer("telemetry") as staged:
        patch.setattr(writing, "_MOST_IN_MEMORY", most)
        if not has_disk:
            patch.setattr(writing, "spill_folder", lambda parents: nullcontext(""))
        given_rows = {(f"n{number}", time_s) for number, times in enumerate(blocks) for time_s in times}
        for expected in (WriteResult(added=len(given_rows)), WriteResult(unchanged=len(given_rows))):
            for number, times in enumerate(blocks):
                rows = samples_at(f"n{number}", *times)
                staged.add(rows.set_column(0, "host", rows["host"].dictionary_encode()) if is_encoded else rows)
            assert staged.is_full == (not has_disk and sum(map(len, blocks)) >= most)
            assert staged.write() == expected
            assert staged.is_empty and not staged.is_full
    found = cluster.read("telemetry", ["host", "time_ms"]).to_pylist()
    assert sorted((row["host"], row["time_ms"] // 1000) for row in found) == sorted(given_rows)
