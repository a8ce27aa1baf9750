"""Splits of a global batch."""

import pytest
from batch_shares import next_weights, split_batch
from hypothesis import given
from hypothesis import strategies as st

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def test_known_splits() -> None:
    assert split_batch(32, [1, 7, 24]) == [1, 7, 24]
    assert split_batch(10, [1, 1, 1]) == [4, 3, 3]
    assert split_batch(32, [1, 1, 1000]) == [1, 1, 30]
    assert split_batch(32, [1, 3], [None, 16]) == [16, 16]
    assert split_batch(2, [1, 3, 2]) == [0, 1, 1]


def test_caps_that_hold_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="raise a cap"):
        split_batch(32, [1, 1], [8, 8])


@given(WEIGHTS, st.integers(0, 500), st.data())
def test_sum_floor_and_caps(weights: list[float], extra: int, data: st.DataObject) -> None:
    total = len(weights) + extra
    caps = data.draw(st.lists(st.none() | st.integers(1, 600), min_size=len(weights), max_size=len(weights)))
    if sum(total if cap is None else cap for cap in caps) < total:
        caps = [None] * len(weights)
    sizes = split_batch(total, weights, caps)
    assert sum(sizes) == total and min(sizes) >= 1
    assert all(cap is None or size <= cap for size, cap in zip(sizes, caps, strict=True))


def test_half_of_the_way() -> None:
    assert next_weights([16, 16], [0.1, 0.3]) == pytest.approx([20, 12])
    assert next_weights([16, 16], [0.1, None]) == [16, 16]
