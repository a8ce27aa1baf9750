"""Days stay open until a later summary is stored, and an unchanged file is not read again while its rows are there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_site import rows_of
from profiles import examples

from almanac.errors import BusyError, SourceError, StoreError
from almanac.records import Counts
from telemetry.ingest import IngestResult, SourceSpan, ingest, ingest_all
from telemetry.sources import files
from telemetry.sources.files import FileSource
from telemetry.sources.source import RowBatch
from telemetry.store import progress, writing
from telemetry.store.progress import MOST_RUNS, Marks, Stale, StaleRun
from telemetry.store.store import ClusterStore, Store
from telemetry.store.writing import WriteResult

DAY_MS = 86_400_000


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(tmp_path, "c", nullcontext)


def test_a_day_is_open_until_it_is_closed(marks: Marks) -> None:
    assert marks.stale().days == {}
    marks.reopen([20_000, 20_002, 20_000])
    assert sorted(marks.stale().days) == [20_000, 20_002]
    marks.close(Stale(days={20_000: marks.stale().days[20_000]}))
    assert sorted(marks.stale().days) == [20_002]


def test_a_day_that_changed_while_it_was_summarised_stays_open(marks: Marks) -> None:
    marks.reopen([1, 2])
    seen = marks.stale()
    marks.reopen([2, 3])
    marks.close(seen)
    assert sorted(marks.stale().days) == [2, 3]


def test_clusters_have_days_of_their_own(marks: Marks) -> None:
    marks.reopen([1])
    assert Marks(marks.root, "b", nullcontext).stale() == Stale()


def test_the_file_can_be_read_by_a_person(marks: Marks, tmp_path: Path) -> None:
    marks.reopen([20_000])
    content = json.loads((tmp_path / "watermarks/open-days.c.json").read_text())
    assert content.pop("sum")
    assert content == {"last": 1, "days": {"2024-10-04": 1}}
    marks.reopen([StaleRun(7, "n[1-2]", 20_000, 20_002)])
    runs = [[2, 7, "n[1-2]", "2024-10-04", "2024-10-06"]]
    assert json.loads((tmp_path / "watermarks/open-days.c.json").read_text())["runs"] == runs


HOSTILE = "n1\n'; DROP TABLE jobs; -- \udcff\x1b[2J"


def test_a_stale_run_is_read_back_whatever_its_node_list_holds(marks: Marks) -> None:
    run = StaleRun(2**62, HOSTILE, 0, 2_932_896)
    marks.reopen([run])
    assert marks.stale().runs == {run: 1}


def test_stale_runs_make_their_days_stale_if_they_are_too_many(marks: Marks) -> None:
    marks.reopen([StaleRun(number, "n1", 5, 7) for number in range(MOST_RUNS)])
    seen = marks.stale()
    assert (len(seen.runs), seen.days, sorted(seen.all_days())) == (MOST_RUNS, {}, [5, 6])
    marks.reopen([StaleRun(MOST_RUNS, "n1", 9, 10)])
    marks.close(seen)
    assert (marks.stale().runs, sorted(marks.stale().days)) == ({}, [5, 6, 9])


RUNS = [StaleRun(7, "n1", 0, 2), StaleRun(7, "n2", 0, 2)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "look", "close"]), st.sets(st.sampled_from([0, 1, *RUNS]))), max_size=12
)


@given(STEPS)
def test_no_order_of_openings_and_summaries_loses_a_day(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    """changed: days and runs that no summary has seen as they are."""
    marks = Marks(tmp_path_factory.mktemp("m"), "c", nullcontext)
    changed: set[int | StaleRun] = set()
    looking: tuple[Stale, set[int | StaleRun]] = (Stale(), set())
    for step, days in steps:
        if step == "open":
            marks.reopen(days)
            changed |= days
            looking[1].difference_update(days)
        elif step == "look":
            looking = (marks.stale(), set(changed))
        else:
            marks.close(looking[0])
            changed -= looking[1]
        assert changed <= {*marks.stale().days, *marks.stale().runs}
    marks.close(marks.stale())
    assert marks.stale().all_days() == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"last": 1}', '{"last": 1, "days": {"never": 1}}', '{"days": 3}',
     '{"last": 1, "days": {}, "runs": [[1, 2]]}'],
)  # fmt: skip
def test_a_damaged_mark_says_what_to_do(marks: Marks, tmp_path: Path, content: str) -> None:
    (tmp_path / "watermarks").mkdir()
    (tmp_path / "watermarks/open-days.c.json").write_text(content)
    with pytest.raises(StoreError, match="not a watermark") as caught:
        marks.stale()
    assert "summarize -S 1970-01-01" in caught.value.hint


LOOK = """
import sys
from pathlib import Path
from typing import Any
from telemetry.store.store import Store

