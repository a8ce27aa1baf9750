"""Nodes per minute: counts of power runs, series of them, of accounting, and of files, and the use of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.actions_config import NodeSet
from almanac.errors import DamageWarning, FileFormatError
from slurm.node_sets import LiveDemand
from telemetry.power.demand import (
    HOLD_S,
    SILENCE_S,
    NodeCount,
    NodeCounts,
    append_counts,
    demand_series,
    known_span,
    load_node_use,
    node_use,
    read_counts,
)
from telemetry.power.series import MISSING, OUTAGE, TOTAL_CHANGED, find_outages, find_total_jumps, read_node_series
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_790_000_040
"""A full minute."""
SET = NodeSet("gpu", nodes="n[1-3]")
NAMES = ("n1", "n2", "n3")


def fill(store: Store, *runs: tuple[int, int | None, str], mark: int = 3600) -> None:
    """Runs of (start, end, node list), seconds after T0."""
    rows: list[dict[str, Any]] = [
        {
            "job_id": number, "submit_s": T0 + start, "start_s": T0 + start, "end_s": None if end is None else T0 + end,
            "node_list": nodes, "node_count": 1, "cpu_count": 1,
        }
        for number, (start, end, nodes) in enumerate([(-9000, -8000, "n9"), *runs])
    ]  # fmt: skip
    store.of("lab").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    store.of("lab").set_watermark("sacct", T0 + mark)


def test_counts_are_kept_once_a_minute_and_by_node_set(store: Store) -> None:
    append_counts(store.of("lab"), "gpu", T0 + 5, LiveDemand(3, 1, 0, 2))
    append_counts(store.of("lab"), "gpu", T0 + 59, LiveDemand(3, 2, 1, 0))
    append_counts(store.of("lab"), "gpu", T0 + 600, LiveDemand(2, 2, 0, 0))
    append_counts(store.of("lab"), "cpu", T0 + 600, LiveDemand(9, 9, 9, 9))
    append_counts(store.of("other"), "gpu", T0 + 600, LiveDemand(8, 8, 8, 8))
    found = read_counts(store.of("lab"), "gpu", T0, T0 + 601)
    assert [found.time_s.tolist(), found.active.tolist()] == [[T0, T0 + 600], [2, 2]]
    assert [found.total.tolist(), found.wanted.tolist(), found.asleep.tolist()] == [[3, 2], [1, 0], [0, 0]]
    assert len(read_counts(store.of("lab"), "gpu", T0 + 1, T0 + 600)) == 0
    assert len(read_counts(store.of("lab"), "nosuch", 0, 2**40)) == 0


def test_the_queue_that_power_runs_saw_wins_and_accounting_fills_in(store: Store) -> None:
    fill(store, (0, None, "n1"), mark=3600)
    rows: list[dict[str, Any]] = [
        {"job_id": number, "submit_s": T0 + 60 * number, "node_count": 1, "cpu_count": 1, "time_limit_s": 600}
        for number in (1, 2)
    ]
    rows.append({"job_id": 7, "submit_s": T0 - 5000, "start_s": T0 - 5000, "end_s": T0 - 4640, "node_list": "n8"})
    store.of("lab").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    before = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 1800).queued
    assert before is not None and before[:4].tolist() == [0, 10, 20, 20], "at most the time limit"
    for minute, queued in ((2, 55.5), (3, None), (4, float("nan")), (5, float("inf")), (6, -3.0), (7, 0.0)):
        append_counts(store.of("lab"), "gpu", T0 + 60 * minute, LiveDemand(3, 1, 2, 0, queued))
    found = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 1800)
    assert found.queued is not None and found.queued[:9].tolist() == [0, 10, 55.5, 20, 20, 20, 20, 0, 0]
    assert found.wanted[2:9].tolist() == [2] * 7, "a count without a queue counts all the same"


def test_an_empty_store_gives_a_series_of_missing_minutes(store: Store) -> None:
    found = demand_series(store.of("lab"), SET, NAMES, T0 + 1, T0 + 119)
    assert len(found) == 2 and np.isnan(found.active).all()
    assert found.marks == {MISSING: 2} and not found.is_usable.any()
    assert found.total.tolist() == [3, 3]


def test_live_counts_fill_what_is_not_ingested_yet_and_no_more(store: Store) -> None:
    fill(store, (0, None, "n1"), mark=120)
    append_counts(store.of("lab"), "gpu", T0 + 60, LiveDemand(3, 3, 1, 0))
    append_counts(store.of("lab"), "gpu", T0 + 240, LiveDemand(3, 2, 1, 1))
    found = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 1800)
    assert found.active[:5].tolist() == [1, 1, 3, 3, 2], "accounting counts where it is complete"
    assert found.active[4:24].tolist() == [2] * 20
    assert np.isnan(found.active[24:]).all() and found.marks == {MISSING: 6}
    assert found.wanted[:5].tolist() == [0, 1, 1, 1, 1]


def test_the_total_follows_the_counts_for_a_day(store: Store) -> None:
    fill(store, (0, None, "n[1-2]"), mark=3 * 86400)
    append_counts(store.of("lab"), "gpu", T0 + 120, LiveDemand(2, 2, 0, 0))
    append_counts(store.of("lab"), "gpu", T0 + 180, LiveDemand(1, 1, 0, 0))
    found = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 2 * 86400)
    assert found.total[:5].tolist() == [3, 3, 2, 2, 2], "at least as many as accounting saw in use"
    assert found.total[1 + 2 + 1440 :].tolist() == [3] * (2880 - 1443)
    assert (found.active == 2).all()


def test_a_set_without_a_node_that_can_serve_has_missing_minutes(store: Store) -> None:
    fill(store, mark=600)
    append_counts(store.of("lab"), "gpu", T0 + 120, LiveDemand(0, 0, 0, 0))
    found = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 300)
    assert np.isnan(found.active).tolist() == [False, False, True, True, True]


def test_a_week_without_any_job_is_lost_accounting(store: Store) -> None:
    day = 86400
    fill(store, (0, day, "n1"), (day + SILENCE_S + 60, 10 * day, "n8"), (2 * day, 2 * day + 60, "n7"), mark=30 * day)
    found = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 30 * day)
    minutes = np.flatnonzero(np.isnan(found.active))
    assert minutes[[0, -1]].tolist() == [10 * 1440, 30 * 1440 - 1], "a shorter silence is idleness"
    append_counts(store.of("lab"), "gpu", T0 + 20 * day, LiveDemand(3, 0, 0, 3))
    again = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 30 * day)
    assert again.active[20 * 1440] == 0, "a power run saw that it was idleness"


def test_the_span_that_is_known(store: Store) -> None:
    assert known_span(store.of("lab")) == (0, 0)
    fill(store, (0, 60, "n1"), mark=500)
    assert known_span(store.of("lab")) == (T0 - 8000, T0 + 500)


@examples(0.2)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_runs_give_the_series_that_their_counts_give_as_a_file(
    tmp_path_factory: pytest.TempPathFactory, active: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("both")
    store = Store.create(folder / "store")
    busy: list[tuple[int, int]] = []
    runs: list[tuple[int, int | None, str]] = []
    for minute, number in enumerate(active):
        while len(busy) > number:
            node, begin = busy.pop(0)
            runs.append((begin, minute * 60, f"n{node}"))
        while len(busy) < number:
            busy.append((next(n for n in (1, 2, 3) if n not in {one[0] for one in busy}), minute * 60))
    fill(store, *runs, *((begin, None, f"n{node}") for node, begin in busy), mark=60 * len(active))
    times = np.datetime64(T0, "s") + np.arange(len(active)).astype("timedelta64[m]")
    pd.DataFrame({"time": times, "active": active, "total": 3}).to_csv(folder / "set.csv", index=False)
    of_file = read_node_series(folder / "set.csv")
    of_store = demand_series(store.of("lab"), SET, NAMES, T0, T0 + 60 * len(active))
    assert of_store.active.tolist() == of_file.active.tolist() == active
    assert (of_store.total.tolist(), of_store.start) == (of_file.total.tolist(), of_file.start)
    assert of_store.marks == of_file.marks


def test_sets_that_overlap_count_a_shared_node_in_each(store: Store) -> None:
    fill(store, (0, 600, "n[1-3]"))
    for names, nodes in ((("n1", "n2"), 2), (("n2", "n3", "n4"), 2), (("n4",), 0)):
        found = demand_series(store.of("lab"), NodeSet("x", nodes=",".join(names)), names, T0, T0 + 600)
        assert found.active.tolist() == [nodes] * 10


def test_counts_that_cannot_be_are_left_out(store: Store) -> None:
    for minute, demand in enumerate(
        [(3, 4, 0, 0), (-1, -1, 0, 0), (2**60, 1, 0, 0), (3, 1, 9, 0), (3, 1, 0, -2), (3, 1, 2, 2)]
    ):
        append_counts(store.of("lab"), "gpu", T0 + 60 * minute, LiveDemand(*demand))
    assert read_counts(store.of("lab"), "gpu", T0, T0 + 600).time_s.tolist() == [T0 + 300]


def test_a_damaged_file_is_named(store: Store) -> None:
    fill(store, (0, 60, "n1"))
    append_counts(store.of("lab"), "gpu", T0, LiveDemand(3, 1, 0, 0))
    [path] = store.of("lab").files("node_counts")
    path.write_bytes(b"PAR1 junk PAR1")
    with pytest.warns(DamageWarning, match=path.name):
        demand_series(store.of("lab"), SET, NAMES, T0, T0 + 600)


NOW_S = 1_795_003_200
HOUR_S, DAY_S = 3600, 86_400
Row = tuple[int, int, int, int, int]


def counts(*rows: Row) -> NodeCounts:
    """Rows of minute, total, active, wanted, asleep."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return NodeCounts(table[:, 0] * 60, *table[:, 1:].T, queued_node_min=np.full(len(table), np.nan))


