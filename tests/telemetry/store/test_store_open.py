"""Folders that are no store of this almanac, strays among its files, and the files that are opened for a job id."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from telemetry.store.partitions import MOST_IDS, Stray, of_ids
from telemetry.store.schema import JOBS
from telemetry.store.store import ClusterStore, Store


def test_another_schema_version_is_refused_with_a_word(store: Store) -> None:
    (store.root / "store.json").write_text('{"schema_version": 999}')
    with pytest.raises(SchemaVersionError, match="schema version 999"):
        Store.open(store.root)


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store here"):
        Store.open(tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"no store\.json"):
        Store.create(tmp_path)


def plant(store: Store) -> dict[str, str]:
    """Strays among the files of the jobs of cluster c; by path below the table's folder, what is wrong with each."""
    table = store.root / "jobs"
    good = table / "cluster=c" / "date=1970-01-01"
    for name in ("cluster=c/date=2026-13-45", "cluster=c/lost+found", "cluster=bad name", "cluster=c/date=garbage"):
        (table / name).mkdir()
        (table / name / "0000.parquet").write_bytes(b"")
    for name in ("README", "cluster=d", "cluster=c/date=1970-02-02"):
        (table / name).write_text("mine")
    for name in ("0000.parquet~", "1.parquet", "9999.parquet", ".nfs000123", "0000.parquet.bak", ".0000.parquet.swp"):
        (good / name).write_bytes(b"")
    (good / "1200.parquet").mkdir()
    (good / "1300.parquet").symlink_to("1300.parquet")
    (table / "cluster=c" / "date=1970-03-03").symlink_to("date=1970-03-03")
    (good / ".tmp-folder").mkdir()
    (good / os.fsdecode(b"\xff.parquet")).write_bytes(b"")
    names = dict.fromkeys(("0000.parquet~", "1.parquet", "9999.parquet", "0000.parquet.bak"), "not HHMM.parquet")
    names[os.fsdecode(b"\xff.parquet")] = "not HHMM.parquet"
    days = dict.fromkeys(("date=2026-13-45", "lost+found", "date=garbage"), "not date=YYYY-MM-DD")
    return {
        **{f"cluster=c/date=1970-01-01/{name}": f"its name is {fault}" for name, fault in names.items()},
        **{f"cluster=c/{name}": f"its name is {fault}" for name, fault in days.items()},
        "cluster=c/date=1970-01-01/1200.parquet": "not a regular file",
        "cluster=c/date=1970-01-01/1300.parquet": "a link that leads nowhere: Too many levels of symbolic links",
        "cluster=c/date=1970-03-03": "a link that leads nowhere: Too many levels of symbolic links",
        "cluster=c/date=1970-02-02": "not a folder",
        "README": "its name is not cluster=NAME",
        "cluster=bad name": "its name is not cluster=NAME",
        "cluster=d": "not a folder",
    }


def test_strays_are_passed_over_and_each_is_named_once(tmp_path: Path) -> None:
    told: list[Stray] = []
    store = Store.create(tmp_path / "store", on_strays=told.extend)
    store.of("c").write("jobs", pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]}))
    expected = plant(store)
    for more in (3, 4):
        assert store.clusters() == ["c"]
        store.of("c").write("jobs", pa.table({"job_id": [more], "submit_s": [more * 10]}))
        assert store.of("c").read("jobs")["job_id"].to_pylist() == [1, *range(3, more + 1), 2]
    assert {str(one.path.relative_to(store.root / "jobs")): one.reason for one in told} == expected
    assert len(told) == len(expected)


