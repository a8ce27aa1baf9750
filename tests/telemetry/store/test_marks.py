"""Days stay open until a summary that began after their last change is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import BusyError, StoreError
from telemetry.store.marks import MOST_RUNS, Marks, Stale, StaleRun
from telemetry.store.store import Store

DAY_MS = 86_400_000


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(tmp_path)


def test_a_day_is_open_until_it_is_closed(marks: Marks) -> None:
    assert marks.stale("c").days == {}
    marks.reopen("c", [20_000, 20_002, 20_000])
    assert sorted(marks.stale("c").days) == [20_000, 20_002]
    marks.close("c", Stale(days={20_000: marks.stale("c").days[20_000]}))
    assert sorted(marks.stale("c").days) == [20_002]


def test_a_day_that_changed_while_it_was_summarised_stays_open(marks: Marks) -> None:
    marks.reopen("c", [1, 2])
    seen = marks.stale("c")
    marks.reopen("c", [2, 3])
    marks.close("c", seen)
    assert sorted(marks.stale("c").days) == [2, 3]


def test_a_day_that_was_closed_and_opened_again_is_not_closed_by_the_summary_before(marks: Marks) -> None:
    marks.reopen("c", [1])
    seen = marks.stale("c")
    marks.close("c", seen)
    marks.reopen("c", [1])
    marks.close("c", seen)
    assert sorted(marks.stale("c").days) == [1]


def test_clusters_have_days_of_their_own(marks: Marks) -> None:
    marks.reopen("a", [1])
    assert marks.stale("b") == Stale()


def test_the_file_can_be_read_by_a_person(marks: Marks, tmp_path: Path) -> None:
    marks.reopen("c", [20_000])
    content = json.loads((tmp_path / "open-days.c.json").read_text())
    assert content.pop("sum")
    assert content == {"last": 1, "days": {"2024-10-04": 1}}
    marks.reopen("c", [StaleRun(7, "n[1-2]", 20_000, 20_002)])
    runs = [[2, 7, "n[1-2]", "2024-10-04", "2024-10-06"]]
    assert json.loads((tmp_path / "open-days.c.json").read_text())["runs"] == runs


HOSTILE = "n1\n'; DROP TABLE jobs; -- \udcff\x1b[2J"


def test_a_stale_run_is_read_back_whatever_its_node_list_holds(marks: Marks) -> None:
    run = StaleRun(2**62, HOSTILE, 0, 2_932_896)
    marks.reopen("c", [run])
    assert marks.stale("c").runs == {run: 1}


def test_stale_runs_make_their_days_stale_if_they_are_too_many(marks: Marks) -> None:
    marks.reopen("c", [StaleRun(number, "n1", 5, 7) for number in range(MOST_RUNS)])
    seen = marks.stale("c")
    assert (len(seen.runs), seen.days, sorted(seen.all_days())) == (MOST_RUNS, {}, [5, 6])
    marks.reopen("c", [StaleRun(MOST_RUNS, "n1", 9, 10)])
    marks.close("c", seen)
    assert (marks.stale("c").runs, sorted(marks.stale("c").days)) == ({}, [5, 6, 9])


RUNS = [StaleRun(7, "n1", 0, 2), StaleRun(7, "n2", 0, 2)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "look", "close"]), st.sets(st.sampled_from([0, 1, *RUNS]))), max_size=12
)


@given(STEPS)
def test_no_order_of_openings_and_summaries_loses_a_day(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    """changed: days and runs that no summary has seen as they are."""
    marks = Marks(tmp_path_factory.mktemp("m"))
    changed: set[int | StaleRun] = set()
    looking: tuple[Stale, set[int | StaleRun]] = (Stale(), set())
    for step, days in steps:
        if step == "open":
            marks.reopen("c", days)
            changed |= days
            looking[1].difference_update(days)
        elif step == "look":
            looking = (marks.stale("c"), set(changed))
        else:
            marks.close("c", looking[0])
            changed -= looking[1]
        assert changed <= {*marks.stale("c").days, *marks.stale("c").runs}
    marks.close("c", marks.stale("c"))
    assert marks.stale("c").all_days() == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"last": 1}',
        '{"last": 1, "days": {"never": 1}}',
        '{"days": 3}',
        '{"last": 1, "days": {}, "runs": [[1, 2]]}',
    ],
)
def test_a_damaged_mark_says_what_to_do(marks: Marks, tmp_path: Path, content: str) -> None:
    (tmp_path / "open-days.c.json").write_text(content)
    with pytest.raises(StoreError, match="not a watermark") as caught:
        marks.stale("c")
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
    assert reader.stdin is not None and reader.stdout is not None
    said: list[str] = []

    def opens(start_s: int) -> list[int]:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
        said.append(reader.stdout.readline())
        return [5]

    store.of("c").write("telemetry", rows, opens)
    out, _ = reader.communicate(timeout=60)
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
