"""Growth of a running job's memory, and Algorithm 1 of the paper by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.memory import restart as growth
from advisor.memory.restart import (
    LAWS,
    MOST_POINTS,
    AllocatorWatch,
    ExpectedEnd,
    GrowthWatch,
    Iteration,
    fit,
    fit_line,
    predicted_peak_mib,
)

KNOWN = ExpectedEnd(predicted_s=1000.0)


def outlooks(watch: GrowthWatch, samples: Iterable[tuple[float, float | None]]) -> list[float | None]:
    return [watch.observe(at, used) for at, used in samples]


def line(start: float, slope: float, until: int = 400) -> list[tuple[float, float | None]]:
    return [(float(at), start + slope * at) for at in range(until)]


def test_a_line_is_restarted_at_80_percent_and_its_end_is_foreseen() -> None:
    """500 + 0.9 t reaches 800 at 333.4 s and 1000 at 555.6 s."""
    watch = GrowthWatch(1000.0, KNOWN)
    found = outlooks(watch, line(500, 0.9))
    first = next(at for at, full_s in enumerate(found) if full_s is not None)
    assert first == pytest.approx(334, abs=2)
    assert found[first] == pytest.approx(555.6, abs=3)
    assert found[-1] is not None


@pytest.mark.parametrize(
    "samples",
    [
        line(500, 0.48, 1000),  # at 980 after 1000 s
        line(930, 0),  # preallocated
        [(float(at), 300 + 620 * -math.expm1(-at / 150)) for at in range(1000)],
        [(float(at), 500.0 if at < 300 else 850.0) for at in range(600)],
        [(float(at), 400 + 5.0 * (at % 100)) for at in range(1000)],
    ],
    ids=["ends below the capacity", "flat", "saturates", "one step", "sawtooth"],
)
def test_what_does_not_grow_beyond_the_capacity_is_left_alone(samples: list[tuple[float, float | None]]) -> None:
    assert not any(outlooks(GrowthWatch(1000.0, KNOWN), samples))


def test_a_slope_is_that_of_least_squares() -> None:
    """Through (1, 1), (2, 3), (3, 2): slope 0.5, squared error 1.5, and a standard error of sqrt(1.5 / 1 / 2)."""
    found = fit(LAWS[0], [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)], 0.0)
    assert found == (pytest.approx(1.5), pytest.approx(0.5))
    assert fit(LAWS[0], [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)], 1.0)[1] == pytest.approx(0.5 - math.sqrt(0.75))


def test_each_law_is_inverted() -> None:
    for grown, reached in LAWS:
        assert [reached(grown(share)) for share in (0.6, 1.0, 1.7)] == pytest.approx([0.6, 1.0, 1.7])


@pytest.mark.parametrize(
    ("capacity", "run_time"),
    [(None, KNOWN), (math.nan, KNOWN), (0.0, KNOWN), (-5.0, KNOWN), (math.inf, KNOWN), (1000.0, ExpectedEnd()),
     (1000.0, ExpectedEnd(limit_s=math.inf)), (1000.0, ExpectedEnd(predicted_s=math.nan))],
)  # fmt: skip
def test_without_a_capacity_or_an_end_nothing_is_predicted(capacity: float | None, run_time: ExpectedEnd) -> None:
    assert not any(outlooks(GrowthWatch(capacity, run_time), line(500, 0.9, 1000)))


def test_samples_that_are_no_numbers_change_nothing() -> None:
    good, bad = GrowthWatch(1000.0, KNOWN), GrowthWatch(1000.0, KNOWN)
    for at, used in line(500, 0.9):
        for noise in (None, math.nan, math.inf, -1.0):
            bad.observe(at, noise)
        bad.observe(math.nan, 999.0)
        assert bad.observe(at, used) == good.observe(at, used)
        bad.observe(at - 1, 999.0)


@pytest.mark.parametrize(
    ("guard", "value"),
    [("USE_SHARE", 0.99), ("IN_A_ROW", 1000), ("LEAST_ELAPSED_SHARE", 0.9), ("LEAST_SAMPLES", 1000),
     ("LEAST_CHANCE", 1.1), ("MOST_JUMP_SHARE", 0.01)],
)  # fmt: skip
def test_each_guard_alone_holds_the_restart_back(guard: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, guard, value)  # without it, the same line is foreseen: see above
    assert not any(outlooks(GrowthWatch(1000.0, KNOWN), line(500, 0.9, 400)))


@pytest.mark.parametrize(("fallen_share", "is_held"), [(0.005, True), (0.1, False)])
def test_use_that_has_fallen_is_waited_for(fallen_share: float, is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "FALLEN_SHARE", fallen_share)
    watch = GrowthWatch(1000.0, KNOWN)
    outlooks(watch, line(500, 0.9, 336))
    assert (watch.observe(340.0, 790.0) is None) == is_held


def test_the_familys_completed_runs_hold_a_restart_back_until_this_run_exceeds_them() -> None:
    found = outlooks(GrowthWatch(1000.0, KNOWN, 900.0), line(500, 0.9, 550))
    first = next(at for at, full_s in enumerate(found) if full_s is not None)
    assert 500 + 0.9 * first > 900
    for peak_mib in (1100.0, math.nan):
        assert outlooks(GrowthWatch(1000.0, KNOWN, peak_mib), line(500, 0.9))[-1] is not None


def test_the_chance_of_reaching_a_time() -> None:
    assert KNOWN.chance_of_reaching(900, 100) == 1.0
    assert KNOWN.chance_of_reaching(1001, 100) == 0.0
    limit = ExpectedEnd(limit_s=1000.0)
    assert limit.chance_of_reaching(600, 200) == pytest.approx(0.5)
    assert limit.chance_of_reaching(1000, 200) == 0.0
    median = ExpectedEnd(1000.0, 0.5, 5000.0)
    assert median.chance_of_reaching(1000, 1e-6) == pytest.approx(0.5)
    assert ExpectedEnd(1000.0, 0.0, 5000.0).chance_of_reaching(3000, 2000) == pytest.approx(2 / 3)


@examples(0.3)
@given(
    st.lists(st.tuples(st.floats(allow_nan=True), st.one_of(st.none(), st.floats(allow_nan=True))), max_size=300),
    st.one_of(st.none(), st.floats(allow_nan=True)),
    st.one_of(st.none(), st.floats(allow_nan=True)),
)
def test_no_samples_raise(samples: list[tuple[float, float | None]], capacity: float | None, end: float | None) -> None:
    outlooks(GrowthWatch(capacity, ExpectedEnd(end, 0.5, end)), samples)


@examples(0.1)
@given(st.floats(0.001, 1000.0), st.integers(1, 60))
def test_units_of_memory_and_time_do_not_matter(scale: float, interval: int) -> None:
    plain = outlooks(GrowthWatch(1000.0, KNOWN), line(500, 0.9))
    scaled = outlooks(
        GrowthWatch(1000.0 * scale, ExpectedEnd(predicted_s=1000.0 * interval)),
        [(at * interval, (used or 0) * scale) for at, used in line(500, 0.9)],
    )
    where = [next(at for at, each in enumerate(found) if each is not None) for found in (plain, scaled)]
    assert abs(where[0] - where[1]) <= 2


def test_memory_is_bounded() -> None:
    watch = GrowthWatch(1000.0, KNOWN)
    outlooks(watch, ((at / 100, 500.0) for at in range(20_000)))
    assert len(watch._points) <= MOST_POINTS
    assert sum(point.samples for point in watch._points) == 20_000


def test_a_long_gap_in_the_samples_is_no_error() -> None:
    """The newer three quarters then lie in two of their ten blocks."""
    times = [index * 0.02 for index in range(32)] + [100 + index * 0.1 for index in range(88)]
    samples = [(at, 300 + 5.0 * index) for index, at in enumerate(times)]
    assert outlooks(GrowthWatch(1000, ExpectedEnd(predicted_s=200.0)), samples)[-1] is not None


def test_a_line_by_hand() -> None:
    """(1, 1), (2, 3), (3, 2): 1 + 0.5 i; residuals -0.5, 1, -0.5: sigma = sqrt(1.5 / 1)."""
    line = fit_line(1, [1.0, 3.0, 2.0])
    assert (line.intercept, line.slope, line.sigma) == pytest.approx((1.0, 0.5, math.sqrt(1.5)))


@pytest.mark.parametrize(
    ("iterations", "at", "expected"),
    [
        # 1000 + 100 i requested, a quarter of it held
        ([(1000 + 100 * i, (1000 + 100 * i) / 4) for i in range(1, 7)], 50, 6000 / 4 + 450),
        # reuse improves: the inverse ratio is 2 + 0.1 i, which is 4 at 20, and 1000 + 20 x 50 = 2000 requested
        ([(1000 + 50 * i, (1000 + 50 * i) / (2 + 0.1 * i)) for i in range(1, 6)], 20, 2000 / 4 + 450),
        # noise adds z standard deviations
        ([(value, value) for value in (100.0, 300.0, 200.0)], 3, 250 + 2.3263 * math.sqrt(15000) + 450),
        # a line of reuse below one counts as no reuse
        ([(1000.0, 1000.0 / ratio) for ratio in (3.0, 2.0, 1.0)], 30, 1000 + 450),
    ],
)
def test_peaks_by_hand(iterations: list[tuple[float, float]], at: int, expected: float) -> None:
    assert predicted_peak_mib([Iteration(*each) for each in iterations], at) == pytest.approx(expected, rel=1e-5)


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