sys.stdin.readline()
print("looking", flush=True)
store = Store.open(Path(sys.argv[1])).of("c")
print(len(store.stale().days), len(store.files("telemetry")))
"""


def test_what_is_open_is_looked_at_when_no_writer_is_between_opening_and_changing(tmp_path: Path) -> None:
    """Else a summary could see a day as open, read its old file, and close it when the new one is in place."""
    store = Store.create(tmp_path / "store")
    rows = pa.table({"host": ["n"], "gpu": pa.array([0], pa.int16()), "mig": [""], "time_ms": [5 * DAY_MS]})
    reader = subprocess.Popen(
        [sys.executable, "-c", LOOK, str(store.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said: list[str] = []

    def opens(start_s: int) -> list[int]:
        reader.stdin.write("\n")
        reader.stdin.flush()
        said.append(reader.stdout.readline())
        return [5]

    store.of("c").write("telemetry", rows, opens)
    out, _ = reader.communicate(timeout=300)
    assert said == ["looking\n"]
    assert out == "1 1\n"


def test_two_summaries_of_a_cluster_do_not_run_at_once(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    with (
        store.of("c").summarizing(),
        pytest.raises(BusyError, match="is computing the job metrics"),
        store.of("c").summarizing(),
    ):
        pass
    with store.of("c").summarizing(), store.of("other").summarizing():
        pass


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
    source = FileSource(path, "telemetry", layout, clock=lambda: 10_000)
    [result] = ingest_all(store, [SourceSpan(source, *EVER)]).values()
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


def test_an_hour_that_another_program_wrote_is_imported_again(store: ClusterStore, path: Path) -> None:
    hour = store.root / "telemetry/cluster=c/date=1970-01-01/0000.parquet"
    load(store, path, CORRECTED)
    other = hour.read_bytes()
    load(store, path, FIRST)
    hour.write_bytes(other)
    assert load(store, path).written == {"telemetry": WriteResult(unchanged=1, replaced=1)}
    assert power(store) == [5.0, 6.0]


def test_rows_of_other_hosts_leave_an_import_as_it_is_and_more_rows_do_not(
    store: ClusterStore, path: Path, tmp_path: Path
) -> None:
    load(store, path)
    load(store, tmp_path / "other.csv", OTHER_HOST)
    assert load(store, path).is_skipped and load(store, tmp_path / "other.csv").is_skipped
    assert load(store, path, FIRST + "n1,0,2000,5\n").written == {"telemetry": WriteResult(added=1, unchanged=2)}


def test_other_rules_read_it_again(store: ClusterStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(store, path)
    monkeypatch.setattr(files, "_code_hash", lambda: "other")
    assert not load(store, path).is_skipped


def test_layout_and_span_are_part_of_the_key(path: Path) -> None:
    path.write_text("host,gpu,time_ms,timestamp,metric,value\nn1,0,1000,1,power_w,5\n")
    cases = ((None, EVER), ("almanac", EVER), ("long", EVER), ("long", (0, 2**40)), ("long", (0, 3600)))
    assert len({FileSource(path, "telemetry", layout).key(*span) for layout, span in cases}) == 4


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
    monkeypatch.setattr(progress, "_MOST_IMPORTS", 2)
    contents = [f"{HEADER}\nn{number},0,1000,5\n" for number in range(3)]
    for content in contents:
        load(store, path, content)
    assert [load(store, path, content).is_skipped for content in reversed(contents)] == [True, True, False]


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
    full = (("n1", 0, "", hour * 3_600_000, value) for hour, value in values)
    return rows_of("telemetry", "host gpu mig time_ms power_w", full)


FILES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2, None])), min_size=1, max_size=3).map(tuple)
KINDS = ["import", "import", "import", "write between", "break off", "write", "remove"]
IMPORTED_STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 1)), min_size=4, max_size=10
)


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
@given(st.tuples(FILES, FILES), IMPORTED_STEPS, st.sampled_from([1, 2, 100]))
def test_a_store_is_the_same_with_and_without_skipping(
    tmp_path_factory: pytest.TempPathFactory, pool: Sequence[Values], steps: list[tuple[str, int, int]], most: int
) -> None:
    root = tmp_path_factory.mktemp("s")
    skipping, reading = Store.create(root / "skipping").of("c"), Store.create(root / "reading").of("c")
    with pytest.MonkeyPatch.context() as patch, skipping.connect() as db:
        # One connection for all writes: another each time is slow.
        for each in (skipping, reading):
            patch.setattr(each, "connect", lambda: contextlib.nullcontext(db))
        patch.setattr(writing, "_MOST_ROWS", most)
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