def test_an_hour_by_hand() -> None:
    found = node_use(
        counts((0, 10, 4, 0, 3), (10, 10, 6, 2, 3), (20, 10, 9, 0, 1), (30, 10, 9, 0, 1), (40, 9, 9, 0, 0)), (0, HOUR_S)
    )
    assert found.known_s == HOUR_S
    assert found.coverage == 1
    assert found.total_hours == pytest.approx((40 * 10 + 20 * 9) / 60)
    assert found.active_hours == pytest.approx((10 * 4 + 10 * 6 + 40 * 9) / 60)
    assert found.asleep_hours == pytest.approx((20 * 3 + 20 * 1) / 60)
    assert found.wake_times_s == (1200,), "at minute 40 the sleeper left the set: no wake-up"
    assert found.short_min == 10, "at minute 10 two nodes were wanted, and one was idle"
    assert found.newest == NodeCount(2400, 9, 9, 0, 0)


def test_a_count_stands_for_20_minutes_and_after_that_nothing_is_known() -> None:
    found = node_use(counts((0, 10, 1, 0, 5), (60, 10, 8, 0, 2), (70, 10, 8, 0, 2)), (0, 2 * HOUR_S))
    assert HOLD_S == 1200
    assert found.known_s == 50 * 60
    assert found.coverage == pytest.approx(50 / 120)
    assert found.asleep_hours == pytest.approx((20 * 5 + 30 * 2) / 60)
    assert found.wake_times_s == (), "when in the hour without counts the nodes woke is not known, nor how often"


