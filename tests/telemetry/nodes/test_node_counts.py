"""Counts of power runs in the store, and the series that they and accounting make together."""

from __future__ import annotations

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
from almanac.errors import DamageWarning
from telemetry.nodes.counts import append_counts, demand_series, read_counts
from telemetry.nodes.demand import SILENCE_S, known_span
from telemetry.nodes.series import MISSING, read_node_series
from telemetry.slurm.node_sets import LiveDemand
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_790_000_040
"""A full minute."""
SET = NodeSet("gpu", nodes="n[1-3]")
NAMES = ("n1", "n2", "n3")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


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


def test_names_with_odd_characters_are_values_and_no_sql(store: Store) -> None:
    for name in ("o'set", 'a"b', "x; DROP TABLE jobs", "ä", ""):
        append_counts(store.of("lab"), name, T0, LiveDemand(1, 1, 0, 0))
        assert len(read_counts(store.of("lab"), name, T0, T0 + 60)) == 1


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
