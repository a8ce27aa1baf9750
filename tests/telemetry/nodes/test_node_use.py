"""Sleep, wake-ups and short minutes from the counts of power runs: hand-computed, with holes, and never invented."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.nodes.counts import NodeCounts, append_counts
from telemetry.nodes.use import HOLD_S, NodeCount, load_node_use, node_use
from telemetry.slurm.node_sets import LiveDemand
from telemetry.store.store import Store

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
