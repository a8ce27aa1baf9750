"""Rows of a job id are found in the files that can hold it, and other files are not read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.errors import DamageWarning
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.id_ranges import MOST_IDS, of_ids
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

DAY_S = 86_400


def ids(*values: int | None) -> pa.Array[pa.Int64Scalar]:
    return pa.array(values, pa.int64())


@pytest.fixture
def store(tmp_path: Path) -> ClusterStore:
    """Jobs 10 to 13 on the first day, 20 to 23 on the second, and an array 31 of tasks 32 and 33 on the third."""
    store = Store.create(tmp_path / "s").of("c")
    rows = [{"job_id": 10 * day + n, "submit_s": day * DAY_S} for day in (1, 2) for n in range(4)]
    rows += [{"job_id": n, "submit_s": 3 * DAY_S, "array_job_id": 31} for n in (32, 33)]
    store.write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    return store


@pytest.mark.parametrize(
    ("column", "wanted", "days"),
    [
        ("job_id", [11], [1]),
        ("job_id", [13, 20], [1, 2]),
        ("job_id", [15], []),
        ("job_id", [], []),
        ("job_id", [None], []),
        ("array_job_id", [31], [3]),
        ("array_job_id", [11], []),
    ],
)
def test_only_files_that_can_hold_an_id_are_read(
    store: ClusterStore, column: str, wanted: list[int | None], days: list[int]
) -> None:
    files = store.files("jobs")
    chosen = of_ids(files, {column: ids(*wanted)})
    assert chosen == [files[day - 1] for day in days]
    whole = store.read("jobs", ["job_id", "submit_s", "array_job_id"])
    expected = [row for row in whole.to_pylist() if row[column] in wanted and row[column] is not None]
    found = store.read("jobs", whole.schema.names, among={column: ids(*wanted)})
    assert found.sort_by("job_id").to_pylist() == expected


@examples(0.2)
@given(st.lists(st.lists(st.none() | st.integers(-5, 5), max_size=5), max_size=4), st.lists(st.integers(-6, 6)))
def test_no_row_is_lost(
    tmp_path_factory: pytest.TempPathFactory, held: list[list[int | None]], wanted: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files = [folder / f"{place}.parquet" for place in range(len(held))]
    for path, values in zip(files, held, strict=True):
        pq.write_table(pa.table({"array_job_id": ids(*values)}), path, row_group_size=2)
    chosen = of_ids(files, {"array_job_id": ids(*wanted)})
    assert {path for path, values in zip(files, held, strict=True) if set(values) & set(wanted)} <= set(chosen)


def test_a_damaged_file_is_still_named(store: ClusterStore) -> None:
    store.files("jobs")[0].write_bytes(b"damaged")
    with pytest.warns(DamageWarning, match="left out: no whole Parquet file"):
        store.read("jobs", ["job_id"], among={"job_id": ids(22)})


def test_a_file_that_is_replaced_is_looked_at_again(store: ClusterStore) -> None:
    assert store.read("jobs", ["job_id"], among={"job_id": ids(15)}).num_rows == 0
    store.write("jobs", pa.table({"job_id": ids(15), "submit_s": ids(DAY_S)}))
    assert store.read("jobs", ["job_id"], among={"job_id": ids(15)}).num_rows == 1


def test_files_without_statistics_or_of_many_ids_all_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"job_id": ids(1, 2)}), path, write_statistics=False)
    assert of_ids([path], {"job_id": ids(9)}) == [path]
    pq.write_table(pa.table({"name": ["x"]}), path)
    assert of_ids([path], {"job_id": ids(9)}) == [path]
    pq.write_table(pa.table({"job_id": ids(1, 2)}), path)
    assert of_ids([path], {"job_id": ids(*range(100, 100 + MOST_IDS))}) == []
    assert of_ids([path], {"job_id": ids(*range(100, 101 + MOST_IDS))}) == [path]
