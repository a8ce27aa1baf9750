"""The paper's Algorithm 1, by hand."""

from __future__ import annotations

import math

import pytest

from advisor.memory.allocator import (
    AllocatorWatch,
    Iteration,
    fit_line,
    predicted_peak_mib,
)  # fmt: skip


def test_a_line_by_hand() -> None:
    """(1, 1), (2, 3), (3, 2): 1 + 0.5 i; residuals -0.5, 1, -0.5: sigma = sqrt(1.5 / 1)."""
    line = fit_line(1, [1.0, 3.0, 2.0])
    assert (line.intercept, line.slope, line.sigma) == pytest.approx((1.0, 0.5, math.sqrt(1.5)))


def test_growing_requests_with_steady_reuse() -> None:
    """1000 + 100 i requested, a quarter of it held: at 50 that is 6000 / 4 + 450."""
    iterations = [Iteration(1000 + 100 * i, (1000 + 100 * i) / 4) for i in range(1, 7)]
    assert predicted_peak_mib(iterations, 50) == pytest.approx(1500 + 450)


def test_reuse_that_improves_lowers_the_peak() -> None:
    """The inverse ratio is 2 + 0.1 i: at 20 it is 4, and 1000 + 20 x 50 = 2000 requested."""
    iterations = [Iteration(1000 + 50 * i, (1000 + 50 * i) / (2 + 0.1 * i)) for i in range(1, 6)]
    assert predicted_peak_mib(iterations, 20) == pytest.approx(2000 / 4 + 450)


def test_noise_adds_z_standard_deviations() -> None:
    iterations = [Iteration(value, value) for value in (100.0, 300.0, 200.0)]
    assert predicted_peak_mib(iterations, 3) == pytest.approx(250 + 2.3263 * math.sqrt(15000) + 450, rel=1e-4)


def test_the_reuse_line_below_one_counts_as_no_reuse() -> None:
    iterations = [Iteration(1000.0, 1000.0 / ratio) for ratio in (3.0, 2.0, 1.0)]
    assert predicted_peak_mib(iterations, 30) == pytest.approx(1000 + 450)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_unusable_values_predict_nothing(bad: float) -> None:
    good = [Iteration(100.0, 50.0)] * 5
    assert predicted_peak_mib([*good, Iteration(bad, 50.0)], 9) is None
    assert predicted_peak_mib([*good, Iteration(100.0, bad)], 9) is None
    assert predicted_peak_mib(good, bad) is None
    assert predicted_peak_mib(good[:2], 9) is None
    watch = AllocatorWatch(bad)
    assert not any(watch.observe(Iteration(1e6 * i, 1e6 * i), 30) for i in range(1, 15))


def test_five_in_a_row() -> None:
    """Above the capacity from the first prediction on, the fourth iteration; one that is unusable starts again."""
    steep = [Iteration(1e4 * i, 1e4 * i) for i in range(1, 12)]
    watch = AllocatorWatch(2000.0)
    found = [watch.observe(each, 30) for each in steep]
    assert found.index(True) == 8
    watch = AllocatorWatch(2000.0)
    found = [watch.observe(each, 30) for each in [*steep[:7], Iteration(math.nan, 1.0), *steep[8:]]]
    assert not any(found)


def test_a_familys_peak_holds_a_restart_back() -> None:
    watches = [AllocatorWatch(2000.0, peak) for peak in (None, 1900.0, 2100.0, math.nan)]
    found = [[watch.observe(Iteration(200.0 * i, 100.0 * i), 30) for i in range(1, 15)] for watch in watches]
    assert [each[11:] for each in found] == [[True] * 3, [False] * 3, [True] * 3, [True] * 3]


def test_the_guarded_watch_waits_for_80_percent() -> None:
    """Held and context: 450 + 100 i of 2000: 80% at i = 11.5; at 30 it would be 3450."""
    watch = AllocatorWatch(2000.0)
    found = [watch.observe(Iteration(200.0 * i, 100.0 * i), 30) for i in range(1, 15)]
    assert found.index(True) == 11
    assert not any(AllocatorWatch(2000.0).observe(Iteration(200.0 * i, 100.0 * i), None) for i in range(1, 15))
