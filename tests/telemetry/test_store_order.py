"""Rows are sorted and cut into partitions as in plain Python, for any keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.store.merge import WriteResult
from telemetry.store.order import in_order
from telemetry.store.partitions import by_partition
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

TELEMETRY, JOBS = TABLES["telemetry"], TABLES["jobs"]
HOUR_MS = 3_600_000
FAR = st.sampled_from([-(2**62), -1, 0, 1, 2**40, 2**62])
KEYS = st.tuples(
    st.sampled_from(["", "a", "b", "Z", "é", "𝄞", "￿"]), st.integers(-3, 3), st.sampled_from(["", "1", "2"]), FAR
)


def keyed(keys: list[tuple[str, int, str, int]]) -> pa.Table:
    """Telemetry rows of these keys; job_label numbers them."""
    columns: dict[str, Any] = {
        "host": pa.array([key[0] for key in keys], pa.string()),
        "gpu": pa.array([key[1] for key in keys], pa.int16()),
        "mig": pa.array([key[2] for key in keys], pa.string()),
        "time_ms": pa.array([key[3] for key in keys], pa.int64()),
        "job_label": pa.array(range(len(keys)), pa.int64()),
    }
    return pa.table(columns)


def encoded(rows: pa.Table) -> pa.Table:
    """The rows in two chunks with different dictionaries. One dictionary repeats a text."""
    host = rows["host"].combine_chunks()
    twice = pa.DictionaryArray.from_arrays(pa.array(range(len(host)), pa.int32()), host)
    half = len(host) // 2
    chunks: Any = pa.chunked_array([host.slice(0, half).dictionary_encode(), twice.slice(half)])
    return rows.set_column(0, "host", chunks)


@given(st.lists(KEYS, max_size=12), st.booleans())
def test_rows_are_sorted_by_their_key_and_equal_keys_keep_their_order(
    keys: list[tuple[str, int, str, int]], is_encoded: bool
) -> None:
    rows = keyed(keys)
    found, is_unique = in_order(TELEMETRY, encoded(rows) if is_encoded else rows)
    expected = sorted(range(len(keys)), key=lambda at: (keys[at][0].encode(), *keys[at][1:], at))
    assert found["job_label"].to_pylist() == expected
    assert found["host"].to_pylist() == [keys[at][0] for at in expected]
    assert is_unique == (len(set(keys)) == len(keys))


@given(st.lists(st.tuples(FAR, FAR), max_size=8))
def test_keys_of_any_size_are_sorted(keys: list[tuple[int, int]]) -> None:
    rows = pa.table({"submit_s": pa.array([key[0] for key in keys], pa.int64()),
                     "job_id": pa.array([key[1] for key in keys], pa.int64())})  # fmt: skip
    found, is_unique = in_order(JOBS, rows)
    assert [tuple(row.values()) for row in found.to_pylist()] == sorted(keys)
    assert is_unique == (len(set(keys)) == len(keys))


@given(st.lists(st.sampled_from([-(2**50), -1, 0, 5, HOUR_MS, HOUR_MS + 1, 2**50]), max_size=12))
def test_each_partition_has_its_rows_in_the_order_given(times: list[int]) -> None:
    rows = keyed([("a", 0, "", time) for time in times])
    found = {start_s: part["job_label"].to_pylist() for start_s, part in by_partition(TELEMETRY, rows)}
    assert list(found) == sorted({time // HOUR_MS * 3600 for time in times})
    for start_s, labels in found.items():
        assert labels == [at for at, time in enumerate(times) if time // HOUR_MS * 3600 == start_s]


def test_measured_values_are_stored_as_split_bytes(tmp_path: Path) -> None:
    """A dictionary of values that never repeat took three times the time to write, and half as much space again."""
    store = Store.create(tmp_path / "store").of("c")
    store.write("telemetry", keyed([("a", 0, "", 0)]).append_column("power_w", pa.array([1.5], pa.float32())))
    [path] = store.files("telemetry")
    group = pq.read_metadata(path).row_group(0)
    encodings = {group.column(at).path_in_schema: group.column(at).encodings for at in range(group.num_columns)}
    assert encodings["power_w"] == ("RLE", "BYTE_STREAM_SPLIT")
    assert "RLE_DICTIONARY" in encodings["host"]


@pytest.mark.parametrize("first", [["b"], ["a", "c"]])
def test_rows_of_other_keys_are_added_between_those_of_the_file(tmp_path: Path, first: list[str]) -> None:
    store = Store.create(tmp_path / "store").of("c")
    store.write("telemetry", keyed([(host, 0, "", 0) for host in first]))
    rest = [host for host in "abc" if host not in first]
    assert store.write("telemetry", keyed([(host, 0, "", 0) for host in rest])) == WriteResult(added=len(rest))
    assert store.read("telemetry", ["host"])["host"].to_pylist() == ["a", "b", "c"]
