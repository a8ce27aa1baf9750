"""Files of a store that cannot be read are named; whole ones are not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.store.check import check_files
from telemetry.store.damage import fault_in_process, faults
from telemetry.store.store import Store

HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Six hours of telemetry, a file each, of two clusters."""
    store = Store.create(tmp_path / "store")
    rows = {"host": ["n1"] * 3, "gpu": [0] * 3, "mig": [""] * 3, "time_ms": [HOUR_MS * n for n in range(3)]}
    for cluster in ("a", "b"):
        store.of(cluster).write("telemetry", pa.table(rows))
    return store


def test_a_whole_store(store: Store) -> None:
    found = check_files(store)
    assert (found.files, found.damaged) == (6, ())


def test_an_empty_store(tmp_path: Path) -> None:
    assert check_files(Store.create(tmp_path / "store")).files == 0


def test_damaged_files_are_named_with_the_reason(store: Store) -> None:
    empty, cut, other, junk = store.of("a").files("telemetry") + store.of("b").files("telemetry")[:1]
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


def test_half_written_files_disturb_nothing_and_strays_are_named(store: Store) -> None:
    folder = store.of("a").files("telemetry")[0].parent
    (folder / ".tmp-123").write_bytes(b"half")
    (folder / ".tmp-1.parquet").write_bytes(b"half")
    (folder / "copy of 0000.parquet").write_bytes(b"")
    (folder / "2500.parquet").write_bytes(b"")
    found = check_files(store)
    assert (found.files, found.damaged) == (6, ())
    assert [one.path.name for one in found.strays] == ["2500.parquet", "copy of 0000.parquet"]


def flipped(content: bytes, seed: int, number: int) -> Iterator[bytes]:
    """The content with one bit flipped, at so many random places."""
    at = random.Random(seed)
    for _ in range(number):
        other = bytearray(content)
        other[at.randrange(len(other))] ^= 1 << at.randrange(8)
        yield bytes(other)


def test_every_flipped_bit_is_seen_or_changes_nothing(store: Store) -> None:
    rng = np.random.default_rng(1)
    rows = {"job_id": np.arange(600), "submit_s": rng.integers(0, 86_400, 600), "gpu_count": rng.integers(0, 9, 600)}
    store.of("a").write("jobs", pa.table({**rows, "name": [f"train-{number}" for number in range(600)]}))
    [path] = store.of("a").files("jobs")
    whole = path.read_bytes()
    for content in flipped(whole, 3, 200):
        path.write_bytes(content)
        assert faults([path], {path})


def test_a_column_that_is_none_of_the_tables_is_damage(store: Store) -> None:
    path = store.of("a").files("telemetry")[0]
    rows = pq.read_table(path, partitioning=None)
    pq.write_table(rows.rename_columns([name.replace("uuid", "tuid") for name in rows.column_names]), path)
    assert fault_in_process(path, "footer") == "it has unknown columns in place of the table's: tuid"


def test_a_column_that_a_later_almanac_added_is_no_damage(store: Store) -> None:
    before = store.of("a").read("telemetry")
    path = store.of("a").files("telemetry")[0]
    rows = pq.read_table(path, partitioning=None)
    pq.write_table(rows.append_column("new_counter", pa.nulls(rows.num_rows, pa.float32())), path)
    assert fault_in_process(path, "pages") == ""
    assert check_files(store).damaged == ()
    assert store.of("a").read("telemetry").equals(before)


def test_all_pages_are_read_of_the_newest_files_or_of_all(store: Store) -> None:
    files = store.of("a").files("telemetry") + store.of("b").files("telemetry")
    for path in files[:1] + files[-1:]:  # the oldest of a, the newest of b
        content = bytearray(path.read_bytes())
        chunk = pq.read_metadata(path).row_group(0).column(3)
        content[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(content)
    everything = check_files(store, None)
    assert [one.path for one in everything.damaged] == files[:1] + files[-1:]
    assert everything.read == 6
