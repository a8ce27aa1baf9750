"""The two decisions are pure functions: by example, and by what must hold for any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.decisions.priority import decide_priority
from advisor.decisions.tier import decide_tier
from almanac.config import Tier
from almanac.records import MemoryBound, Request

TIERS = (
    Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"),
    Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"),
)


def bound(mib: float) -> MemoryBound:
    return MemoryBound(mib, 0.01, mib * 0.9, 10, "family", "family, steady")


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


@given(st.lists(st.floats(1, 1e9), min_size=2, max_size=101), st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_longer_job_never_gets_the_greater_term(times: list[float], first: float, second: float) -> None:
    quantiles = sorted(times)
    low, high = sorted((first, second))
    shorter, longer = decide_priority(low, quantiles, 10_000), decide_priority(high, quantiles, 10_000)
    assert shorter is not None
    assert longer is not None
    assert 0 <= longer.term <= shorter.term <= 10_000


def test_the_term_is_the_share_of_jobs_predicted_longer() -> None:
    quantiles = [0.0, 10.0, 20.0, 30.0, 40.0]
    advice = decide_priority(10.0, quantiles, 1000)
    assert advice is not None
    assert (advice.term, advice.share_longer) == (750, 0.75)
    assert decide_priority(5.0, [], 1000) is None
