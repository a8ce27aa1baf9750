"""If samples have the same host, GPU, instance, and time, the greatest values count, in any order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from telemetry.store.cluster_store import ClusterStore
from telemetry.store.merge import WriteResult
from telemetry.store.store import Store

START_MS = 1_700_000_000_000 // 3_600_000 * 3_600_000
Row = tuple[str, int, int, float | None]
CONFLICTS: list[Row] = [
    ("n1", 0, 0, 5.0), ("n1", 0, 0, 3.0), ("n1", 0, 0, None), ("n1", 0, 0, float("nan")), ("n1", 0, 10, 1.0),
    ("n2", 1, 0, 4.0), ("n2", 1, 0, 6.0), ("n2", 1, 3600, 2.0), ("n2", 1, 3600, 2.5), ("n1", 0, 20, None),
]  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterStore:
    return Store.create(tmp_path / "store").of("c")


def samples(rows: list[Row]) -> pa.Table:
    """Telemetry rows of (host, gpu, seconds after START_MS, hbm_used_mib)."""
    return pa.table(
        {
            "host": [row[0] for row in rows],
            "gpu": pa.array([row[1] for row in rows], pa.int16()),
            "mig": [""] * len(rows),
            "time_ms": [START_MS + row[2] * 1000 for row in rows],
            "uuid": [f"GPU-{row[3]}" for row in rows],
            "hbm_used_mib": pa.array([row[3] for row in rows], pa.float32()),
        }
    )


def used(cluster: ClusterStore) -> list[float | None]:
    found: list[float | None] = cluster.read("telemetry")["hbm_used_mib"].to_pylist()
    return found


def test_duplicates_within_one_write_count_once(cluster: ClusterStore) -> None:
    given_rows = samples([("n1", 0, 0, 1.0), ("n1", 0, 0, 2.0), ("n1", 0, 0, None), ("n1", 0, 0, 1.5)])
    assert cluster.write("telemetry", given_rows) == WriteResult(added=1)
    assert used(cluster) == [2.0]


def test_the_last_of_job_records_given_twice_counts(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [7, 7], "submit_s": [1, 1], "state": ["RUNNING", "COMPLETED"]}))
    assert cluster.read("jobs")["state"].to_pylist() == ["COMPLETED"]


def test_a_later_write_corrects_a_sample(cluster: ClusterStore) -> None:
    cluster.write("telemetry", samples([("n1", 0, 0, 9.0)]))
    assert cluster.write("telemetry", samples([("n1", 0, 0, 2.0)])) == WriteResult(replaced=1)
    assert used(cluster) == [2.0]


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


def test_a_sample_that_is_twice_in_a_file_of_another_program_keeps_its_greatest_value(cluster: ClusterStore) -> None:
    cluster.write("telemetry", samples([("n1", 0, 0, 5.0)]))
    [path] = cluster.files("telemetry")
    pq.write_table(
        pa.concat_tables([cluster.read("telemetry"), samples([("n1", 0, 0, 3.0)])], promote_options="default"), path
    )
    assert cluster.write("telemetry", samples([("n1", 0, 10, 1.0)])) == WriteResult(added=1)
    assert used(cluster) == [5.0, 1.0]


def test_a_value_that_is_no_number_is_not_a_change(cluster: ClusterStore) -> None:
    nan = [("n1", 0, 0, float("nan")), ("n1", 0, 10, 1.0)]
    cluster.write("telemetry", samples(nan))
    assert cluster.write("telemetry", samples([*nan, ("n1", 0, 20, 2.0)])) == WriteResult(added=1, unchanged=2)
