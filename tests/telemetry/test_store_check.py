"""Files of a store that cannot be read are named; whole ones are not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.store import Store
from telemetry.store_check import check_files

HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Six hours of telemetry, a file each, of two clusters."""
    store = Store.create(tmp_path / "store")
    rows = {"host": ["n1"] * 3, "gpu": [0] * 3, "mig": [""] * 3, "time_ms": [HOUR_MS * n for n in range(3)]}
    for cluster in ("a", "b"):
        store.write("telemetry", cluster, pa.table(rows))
    return store


def test_a_whole_store(store: Store) -> None:
    found = check_files(store)
    assert (found.files, found.damaged) == (6, ())


def test_an_empty_store(tmp_path: Path) -> None:
    assert check_files(Store.create(tmp_path / "store")).files == 0


def test_damaged_files_are_named_with_the_reason(store: Store) -> None:
    empty, cut, other, junk = store.files("telemetry", "a") + store.files("telemetry", "b")[:1]
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-9])
    pq.write_table(pa.table({"host": ["n1"], "mig": [""]}), other)
    junk.write_bytes(b"PAR1" + b"\xff" * 200 + (100).to_bytes(4, "little") + b"PAR1")
    found = check_files(store)
    assert found.files == 6
    reasons = {one.path: one.reason for one in found.damaged}
    assert list(reasons) == sorted([empty, cut, other, junk])
    assert reasons[empty] == reasons[cut] == "no whole Parquet file"
    assert reasons[other] == "it lacks the columns gpu, time_ms"
    assert reasons[junk]


def test_a_name_that_is_no_time_and_half_written_files_disturb_nothing(store: Store) -> None:
    folder = store.files("telemetry", "a")[0].parent
    (folder / ".tmp-123").write_bytes(b"half")
    (folder / ".tmp-1.parquet").write_bytes(b"half")
    (folder / "copy of 0000.parquet").write_bytes(b"")
    assert [one.path.name for one in check_files(store).damaged] == ["copy of 0000.parquet"]
