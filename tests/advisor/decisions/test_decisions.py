"""The two decisions are pure functions: by example, and by what must hold for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.decisions.priority import (
    check_ageing,
    decide_priority,
    require_ageing,
    share_longer,
    site_factor,
)
from advisor.decisions.tier import decide_tier
from advisor.duration.overrun import Overrun
from almanac.config import Priority, Tier
from almanac.errors import ConfigError
from almanac.records import MemoryBound, Request

TIERS = (
    Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"),
    Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"),
)


def bound(mib: float) -> MemoryBound:
    return MemoryBound(mib, mib, 0.01, mib * 0.9, 10, "family", "family, steady")


def request(constraints: str = "gpu&hbm80g", gpu_count: int = 4, **rest: str) -> Request:
    return Request(user="ann", job_name="x", constraints=constraints, gpu_count=gpu_count, **rest)


@pytest.mark.parametrize(
    ("constraints", "mib", "reason", "tier", "option"),
    [
        ("gpu&hbm80g", 20000, "smaller", "hbm40g", "--constraint=gpu&hbm40g"),
        ("gpu&hbm80g", 60000, "fits", "hbm80g", None),
        ("gpu&hbm40g", 60000, "larger", "hbm80g", "--constraint=gpu&hbm80g"),
        ("gpu&hbm40g", 20000, "fits", "hbm40g", None),
        ("gpu", 20000, "name it", "hbm40g", "--constraint=gpu&hbm40g"),
        ("", 60000, "name it", "hbm80g", "--constraint=hbm80g"),
        ("gpu&hbm80g", 81500, "none large enough", None, None),
        ("hbm40g|hbm80g", 20000, "choice", None, None),
        ("gpu&hbm80g&nvme", 20000, "smaller", "hbm40g", "--constraint=gpu&hbm40g&nvme"),
        ("[rack1|rack2]&hbm80g", 20000, "not rewritable", "hbm40g", None),
    ],
)
def test_the_smallest_tier_that_holds_the_bound(
    constraints: str, mib: float, reason: str, tier: str | None, option: str | None
) -> None:
    advice = decide_tier(request(constraints), bound(mib), TIERS, headroom_mib=1024)
    assert (advice.reason, advice.tier, advice.rewrite) == (reason, tier, option)


def test_the_headroom_is_kept_free() -> None:
    fitting = decide_tier(request(), bound(40960 - 1024), TIERS, headroom_mib=1024)
    assert fitting.tier == "hbm40g"
    tight = decide_tier(request(), bound(40960 - 1023), TIERS, headroom_mib=1024)
    assert tight.tier == "hbm80g"


def test_silence_without_gpus_tiers_or_evidence() -> None:
    assert decide_tier(request(gpu_count=0), bound(1), TIERS, 0).reason == "no GPU"
    assert decide_tier(request(), bound(1), (), 0).reason == "no tiers"
    assert decide_tier(request(), None, TIERS, 0).reason == "no evidence"


@given(st.floats(1, 200_000), st.sampled_from(["", "gpu", "hbm40g", "gpu&hbm80g", "hbm40g|hbm80g", "[a*2&b*1]"]))
def test_an_advised_tier_always_holds_the_bound(mib: float, constraints: str) -> None:
    advice = decide_tier(request(constraints), bound(mib), TIERS, headroom_mib=1024)
    if advice.tier is not None:
        assert {tier.name: tier for tier in TIERS}[advice.tier].capacity_mib - 1024 >= mib


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_longer_job_never_gets_the_greater_factor(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= site_factor(high, Priority()) <= site_factor(low, Priority()) <= site_factor(0, Priority())


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
    text = "\n".join(check_ageing("", priority).lines)
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


FITTING = "PriorityType=priority/multifactor\nPriorityMaxAge=12-0\nPriorityWeightAge=12000\n"


def test_weights_too_small_for_whole_site_factors_are_a_finding_not_a_crash() -> None:
    """One point per e and six hours of age against a goal of 24 h: a quarter of a point."""
    narrow = Priority(points_per_e=1, min_gpu_time_s=60, max_gpu_time_s=66)
    check = check_ageing("PriorityMaxAge=0-6\nPriorityWeightAge=5", narrow)
    assert check.lines == ("PriorityWeightAge=1",)


def test_weights_that_fit_need_no_change() -> None:
    check = check_ageing(FITTING, Priority())
    assert check.fits
    assert check.tau_s == pytest.approx(86_400)
    assert check_ageing(FITTING.replace("=", "          = ").replace("12-0", "12-00:00:00"), Priority()).fits


@pytest.mark.parametrize(
    ("conf", "tau_h", "lines"),
    [
        ("", None, ("PriorityMaxAge=12-0", "PriorityWeightAge=12000")),
        ("PriorityWeightAge=1000 # PriorityWeightAge=12000", 168, ("PriorityMaxAge=12-0", "PriorityWeightAge=12000")),
        (FITTING.replace("12000", "4000"), 72, ("PriorityWeightAge=12000",)),
        (FITTING.replace("12000", "0"), None, ("PriorityWeightAge=12000",)),
        (FITTING.replace("12-0", "30-0"), 60, ("PriorityWeightAge=30000",)),
        (FITTING.replace("12-0", "6-0"), 12, ("PriorityMaxAge=12-0",)),
        (FITTING.replace("multifactor", "basic"), 24, ("PriorityType=priority/multifactor",)),
        ("prioritymaxage = 24-0\nPRIORITYWEIGHTAGE=24000", 24, ()),
    ],
)
def test_weights_that_do_not_fit_are_named_with_the_lines_to_change(
    conf: str, tau_h: float | None, lines: tuple[str, ...]
) -> None:
    check = check_ageing(conf, Priority())
    assert check.tau_s == (None if tau_h is None else pytest.approx(tau_h * 3600))
    assert check.lines == lines
    assert len(check.faults) >= len(lines) > 0 or check.fits
    now = "age does not count" if tau_h is None else f"waits {tau_h:.1f} h longer"
    weights = [fault for fault in check.faults if fault.startswith("PriorityWeightAge")]
    assert [now in fault for fault in weights] == [True for line in lines if line.startswith("PriorityWeightAge")]
    changed = conf + "\n" + "\n".join(lines)
    assert check_ageing(changed, Priority()).fits


@pytest.mark.parametrize("line", ["PriorityMaxAge=UNLIMITED", "PriorityMaxAge=soon", "PriorityWeightAge=-5"])
def test_a_value_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split("=")[0]):
        check_ageing(line, Priority())


def test_slurm_is_told_nothing_until_its_weights_fit_and_the_site_applies() -> None:
    applied = Priority(mode="apply")
    require_ageing(FITTING, applied)
    with pytest.raises(ConfigError, match="is observe: no site factor is set"):
        require_ageing(FITTING, Priority())
    with pytest.raises(ConfigError, match="age does not count") as refused:
        require_ageing("", applied)
    assert refused.value.hint == "in slurm.conf: PriorityMaxAge=12-0, PriorityWeightAge=12000"
    with pytest.raises(ConfigError, match="only priority/multifactor"):
        require_ageing(FITTING.replace("multifactor", "basic"), applied)
    with pytest.raises(ConfigError, match="PriorityMaxAge"):
        require_ageing("PriorityMaxAge=UNLIMITED", applied)


QUANTILES = (60.0, 600.0, 6000.0, 60_000.0, 600_000.0)


def test_the_advice_says_what_the_site_factor_is_worth() -> None:
    advice = decide_priority(600.0, 6000.0, Overrun(), "ann", QUANTILES, Priority())
    assert (advice.site_factor, advice.share_longer) == (site_factor(600, Priority()), 0.75)
    assert advice.worth_wait_s == pytest.approx(math.log(10) * 86_400, rel=1e-3)
    assert decide_priority(600.0, 6000.0, Overrun(), "ann", (), Priority()).worth_wait_s is None
    assert share_longer(5.0, QUANTILES) == 1.0


@pytest.mark.parametrize(
    ("overran", "counted_s"),
    [
        (Overrun(0.5, 3.0), 1800.0),
        (Overrun(0.5, 50.0), 6000.0),  # at most the upper end of the interval
        (Overrun(0.4, 50.0), 600.0),
        (Overrun(0.6, 1.9), 600.0),  # as many runs were shorter
    ],
)
def test_a_user_who_keeps_overrunning_is_ranked_by_a_longer_time(overran: Overrun, counted_s: float) -> None:
    advice = decide_priority(600.0, 6000.0, overran, "ann", QUANTILES, Priority())
    assert (advice.is_cautious, advice.gpu_time_s) == (counted_s > 600, counted_s)
    assert advice.site_factor == site_factor(counted_s, Priority())


def test_relief_and_the_lane_for_short_jobs_are_options() -> None:
    options = Priority(relief_users=("ann",), relief_points=500, short_gpu_time_s=120, short_points=3000)
    plain = site_factor(100, options)
    assert decide_priority(100.0, 100.0, Overrun(), "ann", QUANTILES, options).site_factor == plain + 3500
    assert decide_priority(100.0, 900.0, Overrun(), "bob", QUANTILES, options).site_factor == plain + 3000
    assert decide_priority(100.0, 900.0, Overrun(0.9, 9.0), "bob", QUANTILES, options).extra == 0, (
        "overrunners have no short lane"
    )
