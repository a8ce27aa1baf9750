"""Damaged files of the store are named and left out; what native readers cannot take never reaches them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.errors import DamageWarning
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.merge import WriteResult
from telemetry.store.store import Store


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterStore:
    return Store.create(tmp_path / "store").of("c")


def test_a_damaged_file_is_named_and_left_out(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]}))
    path = cluster.files("jobs")[0]
    path.write_bytes(b"not parquet")
    with pytest.warns(DamageWarning, match=f"{path} is left out"):
        assert cluster.read("jobs")["job_id"].to_pylist() == [2]
    assert cluster.damaged_files(["jobs"]) == [path]
    assert cluster.damaged_files(["telemetry"]) == []


def test_no_row_is_written_to_a_damaged_file_and_those_of_others_are(cluster: ClusterStore) -> None:
    rows = pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]})
    cluster.write("jobs", rows)
    path = cluster.files("jobs")[0]
    path.write_bytes(b"not parquet")
    more = pa.table({"job_id": [3, 4], "submit_s": [11, 100_001]})
    with pytest.warns(DamageWarning):
        assert cluster.write("jobs", more) == WriteResult(added=1, left_out=1)
    assert cluster.replace("jobs", rows.slice(0, 0), rows) == 1
    assert path.read_bytes() == b"not parquet"
    assert cluster.read("jobs")["job_id"].to_pylist() == [4]


def test_a_file_that_ends_its_native_reader_is_tried_once_in_another_process(
    cluster: ClusterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.write("jobs", pa.table({"job_id": [1, 2], "submit_s": [10, 100_000]}))
    path = cluster.files("jobs")[0]
    pq.write_table(pa.table({"job_id": [1], "submit_s": [10]}), path)
    kill = "telemetry.store.probe._PROGRAM"
    monkeypatch.setattr(kill, "import os, sys; sys.stdin.read(); os.abort()")
    again = Store.open(cluster.root).of(cluster.cluster)
    with pytest.warns(DamageWarning, match="damaged: SIGABRT ended the process that tried to read it"):
        assert again.read("jobs")["job_id"].to_pylist() == [2]
    monkeypatch.setattr(kill, "raise SystemExit('not tried again')")
    with pytest.warns(DamageWarning, match="SIGABRT"):
        Store.open(cluster.root).of(cluster.cluster).files("jobs")


@pytest.mark.parametrize("program", ["os.kill(os.getpid(), 9)", "sys.exit('no memory')", "print('{', flush=True)"])
def test_a_trial_that_says_nothing_of_the_file_is_repeated(
    cluster: ClusterStore, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    cluster.write("jobs", pa.table({"job_id": [1], "submit_s": [10]}))
    path = cluster.files("jobs")[0]
    pq.write_table(pq.read_table(path, partitioning=None), path)
    with monkeypatch.context() as patched:
        patched.setattr("telemetry.store.probe._PROGRAM", f"import os, sys; sys.stdin.read(); {program}")
        with pytest.warns(DamageWarning, match="not tried"):
            assert Store.open(cluster.root).of(cluster.cluster).files("jobs") == []
    assert Store.open(cluster.root).of(cluster.cluster).files("jobs") == [path]


def test_a_whole_file_without_a_seal_is_read(cluster: ClusterStore) -> None:
    cluster.write("jobs", pa.table({"job_id": [1], "submit_s": [10]}))
    path = cluster.files("jobs")[0]
    pq.write_table(pq.read_table(path, partitioning=None), path)
    assert cluster.read("jobs")["job_id"].to_pylist() == [1]