def test_a_stray_in_the_place_of_a_file_or_a_folder_is_named_by_the_write(tmp_path: Path) -> None:
    named: list[Stray] = []
    store = Store.create(tmp_path / "store", on_strays=named.extend)
    (store.root / "jobs" / "cluster=c" / "date=1970-01-01" / "0000.parquet").mkdir(parents=True)
    (store.root / "jobs" / "cluster=c" / "date=1970-01-02").write_text("mine")
    first, second = (pa.table({"job_id": [1], "submit_s": [submit_s]}) for submit_s in (10, 90_000))
    assert store.of("c").write("jobs", first).left_out == 1
    assert [(one.path.parent.name, one.reason) for one in named] == [("date=1970-01-01", "not a regular file")]
    with pytest.raises(StoreError, match="1970-01-02"):
        store.of("c").write("jobs", second)
    assert (store.root / "jobs" / "cluster=c" / "date=1970-01-02").read_text() == "mine"


def test_without_a_listener_strays_are_warnings(store: Store) -> None:
    (store.root / "jobs").mkdir()
    (store.root / "jobs" / "README").write_text("mine")
    with pytest.warns(UserWarning, match="README is skipped: its name is not cluster=NAME"):
        assert store.clusters() == []


def test_a_disk_of_its_own_can_be_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert Store.create(tmp_path).clusters() == []


DAY_S = 86_400


def ids(*values: int | None) -> pa.Array[pa.Int64Scalar]:
    return pa.array(values, pa.int64())


@pytest.fixture
def three_days(tmp_path: Path) -> ClusterStore:
    """Jobs 10 to 13 on the first day, 20 to 23 on the second, and an array 31 of tasks 32 and 33 on the third."""
    three_days = Store.create(tmp_path / "s").of("c")
    rows = [{"job_id": 10 * day + n, "submit_s": day * DAY_S} for day in (1, 2) for n in range(4)]
    rows += [{"job_id": n, "submit_s": 3 * DAY_S, "array_job_id": 31} for n in (32, 33)]
    three_days.write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    return three_days


@pytest.mark.parametrize(
    ("column", "wanted", "days"),
    [("job_id", [11], [1]), ("job_id", [13, 20], [1, 2]), ("job_id", [15], []), ("job_id", [], []),
     ("job_id", [None], []), ("array_job_id", [31], [3]), ("array_job_id", [11], [])],
)  # fmt: skip
def test_only_files_that_can_hold_an_id_are_read(
    three_days: ClusterStore, column: str, wanted: list[int | None], days: list[int]
) -> None:
    files = three_days.files("jobs")
    chosen = of_ids(files, {column: ids(*wanted)})
    assert chosen == [files[day - 1] for day in days]
    whole = three_days.read("jobs", ["job_id", "submit_s", "array_job_id"])
    expected = [row for row in whole.to_pylist() if row[column] in wanted and row[column] is not None]
    found = three_days.read("jobs", whole.schema.names, among={column: ids(*wanted)})
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


def test_a_damaged_file_is_still_named(three_days: ClusterStore) -> None:
    three_days.files("jobs")[0].write_bytes(b"damaged")
    with pytest.warns(DamageWarning, match="left out: no whole Parquet file"):
        three_days.read("jobs", ["job_id"], among={"job_id": ids(22)})


def test_a_file_that_is_replaced_is_looked_at_again(three_days: ClusterStore) -> None:
    assert three_days.read("jobs", ["job_id"], among={"job_id": ids(15)}).num_rows == 0
    three_days.write("jobs", pa.table({"job_id": ids(15), "submit_s": ids(DAY_S)}))
    assert three_days.read("jobs", ["job_id"], among={"job_id": ids(15)}).num_rows == 1


def test_files_without_statistics_or_of_many_ids_all_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"job_id": ids(1, 2)}), path, write_statistics=False)
    assert of_ids([path], {"job_id": ids(9)}) == [path]
    pq.write_table(pa.table({"name": ["x"]}), path)
    assert of_ids([path], {"job_id": ids(9)}) == [path]
    pq.write_table(pa.table({"job_id": ids(1, 2)}), path)
    assert of_ids([path], {"job_id": ids(*range(100, 100 + MOST_IDS))}) == []
    assert of_ids([path], {"job_id": ids(*range(100, 101 + MOST_IDS))}) == [path]
