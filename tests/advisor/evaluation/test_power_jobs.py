"""Delayed jobs: by hand, and against a count over every second and minute."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from advisor.evaluation.power_jobs import JobDelays, Starts, delays_of, starts_of
from telemetry.nodes.runs import NodeRuns


def runs_of(spans: list[tuple[int, int, tuple[int, ...]]]) -> NodeRuns:
    spans = sorted(spans)
    return NodeRuns(
        np.array([one[0] for one in spans], dtype=np.int64), np.array([one[1] for one in spans], dtype=np.int64),
        np.arange(len(spans)), tuple(np.array(one[2], dtype=np.int32) for one in spans),
    )  # fmt: skip


def test_only_a_run_that_takes_a_node_can_be_delayed() -> None:
    runs = runs_of(
        [(0, 200, (0,)), (30, 90, (0,)), (65, 300, (0, 1)), (90, 95, (2,)), (200, 210, (0,)), (299, 320, (0,))]
    )
    found = starts_of(runs, 0, 300, np.ones(5, dtype=bool))
    assert found.all_jobs == 6
    assert list(zip(found.minute.tolist(), found.level.tolist(), strict=True)) == [(0, 1), (1, 2), (1, 3)]


def test_a_job_waits_until_enough_nodes_are_up_or_nobody_waits() -> None:
    demand, short = np.array([1, 4, 4, 4, 2, 2]), np.array([0, 3, 2, 0, 0, 1])
    starts = Starts(np.array([0, 1, 1, 1, 5]), np.array([1, 1, 2, 4, 2]), 9)
    assert delays_of(starts, demand, short) == JobDelays(9, 3, 4 / 3, 2), "the last one until the end of the span"
    assert delays_of(starts, demand, np.zeros(6, dtype=np.int64)) == JobDelays(9, 0, None, None)


def test_no_jobs() -> None:
    nothing = starts_of(runs_of([]), 0, 86400 * 2, np.ones(2880, dtype=bool))
    assert delays_of(nothing, np.zeros(2880, dtype=np.int64), np.zeros(2880, dtype=np.int64)) == JobDelays(
        0, 0, None, None
    )


def test_starts_in_unusable_minutes_do_not_count() -> None:
    found = starts_of(runs_of([(0, 50, (0,)), (61, 90, (0,))]), 0, 120, np.array([False, True]))
    assert (found.all_jobs, found.minute.tolist()) == (1, [1])


def test_a_day_has_no_seam() -> None:
    day = 86400
    runs = runs_of(
        [(day - 50, day, (0,)), (day, day + 50, (0,)), (day - 10, day + 90, (1,)), (day + 95, day + 99, (1,))]
    )
    found = starts_of(runs, 0, 2 * day, np.ones(2880, dtype=bool))
    assert found.minute.tolist() == [1439, 1439, 1441], "a node that passes from run to run stays up"


_SPANS = st.lists(
    st.tuples(
        st.integers(-100, 500), st.integers(1, 300), st.lists(st.integers(0, 4), max_size=3, unique=True).map(tuple)
    ).map(lambda one: (one[0], one[0] + one[1], one[2])),
    max_size=10, unique_by=lambda one: one[0],
)  # fmt: skip


@given(_SPANS)
def test_starts_against_a_count_by_second(spans: list[tuple[int, int, tuple[int, ...]]]) -> None:
    expected = []
    for begin, _, nodes in sorted(spans):
        if 0 <= begin < 480:
            used_before = {n for b, u, ns in spans for n in ns if b < begin <= u}
            used_after = {n for b, u, ns in spans for n in ns if b <= begin < u}
            if set(nodes) - used_before:
                expected.append((begin // 60, len(used_after)))
    found = starts_of(runs_of(spans), 0, 480, np.ones(8, dtype=bool))
    assert list(zip(found.minute.tolist(), found.level.tolist(), strict=True)) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=9),
)
def test_delays_against_a_walk_by_minute(minutes: list[tuple[int, int]], jobs: list[tuple[int, int]]) -> None:
    demand = np.array([max(one) for one in minutes])
    short = np.array([min(one[1], max(one)) for one in minutes])
    jobs = sorted((minute % len(minutes), level) for minute, level in jobs)
    waits = []
    for minute, level in jobs:
        waited = 0
        while minute + waited < len(minutes):
            now = minute + waited
            if short[now] == 0 or demand[now] - short[now] >= level:
                break
            waited += 1
        waits.append(waited)
    late = [one for one in waits if one]
    starts = Starts(np.array([m for m, _ in jobs], dtype=np.int64), np.array([n for _, n in jobs], dtype=np.int64), 9)
    found = delays_of(starts, demand, short)
    assert (found.delayed, found.longest_min) == (len(late), max(late, default=None))
    assert found.mean_min is None or abs(found.mean_min - sum(late) / len(late)) < 1e-9