def test_counts_outside_the_span_do_not_count() -> None:
    every = counts(*((minute, 10, 5, 0, 5) for minute in range(0, 240, 10)))
    found = node_use(every, (HOUR_S, 2 * HOUR_S))
    assert (found.known_s, found.asleep_hours) == (HOUR_S, 5)
    assert node_use(every, (10 * HOUR_S, 11 * HOUR_S)).known_s == 0
    nothing = node_use(counts(), (0, 0))
    assert (nothing.coverage, nothing.newest, nothing.known_days) == (0, None, 0)


def test_a_queue_that_no_sleeping_node_would_help_is_no_shortage() -> None:
    assert node_use(counts((0, 10, 10, 7, 0)), (0, 600)).short_min == 0
    assert node_use(counts((0, 10, 5, 3, 2)), (0, 600)).short_min == 0
    assert node_use(counts((0, 10, 5, 4, 2)), (0, 600)).short_min == 10


@st.composite
def histories(draw: st.DrawFn) -> tuple[NodeCounts, int]:
    minutes = sorted(draw(st.sets(st.integers(0, 600), max_size=40)))
    rows = []
    for minute in minutes:
        total = draw(st.integers(0, 20))
        active = draw(st.integers(0, total))
        rows.append((minute, total, active, draw(st.integers(0, 40)), draw(st.integers(0, total - active))))
    return counts(*rows), draw(st.integers(0, 700)) * 60


