"""The site factor: by example, and by what must hold for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.priority import (
    Overrun,
    check_ageing,
    decide_priority,
    relieved_users,
    require_ageing,
    share_longer,
    site_factor,
)
from almanac.config import Priority
from almanac.errors import ConfigError
from slurm.commands import parse_settings


def test_the_factor_falls_by_k_where_the_gpu_time_is_e_times_as_long() -> None:
    priority = Priority(points_per_e=1000, min_gpu_time_s=60, max_gpu_time_s=8_640_000)
    assert site_factor(8_640_000, priority) == site_factor(1e12, priority) == 0
    assert site_factor(86_400, priority) == round(1000 * math.log(100))
    assert site_factor(86_400 / math.e, priority) == round(1000 * (math.log(100) + 1))
    assert site_factor(0, priority) == site_factor(1, priority) == round(1000 * math.log(144_000))


@given(st.floats(60, 8e6), st.floats(60, 8e6), st.integers(0, 500_000))
def test_with_slurms_age_the_order_is_that_of_ln_gpu_time_and_submission(first: float, second: float, gap: int) -> None:
    """The second job is submitted `gap` seconds later; both are weighed `gap` after that."""
    priority = Priority()
    text = "\n".join(check_ageing({}, priority).lines)
    weight = int(text.split("PriorityWeightAge=")[1].split()[0])
    max_age_s = int(text.split("PriorityMaxAge=")[1].split("-")[0]) * 86_400
    factors = [
        weight * min(age_s / max_age_s, 1) + site_factor(gpu_time_s, priority)
        for gpu_time_s, age_s in ((first, 2 * gap), (second, gap))
    ]
    tau_s = priority.tau_hours * 3600
    keys = [math.log(first), math.log(second) + gap / tau_s]
    if 2 * gap <= max_age_s and abs(keys[0] - keys[1]) > 0.002:
        assert (factors[0] > factors[1]) == (keys[0] < keys[1])


FITTING = parse_settings("PriorityType=priority/multifactor\nPriorityMaxAge=12-0\nPriorityWeightAge=12000\n")


def test_weights_too_small_for_whole_site_factors_are_a_finding_not_a_crash() -> None:
    """One point per e and six hours of age against a goal of 24 h: a quarter of a point."""
    narrow = Priority(points_per_e=1, min_gpu_time_s=60, max_gpu_time_s=66)
    check = check_ageing({"PriorityMaxAge": "0-6", "PriorityWeightAge": "5"}, narrow)
    assert check.lines == ("PriorityWeightAge=1",)


def test_weights_that_fit_need_no_change() -> None:
    check = check_ageing(FITTING, Priority())
    assert check.fits
    assert check.tau_s == pytest.approx(86_400)
    assert check_ageing(FITTING | {"PriorityMaxAge": "12-00:00:00"}, Priority()).fits


@pytest.mark.parametrize(
    ("conf", "tau_h", "lines"),
    [
        ({}, None, ("PriorityMaxAge=12-0", "PriorityWeightAge=12000")),
        (FITTING | {"PriorityWeightAge": "4000"}, 72, ("PriorityWeightAge=12000",)),
        (FITTING | {"PriorityWeightAge": "0"}, None, ("PriorityWeightAge=12000",)),
        (FITTING | {"PriorityMaxAge": "30-0"}, 60, ("PriorityWeightAge=30000",)),
        (FITTING | {"Other": "7"}, 24, ()),
        (FITTING | {"PriorityMaxAge": "6-0"}, 12, ("PriorityMaxAge=12-0",)),
        (FITTING | {"PriorityType": "priority/basic"}, 24, ("PriorityType=priority/multifactor",)),
        ({"PriorityMaxAge": "24-0", "PriorityWeightAge": "24000", "PriorityType": ""}, 24, ()),
    ],
)
def test_weights_that_do_not_fit_are_named_with_the_lines_to_change(
    conf: dict[str, str], tau_h: float | None, lines: tuple[str, ...]
) -> None:
    check = check_ageing(conf, Priority())
    assert check.tau_s == (None if tau_h is None else pytest.approx(tau_h * 3600))
    assert check.lines == lines
    assert len(check.faults) >= len(lines) > 0 or check.fits
    now = "age does not count" if tau_h is None else f"waits {tau_h:.1f} h longer"
    weights = [fault for fault in check.faults if fault.startswith("PriorityWeightAge")]
    assert [now in fault for fault in weights] == [True for line in lines if line.startswith("PriorityWeightAge")]
    changed = parse_settings("\n".join(lines))
    assert check_ageing(conf | changed, Priority()).fits


@pytest.mark.parametrize("line", ["PriorityMaxAge=UNLIMITED", "PriorityMaxAge=soon", "PriorityWeightAge=-5"])
def test_a_value_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split("=")[0]):
        check_ageing(parse_settings(line), Priority())


def test_slurm_is_told_nothing_until_its_weights_fit_and_the_site_applies() -> None:
    applied = Priority(mode="apply")
    require_ageing(FITTING, applied)
    with pytest.raises(ConfigError, match="is observe: no site factor is set"):
        require_ageing(FITTING, Priority())
    with pytest.raises(ConfigError, match="age does not count") as refused:
        require_ageing({}, applied)
    assert refused.value.hint == "in slurm.conf: PriorityMaxAge=12-0, PriorityWeightAge=12000"
    with pytest.raises(ConfigError, match="only priority/multifactor"):
        require_ageing(FITTING | {"PriorityType": "priority/basic"}, applied)
    with pytest.raises(ConfigError, match="PriorityMaxAge"):
        require_ageing({"PriorityMaxAge": "UNLIMITED"}, applied)


QUANTILES = (60.0, 600.0, 6000.0, 60_000.0, 600_000.0)


def test_the_advice_says_what_the_site_factor_is_worth() -> None:
    advice = decide_priority(600.0, 6000.0, Overrun(), QUANTILES, Priority())
    assert (advice.site_factor, advice.share_longer) == (site_factor(600, Priority()), 0.75)
    assert advice.worth_wait_s == pytest.approx(math.log(10) * 86_400, rel=1e-3)
    assert decide_priority(600.0, 6000.0, Overrun(), (), Priority()).worth_wait_s is None
    assert decide_priority(600.0, 6000.0, Overrun(), (60.0,), Priority()).share_longer is None
    assert [share_longer(each, QUANTILES) for each in (5.0, 60.0, 3300.0, 6e5, 9e9)] == [1.0, 1.0, 0.625, 0.0, 0.0]
    assert share_longer(5.0, (5.0, 5.0, 5.0, 9.0)) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("overran", "counted_s"),
    [
        (Overrun(0.5, 2.0), 1200.0),
        (Overrun(0.5, 50.0), 6000.0),  # at most the upper end of the interval
        (Overrun(0.4, 50.0), 600.0),
        (Overrun(0.6, 1.9), 600.0),  # as many runs were shorter
    ],
)
def test_a_user_who_keeps_overrunning_is_ranked_by_a_longer_time(overran: Overrun, counted_s: float) -> None:
    advice = decide_priority(600.0, 6000.0, overran, QUANTILES, Priority())
    assert (advice.is_cautious, advice.gpu_time_s) == (counted_s > 600, counted_s)
    assert advice.site_factor == site_factor(counted_s, Priority())


def test_the_lane_for_short_jobs_is_an_option() -> None:
    options = Priority(short_gpu_time_s=100, short_points=3000)
    plain = site_factor(100, options)
    assert decide_priority(100.0, 900.0, Overrun(), QUANTILES, options).site_factor == plain + 3000
    assert decide_priority(100.0, 900.0, Overrun(0.9, 9.0), QUANTILES, options).extra == 0, (
        "overrunners have no short lane"
    )


waiting = st.lists(st.tuples(st.sampled_from("abcdefghij"), st.integers(0, 20_000)))


@given(waiting, st.integers(20_000, 40_000), st.floats(0.01, 1))
def test_relief_goes_to_those_who_wait_longest_and_holds_within_an_hour(
    jobs: list[tuple[str, int]], now_s: int, share: float
) -> None:
    found = relieved_users(jobs, now_s, share)
    hour_s = now_s // 3600 * 3600
    waited_s = {user: sum(max(hour_s - since_s, 0) for each, since_s in jobs if each == user) for user, _ in jobs}
    assert len(found) <= math.ceil(share * len(waited_s))
    others = [waited_s[user] for user in waited_s if user not in found]
    assert all(waited_s[user] > 0 and waited_s[user] >= max(others, default=0) for user in found)
    assert relieved_users(reversed(jobs), hour_s + 3599, share) == found
