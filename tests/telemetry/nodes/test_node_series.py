"""Reading nodes per minute: what is kept, what is counted, and which minutes are not to be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from almanac.errors import FileFormatError
from telemetry.nodes.series import (
    MISSING,
    OUTAGE,
    TOTAL_CHANGED,
    find_outages,
    find_total_jumps,
    read_node_series,
)


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
    [
        ("n.txt", "", "ends in"),
        ("n.csv", "", "cannot be read"),
        ("n.parquet", "no", "cannot be read"),
        ("n.csv", "time,busy\n2026-01-01,3\n", "has columns"),
        ("n.csv", "active,total\n1,3\n", "no column time"),
        ("n.csv", "time,active,total\nx,1,3\n", "none of the 1 rows"),
        ("n.csv", "time,active,total\n1970-01-01,1,3\n2026-01-01,1,3\n", "spans"),
        ("n.csv", "time,vc,active,total\n2026-01-01,a,1,3\n2026-01-01,b,1,3\n", "2 virtual clusters"),
    ],
)
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


def test_a_small_set_may_be_empty() -> None:
    active = np.full(5000, 8.0)
    active[2000:2300] = 0.0
    assert not find_outages(active).any()


def test_a_total_that_jumps_and_returns_is_marked_and_a_lasting_change_is_not() -> None:
    total = np.full(20_000, 420.0)
    total[3000:4000] = 552.0
    total[9000:] = 500.0
    assert np.flatnonzero(find_total_jumps(total)).tolist() == list(range(3000, 4000))


def test_a_file_may_tell_of_the_queue(tmp_path: Path) -> None:
    head, rows = (
        "time,active,total,queued_node_min\n",
        ["60,1,2,5", "120,1,2,-1", "180,1,2,x", "240,1,2,inf", "300,1,2,7.5"],
    )
    (tmp_path / "with.csv").write_text(head + "\n".join(rows))
    queued = read_node_series(tmp_path / "with.csv").queued
    assert queued is not None and queued.tolist() == [5, 5, 5, 5, 7.5], "held, as the other values are"
    (tmp_path / "without.csv").write_text("time,active,total\n60,1,2\n")
    assert read_node_series(tmp_path / "without.csv").queued is None


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