@given(histories())
def test_parts_add_up_to_the_whole_and_nothing_exceeds_it(history: tuple[NodeCounts, int]) -> None:
    every, border_s = history
    whole = node_use(every, (0, 700 * 60))
    assert 0 <= whole.known_s <= whole.span_s
    assert whole.asleep_hours + whole.active_hours <= whole.total_hours + 1e-9
    assert whole.total_hours <= 20 * whole.known_s / 3600 + 1e-9
    assert 0 <= whole.short_min <= whole.known_s / 60
    assert len(whole.wake_times_s) < max(len(every), 1)
    border_s = min(border_s, 700 * 60)
    parts = [node_use(every, span) for span in ((0, border_s), (border_s, 700 * 60))]
    assert sum(part.known_s for part in parts) <= whole.known_s, "a count says nothing of the next span"
    assert sum(len(part.wake_times_s) for part in parts) in (len(whole.wake_times_s), len(whole.wake_times_s) - 1)


def test_the_store_has_each_set_apart_also_one_that_is_configured_no_more(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    assert load_node_use(store.of("c"), (0, NOW_S)) == {}
    for minute in range(0, 60, 10):
        append_counts(store.of("c"), "a100", NOW_S + minute * 60, LiveDemand(8, 2, 0, 4))
        append_counts(store.of("c"), "old, gone", NOW_S + minute * 60 + 5, LiveDemand(3, 0, 0, 3))
        append_counts(store.of("other"), "a100", NOW_S + minute * 60, LiveDemand(99, 0, 0, 99))
    append_counts(store.of("c"), "a100", NOW_S + 3 * DAY_S, LiveDemand(8, 2, 0, 4))
    found = load_node_use(store.of("c"), (NOW_S, NOW_S + HOUR_S))
    assert {name: (use.known_s, use.asleep_hours) for name, use in found.items()} == {
        "a100": (HOUR_S, 4), "old, gone": (HOUR_S, 3),
    }  # fmt: skip


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_gap_is_held_for_ten_minutes_and_then_missing(tmp_path: Path) -> None:
    path = written(tmp_path / "n.csv", "time,active,total\n2026-01-01 00:00,3,8\n2026-01-01 00:30,4,8\n")
    series = read_node_series(path)
    assert len(series) == 31
    assert series.active[:10].tolist() == [3.0] * 10
    assert np.isnan(series.active[10:30]).all()
    assert series.marks == {MISSING: 20}
    assert not series.is_usable[10] and series.is_usable[30]


def test_bad_rows_are_counted_by_name_and_good_ones_kept(tmp_path: Path) -> None:
    rows = ["2026-01-01 00:00,3,8", "soon,3,8", "2026-01-01 00:01,,8", "2026-01-01 00:02,-1,8", "2026-01-01 00:03,9,8",
            "2026-01-01 00:00,5,8"]  # fmt: skip
    series = read_node_series(written(tmp_path / "n.csv", "\n".join(["time,active,total", *rows])))
    assert series.active.tolist() == [5.0]
    assert series.counts.seen == 6 and series.counts.kept == 1
    assert sum(series.counts.dropped.values()) == 5
    assert len(series.counts.dropped) == 5


def test_the_highest_of_a_minute_counts_and_gpus_become_whole_nodes(tmp_path: Path) -> None:
    frame = pd.DataFrame({
        "time": pd.to_datetime(["2026-01-01 00:00:00", "2026-01-01 00:00:30"] * 2), "vc": ["a", "a", "b", "b"],
        "running_gpu_num": [8, 9, 0, 0], "total_gpu_num": [32] * 4, "pending_gpu_num": [1, 0, 0, 0],
    })  # fmt: skip
    frame.to_parquet(tmp_path / "g.parquet")
    series = read_node_series(tmp_path / "g.parquet", "a")
    assert (series.active.tolist(), series.total.tolist(), series.wanted.tolist()) == ([2.0], [4.0], [1.0])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("n.txt", "", "ends in"), ("n.csv", "", "cannot be read"), ("n.parquet", "no", "cannot be read"),
     ("n.csv", "time,busy\n2026-01-01,3\n", "has columns"), ("n.csv", "active,total\n1,3\n", "no column time"),
     ("n.csv", "time,active,total\nx,1,3\n", "none of the 1 rows"),
     ("n.csv", "time,active,total\n1970-01-01,1,3\n2026-01-01,1,3\n", "spans"),
     ("n.csv", "time,vc,active,total\n2026-01-01,a,1,3\n2026-01-01,b,1,3\n", "2 virtual clusters")],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(FileFormatError, match=said) as caught:
        read_node_series(written(tmp_path / name, text))
    assert caught.value.exit_code == 5
    assert caught.value.hint


