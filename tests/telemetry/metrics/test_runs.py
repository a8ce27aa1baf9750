"""Reductions over runs are what plain loops give."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics.runs import RowRuns, ragged

VALUE = st.one_of(st.just(np.nan), st.integers(-50, 50).map(float))
KEYED = st.lists(st.tuples(st.integers(0, 3), VALUE, st.booleans()), max_size=30)


def split(keys: list[int], values: list[Any]) -> list[list[Any]]:
    """Neighbors of equal keys."""
    parts: list[list[Any]] = []
    for place, value in enumerate(values):
        if place and keys[place] == keys[place - 1]:
            parts[-1].append(value)
        else:
            parts.append([value])
    return parts


@given(KEYED)
def test_reductions(rows: list[tuple[int, float, bool]]) -> None:
    keys, values, flags = ([row[place] for row in rows] for place in range(3))
    runs = RowRuns.of(np.array(keys, int))
    parts, flagged = split(keys, values), split(keys, flags)
    known = [[value for value in part if value == value] for part in parts]
    array, flag = np.array(values, np.float32), np.array(flags, bool)
    assert runs.lengths.tolist() == [len(part) for part in parts]
    np.testing.assert_array_equal(runs.sum(array), [sum(part) for part in parts])
    np.testing.assert_array_equal(runs.sum(flag), [sum(part) for part in flagged])
    np.testing.assert_array_equal(runs.max(array), [max(part, default=np.nan) for part in known])
    np.testing.assert_array_equal(runs.min(array), [min(part, default=np.nan) for part in known])
    np.testing.assert_array_equal(runs.first(array), [part[0] for part in parts])
    np.testing.assert_array_equal(runs.last(array), [part[-1] for part in parts])
    places, kept = runs.where(flag)
    assert places.tolist() == [place for place, part in enumerate(flagged) if any(part)]
    assert kept.lengths.tolist() == [sum(part) for part in flagged if any(part)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=6))
def test_ragged_numbers_count_up_from_the_first_of_each_run(given: list[tuple[int, int]]) -> None:
    runs = RowRuns.of_lengths(np.array([length for _, length in given], int))
    found = ragged(np.array([first for first, _ in given], int), runs)
    assert found.tolist() == [first + step for first, length in given for step in range(length)]
    assert runs.spread(np.arange(len(given))).tolist() == [
        n for n, (_, length) in enumerate(given) for _ in range(length)
    ]


def test_sums_of_small_types_do_not_overflow() -> None:
    runs = RowRuns.of(np.zeros(300, int))
    assert runs.sum(np.full(300, 100, np.int8)).tolist() == [30_000]
    assert runs.sum(np.full(300, 3e38, np.float32)).tolist() == [300 * float(np.float32(3e38))]
