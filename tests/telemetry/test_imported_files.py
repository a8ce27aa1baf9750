"""An unchanged telemetry file is not read again while the store holds its rows, and the store is as if it had been."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.errors import FileFormatError, SourceError
from almanac.records import Counts
from telemetry.ingest import IngestResult, SourceSpan, ingest, ingest_all
from telemetry.sources import files
from telemetry.sources.base import RowBatch
from telemetry.sources.files import FileSource
from telemetry.store import imported_files, staging
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.folder import StoreFolder
from telemetry.store.merge import WriteResult
from telemetry.store.store import Store

EVER = (-(2**40), 2**40)
HEADER = "host,gpu,time_ms,power_w"
FIRST = f"{HEADER}\nn1,0,1000,5\nn1,0,3600000,6\nn1,1,1000,9999\n"
OTHER_HOST = f"{HEADER}\nn2,0,1000,7\nn2,0,7200000,8\n"
CORRECTED = f"{HEADER}\nn1,0,1000,4\n"
RECORD = "telemetry/cluster=c/.imported-files.json"


@pytest.fixture
def store(tmp_path: Path) -> ClusterStore:
    return Store.create(tmp_path / "store").of("c")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(FIRST)
    return path


def load(store: ClusterStore, path: Path, content: str | None = None, layout: str | None = None) -> IngestResult:
    if content is not None:
        path.write_text(content)
    [result] = ingest_all(
        store, [SourceSpan(FileSource(path, "telemetry", layout, clock=lambda: 10_000), *EVER)]
    ).values()
    assert result.error is None
    return result


def power(store: ClusterStore) -> list[float | None]:
    found: list[float | None] = store.read("telemetry")["power_w"].to_pylist()
    return found


def test_an_unchanged_file_is_not_read_again(store: ClusterStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(store, path)
    assert (first.is_skipped, first.written) == (False, {"telemetry": WriteResult(added=2)})
    monkeypatch.setattr(files, "read_blocks", None)
    again = load(store, path)
    assert (again.is_skipped, again.written) == (True, {"telemetry": WriteResult(unchanged=2)})
    assert (again.counts.seen, again.counts.kept, again.counts.dropped) == (3, 2, {"unit mismatch: power_w": 1})
    assert again.as_dict()["skipped"] is True


def test_a_copy_under_another_name_is_not_read(store: ClusterStore, path: Path, tmp_path: Path) -> None:
    load(store, path)
    assert load(store, tmp_path / "copy.csv", FIRST).is_skipped
    assert not load(store, tmp_path / "copy.txt", FIRST).is_skipped  # Arrow decompresses by the name's end


def test_an_hour_that_is_gone_is_imported_again(store: ClusterStore, path: Path) -> None:
    load(store, path)
    (store.root / "telemetry/cluster=c/date=1970-01-01/0100.parquet").unlink()
    assert load(store, path).written == {"telemetry": WriteResult(added=1, unchanged=1)}
    assert load(store, path).is_skipped


def test_an_hour_that_another_program_wrote_is_imported_again(store: ClusterStore, path: Path) -> None:
    hour = store.root / "telemetry/cluster=c/date=1970-01-01/0000.parquet"
    load(store, path, CORRECTED)
    other = hour.read_bytes()
    load(store, path, FIRST)
    hour.write_bytes(other)
    assert load(store, path).written == {"telemetry": WriteResult(unchanged=1, replaced=1)}
    assert power(store) == [5.0, 6.0]


def test_a_later_correction_is_undone_as_before(store: ClusterStore, path: Path, tmp_path: Path) -> None:
    load(store, path)
    load(store, tmp_path / "corrected.csv", CORRECTED)
    assert power(store) == [4.0, 6.0]
    assert load(store, path).written == {"telemetry": WriteResult(unchanged=1, replaced=1)}
    assert power(store) == [5.0, 6.0]
    assert not load(store, tmp_path / "corrected.csv").is_skipped


def test_rows_of_other_hosts_leave_an_import_as_it_is(store: ClusterStore, path: Path, tmp_path: Path) -> None:
    load(store, path)
    load(store, tmp_path / "other.csv", OTHER_HOST)
    assert load(store, path).is_skipped and load(store, tmp_path / "other.csv").is_skipped


def test_a_file_that_grew_is_read(store: ClusterStore, path: Path) -> None:
    load(store, path)
    assert load(store, path, FIRST + "n1,0,2000,5\n").written == {"telemetry": WriteResult(added=1, unchanged=2)}


def test_other_rules_read_it_again(store: ClusterStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(store, path)
    monkeypatch.setattr(files, "_code_hash", lambda: "other")
    assert not load(store, path).is_skipped


def test_layout_and_span_are_part_of_the_key(path: Path) -> None:
    path.write_text("host,gpu,time_ms,timestamp,metric,value\nn1,0,1000,1,power_w,5\n")
    keys = {
        FileSource(path, "telemetry").key(*EVER),
        FileSource(path, "telemetry", "almanac").key(*EVER),
        FileSource(path, "telemetry", "long").key(*EVER),
        FileSource(path, "telemetry", "long").key(0, 2**40),
        FileSource(path, "telemetry", "long").key(0, 3600),
    }
    assert len(keys) == 4


def test_rows_of_the_future_are_read_when_their_time_has_come(store: ClusterStore, path: Path) -> None:
    load(store, path, FIRST + "n1,0,20000000,3\n")
    source = FileSource(path, "telemetry", clock=lambda: 20_000)
    [result] = ingest_all(store, [SourceSpan(source, *EVER)]).values()
    assert result.written == {"telemetry": WriteResult(added=1, unchanged=2)}


def test_a_file_that_changes_while_it_is_read_is_read_again(
    store: ClusterStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = files.read_blocks

    def and_append(*given: Any) -> Iterator[pa.Table]:
        yield from read(*given)
        path.write_text(FIRST + "n1,0,2000,5\n")

    monkeypatch.setattr(files, "read_blocks", and_append)
    load(store, path)
    monkeypatch.undo()
    assert not load(store, path, FIRST).is_skipped


def test_an_import_that_breaks_off_does_not_count(store: ClusterStore) -> None:
    broken, whole = IngestResult("rows", *EVER), IngestResult("rows", *EVER)
    with pytest.raises(SourceError):
        ingest(Rows(((1, 5),), fault=NO_ANSWER), store, *EVER, broken, nothing)
    ingest(Rows(((1, 5),)), store, *EVER, whole, nothing)
    assert not whole.is_skipped and whole.written == {"telemetry": WriteResult(unchanged=1)}


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"states": {"0": 5}, "imports": {}}', '{"states": {}, "imports": {"k": {}}}', "\udc80"]
)
def test_a_damaged_record_reads_all_files_again(store: ClusterStore, path: Path, content: str) -> None:
    load(store, path)
    (store.root / RECORD).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert load(store, path).written == {"telemetry": WriteResult(unchanged=2)}
    assert load(store, path).is_skipped


def test_the_record_says_nothing_of_names_or_values(store: ClusterStore, path: Path) -> None:
    load(store, path)
    content = (store.root / RECORD).read_text()
    assert "t.csv" not in content and "n1" not in content and "9999" not in content
    assert (store.root / RECORD).stat().st_mode & 0o007 == 0


def test_only_the_newest_imports_are_kept(store: ClusterStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_files, "_MOST_IMPORTS", 2)
    contents = [f"{HEADER}\nn{number},0,1000,5\n" for number in range(3)]
    for content in contents:
        load(store, path, content)
    assert [load(store, path, content).is_skipped for content in reversed(contents)] == [True, True, False]


def test_a_missing_file_is_named(store: ClusterStore, tmp_path: Path) -> None:
    [result] = ingest_all(store, [SourceSpan(FileSource(tmp_path / "none.csv", "telemetry"), *EVER)]).values()
    assert isinstance(result.error, FileFormatError)


def nothing(rows: int, reached_s: int) -> None:
    """Show no progress."""


NO_ANSWER = SourceError("no answer", "wait")
Values = tuple[tuple[int, int | None], ...]
"""Hours and values, given in this order."""


@dataclass
class Rows:
    """A file of these rows, one row a batch. meanwhile: called once, after the first batch."""

    values: Values
    fault: SourceError | None = None
    meanwhile: Callable[[], object] | None = None
    name: str = "rows"
    is_last: bool = field(default=True)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        for number, value in enumerate(self.values):
            yield RowBatch("telemetry", table((value,)), Counts(1, 1))
            if number == 0 and self.meanwhile:
                self.meanwhile()
        if self.fault:
            raise self.fault

    def key(self, since_s: int, until_s: int) -> str:
        return hashlib.sha256(repr(self.values).encode()).hexdigest()

    def is_final(self) -> bool:
        return self.is_last


def table(values: Values) -> pa.Table:
    count = len(values)
    return pa.table(
        {
            "host": ["n1"] * count,
            "gpu": pa.array([0] * count, pa.int16()),
            "mig": [""] * count,
            "time_ms": [hour * 3_600_000 for hour, _ in values],
            "power_w": pa.array([value for _, value in values], pa.float32()),
        }
    )


FILES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2, None])), min_size=1, max_size=3).map(tuple)
KINDS = ["import", "import", "import", "write between", "break off", "write", "remove"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 1)), min_size=4, max_size=10)


def apply(store: ClusterStore, step: str, values: Values, others: Values) -> IngestResult:
    result = IngestResult("rows", *EVER)
    if step == "remove":
        for hour, _ in values:
            (store.root / f"telemetry/cluster=c/date=1970-01-01/{hour:02}00.parquet").unlink(missing_ok=True)
    elif step == "write":
        store.write("telemetry", table(values))
    else:
        fault = NO_ANSWER if step == "break off" else None
        meanwhile = (lambda: store.write("telemetry", table(others))) if step == "write between" else None
        with contextlib.suppress(SourceError):
            ingest(Rows(values, fault, meanwhile), store, *EVER, result, nothing)
    return result


@examples(0.2)
@given(st.tuples(FILES, FILES), STEPS, st.sampled_from([1, 2, 100]))
def test_a_store_is_the_same_with_and_without_skipping(
    tmp_path_factory: pytest.TempPathFactory, pool: Sequence[Values], steps: list[tuple[str, int, int]], most: int
) -> None:
    root = tmp_path_factory.mktemp("s")
    skipping, reading = Store.create(root / "skipping").of("c"), Store.create(root / "reading").of("c")
    with pytest.MonkeyPatch.context() as patch, skipping.connect() as db:
        # One connection for all writes: another each time is slow.
        patch.setattr(StoreFolder, "connect", lambda folder: contextlib.nullcontext(db))
        patch.setattr(staging, "_MOST_ROWS", most)
        patch.setattr(reading, "import_outcome", lambda key: None)
        for step, values, others in ((step, pool[first], pool[second]) for step, first, second in steps):
            # A write in the middle of a read that one store skips would not come at the same point in both.
            is_skipped = skipping.import_outcome(Rows(values).key(*EVER)) is not None
            step = "import" if is_skipped and step == "write between" else step
            one, other = (apply(store, step, values, others) for store in (skipping, reading))
            assert skipping.read("telemetry").equals(reading.read("telemetry"))
            assert one.is_skipped == (is_skipped and step in ("import", "break off"))
            if one.is_skipped and most == 100:
                assert one.written == other.written