def test_a_drop_to_zero_that_comes_back_is_an_outage_and_one_that_stays_is_not() -> None:
    active = np.full(5000, 300.0)
    active[2000:2300] = 2.0
    active[2300:2310] = 120.0
    assert np.flatnonzero(find_outages(active)).tolist() == list(range(2000, 2310))
    active[2000:] = 0.0
    assert not find_outages(active).any()
    small = np.full(5000, 8.0)
    small[2000:2300] = 0.0
    assert not find_outages(small).any(), "a small set may be empty"


def test_a_total_that_jumps_and_returns_is_marked_and_a_lasting_change_is_not() -> None:
    total = np.full(20_000, 420.0)
    total[3000:4000] = 552.0
    total[9000:] = 500.0
    assert np.flatnonzero(find_total_jumps(total)).tolist() == list(range(3000, 4000))


def test_a_file_may_tell_of_the_queue(tmp_path: Path) -> None:
    rows = ["time,active,total,queued_node_min", "60,1,2,5", "120,1,2,-1", "180,1,2,x", "240,1,2,inf", "300,1,2,7.5"]
    queued = read_node_series(written(tmp_path / "with.csv", "\n".join(rows))).queued
    assert queued is not None and queued.tolist() == [5, 5, 5, 5, 7.5], "held, as the other values are"
    assert read_node_series(written(tmp_path / "without.csv", "time,active,total\n60,1,2\n")).queued is None


def test_the_glitches_of_philly_are_found(trace: Callable[[str], Path]) -> None:
    series = read_node_series(trace("philly_nodes_1min_to_nov.parquet"))
    assert set(series.marks) == {MISSING, OUTAGE, TOTAL_CHANGED}
    times = series.times()[~series.is_usable]
    days = {str(day) for day in times.astype("datetime64[D]")}
    assert days == {"2017-10-25", "2017-10-26", "2017-11-01", "2017-11-02", "2017-11-05"}


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nodes.csv")
    with pytest.raises(FileFormatError, match=r"nodes\.csv is not a regular file"):
        read_node_series(tmp_path / "nodes.csv")
