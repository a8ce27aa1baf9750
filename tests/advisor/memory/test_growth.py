"""The memory predictor on samples alone: hand-computed cases, guards, and properties."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.memory import growth
from advisor.memory.growth import LAWS, MOST_POINTS, GrowthWatch, Law, RunTime, fit

KNOWN = RunTime(predicted_s=1000.0)


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


def test_a_line_that_ends_below_the_capacity_is_left_alone() -> None:
    """500 + 0.48 t is at 980 after 1000 s."""
    found = outlooks(GrowthWatch(1000.0, KNOWN), line(500, 0.48, 1000))
    assert not any(found)


def test_a_slope_is_that_of_least_squares() -> None:
    """Through (1, 1), (2, 3), (3, 2): slope 0.5, squared error 1.5, and a standard error of sqrt(1.5 / 1 / 2)."""
    found = fit(LAWS[0], [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)], 0.0)
    assert found == (pytest.approx(1.5), pytest.approx(0.5))
    assert fit(LAWS[0], [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)], 1.0)[1] == pytest.approx(0.5 - math.sqrt(0.75))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("share", [0.6, 1.0, 1.7])
def test_each_law_is_inverted(law: Law, share: float) -> None:
    grown, reached = law
    assert reached(grown(share)) == pytest.approx(share)


def test_saturating_memory_that_stays_below_fits() -> None:
    samples = [(float(at), 300 + 620 * -math.expm1(-at / 150)) for at in range(1000)]
    found = outlooks(GrowthWatch(1000.0, KNOWN), samples)
    assert not any(found)


def test_one_step_is_not_growth_and_preallocation_is_flat() -> None:
    step = [(float(at), 500.0 if at < 300 else 850.0) for at in range(600)]
    found = outlooks(GrowthWatch(1000.0, KNOWN), step)
    assert not any(found)
    assert not any(outlooks(GrowthWatch(1000.0, KNOWN), line(930, 0)))


def test_a_sawtooth_is_not_growth() -> None:
    samples = [(float(at), 400 + 5.0 * (at % 100)) for at in range(1000)]
    assert not any(outlooks(GrowthWatch(1000.0, KNOWN), samples))


@pytest.mark.parametrize("capacity", [None, math.nan, 0.0, -5.0, math.inf])
def test_without_a_capacity_nothing_is_predicted(capacity: float | None) -> None:
    found = outlooks(GrowthWatch(capacity, KNOWN), line(500, 0.9, 1000))
    assert not any(found)


@pytest.mark.parametrize("run_time", [RunTime(), RunTime(limit_s=math.inf), RunTime(predicted_s=math.nan)])
def test_without_an_end_nothing_is_predicted(run_time: RunTime) -> None:
    found = outlooks(GrowthWatch(1000.0, run_time), line(500, 0.9, 1000))
    assert not any(found)


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
    assert outlooks(GrowthWatch(1000.0, KNOWN), line(500, 0.9, 400))[-1] is not None
    monkeypatch.setattr(growth, guard, value)
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
    limit = RunTime(limit_s=1000.0)
    assert limit.chance_of_reaching(600, 200) == pytest.approx(0.5)
    assert limit.chance_of_reaching(1000, 200) == 0.0
    median = RunTime(1000.0, 0.5, 5000.0)
    assert median.chance_of_reaching(1000, 1e-6) == pytest.approx(0.5)
    assert RunTime(1000.0, 0.0, 5000.0).chance_of_reaching(3000, 2000) == pytest.approx(2 / 3)


@examples(0.3)
@given(
    st.lists(st.tuples(st.floats(allow_nan=True), st.one_of(st.none(), st.floats(allow_nan=True))), max_size=300),
    st.one_of(st.none(), st.floats(allow_nan=True)),
    st.one_of(st.none(), st.floats(allow_nan=True)),
)
def test_no_samples_raise(samples: list[tuple[float, float | None]], capacity: float | None, end: float | None) -> None:
    outlooks(GrowthWatch(capacity, RunTime(end, 0.5, end)), samples)


@examples(0.1)
@given(st.floats(0.001, 1000.0), st.integers(1, 60))
def test_units_of_memory_and_time_do_not_matter(scale: float, interval: int) -> None:
    plain = outlooks(GrowthWatch(1000.0, KNOWN), line(500, 0.9))
    scaled = outlooks(
        GrowthWatch(1000.0 * scale, RunTime(predicted_s=1000.0 * interval)),
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
    assert outlooks(GrowthWatch(1000, RunTime(predicted_s=200.0)), samples)[-1] is not None
