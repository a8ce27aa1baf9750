"""The packing decision by example, and the ranges of speeds that it rests on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_site import GIB, family

from advisor.packing.decide import PackingDemand, PackingFamily, PackingRules, Range, decide_packing, speed_ranges

RULES = PackingRules()


def test_two_runs_of_one_family_by_hand() -> None:
    advice = decide_packing((family(), family()), RULES)
    low = 0.77 / 1.18  # beside a demand of 0.3; together below 1
    assert (advice.reason, advice.is_advised, advice.is_with_itself, advice.tasks) == ("share", True, True, 2)
    assert [*advice.speeds] == [pytest.approx((low, 1.0))] * 2
    assert advice.gain == pytest.approx((2 * low, 2.0))
    assert (advice.needed_mib, advice.usable_mib) == (20 * GIB + 1000, 79 * GIB)
    assert (advice.runs, advice.risk) == (8, 0.01)


def test_two_families_that_need_more_than_a_gpu_by_hand() -> None:
    advice = decide_packing((family("a", 0.9, 0.1), family("b", 0.2, 0.4)), RULES)
    first, second = advice.speeds
    assert first == pytest.approx((0.77 / 1.24 / math.sqrt(1.1), 1 / 1.1))
    assert second == pytest.approx((0.77 / 1.54 / math.sqrt(1.1), 1 / 1.1))
    assert advice.demand == pytest.approx((1.1, 0.5))
    assert (advice.reason, advice.is_with_itself) == ("little gain", False)


def test_what_keeps_jobs_apart() -> None:
    for change, reason in [
        ({"user": "bob"}, "other user"), ({"gpu_count": 0}, "no GPU"), ({"node_count": 2}, "several nodes"),
        ({"node_count": None}, "several nodes"), ({"gpu_count": 2}, "unequal GPUs"), ({"is_on_mig": True}, "MIG"),
        ({"gpu_model": ""}, "unknown GPU"), ({"capacity_mib": None}, "unknown GPU"),
        ({"capacity_mib": math.nan}, "unknown GPU"), ({"gpu_model": "H100"}, "other GPU"),
        ({"gpu_model": "P100-16"}, "old GPU"), ({"gpu_model": "K80-12"}, "old GPU"),
        ({"is_preallocated": True}, "preallocated"), ({"is_preallocated": None}, "no memory bound"),
        ({"sm": (0.3,) * 4, "dram": (0.1,) * 4}, "too few runs"), ({"sm": (math.nan,) * 8}, "too few runs"),
        ({"dram": (math.nan,) * 8}, "too few runs"), ({"coverage": 0.6}, "thin coverage"),
        ({"coverage": math.nan}, "thin coverage"), ({"bounds_mib": {}}, "no memory bound"),
        ({"bounds_mib": {2: math.nan}}, "no memory bound"), ({"bounds_mib": {2: 70 * GIB}}, "memory"),
        ({"sm": (1.0,) * 8}, "little gain"),
    ]:  # fmt: skip
        other = family("other", **change)
        for members in ((family(), other), (other, family())):
            assert decide_packing(members, RULES).reason == reason


def test_volta_is_the_oldest_gpu_with_advice() -> None:
    for model, reason in (("P100-16-PCIE", "old GPU"), ("V100-16", "share"), ("H100-80", "share")):
        assert decide_packing((family(gpu_model=model),) * 2, RULES).reason == reason, model


def test_memory_fits_to_the_last_mib() -> None:
    room = (80 * GIB - RULES.headroom_mib - 2 * RULES.context_mib) / 2
    fits, exceeds = ({2: room}, {2: room + 0.5})
    assert decide_packing((family(bounds_mib=fits),) * 2, RULES).is_advised
    assert decide_packing((family(bounds_mib=exceeds),) * 2, RULES).reason == "memory"
    smaller = family("other", bounds_mib=fits, capacity_mib=79 * GIB)
    assert decide_packing((family(bounds_mib=fits), smaller), RULES).reason == "memory"


def test_jobs_of_several_gpus_share_only_where_tasks_can_have_several() -> None:
    four, larger = family(gpu_count=4), dataclasses.replace(RULES, most_gpus=4)
    assert decide_packing((four, four), RULES).reason == "several GPUs"
    assert decide_packing((four, four), larger).is_advised
    assert decide_packing((four, family("other")), larger).reason == "unequal GPUs"


def test_the_busier_runs_of_a_family_count() -> None:
    mixed = family(sm=(0.1, 0.2, 0.8, 0.3, 0.4), dram=(0.1, math.nan, 0.1, 0.1, 0.6))
    assert mixed.runs == 4
    assert mixed.demand == (0.8, 0.6)
    assert family(sm=(0.1, 0.2, 0.3, 0.4, 0.5), dram=(0.1,) * 5).demand == (0.4, 0.1)
    assert family(sm=(), dram=()).demand is None


def test_three_and_four_runs_must_be_of_one_family() -> None:
    tiny = family(sm=0.05, bound_gib=2)
    four = decide_packing((tiny,) * 4, RULES)
    assert four.is_advised
    assert four.speeds[0].low == pytest.approx(0.77 / 1.18)  # the others' DRAM_ACTIVE, 3 x 0.1, is the scarcer
    for members in ((tiny,), (tiny,) * 5, (tiny, tiny, family("other"))):
        with pytest.raises(ValueError, match="members"):
            decide_packing(members, RULES)


maybe = st.one_of(st.none(), st.just(math.nan), st.floats(0, 1e6))
means = st.lists(st.one_of(st.floats(-0.5, 1.5), st.just(math.nan)), min_size=0, max_size=12)


@st.composite
def families(draw: st.DrawFn) -> PackingFamily:
    sm = tuple(draw(means))
    return PackingFamily(
        user=draw(st.sampled_from(["ann", "bob"])), name_key=draw(st.text(max_size=8)),
        gpu_count=draw(st.integers(0, 4)), node_count=draw(st.one_of(st.none(), st.integers(0, 3))),
        sm=sm, dram=tuple(draw(st.lists(st.floats(0, 1), min_size=len(sm), max_size=len(sm)))),
        coverage=draw(st.one_of(st.just(math.nan), st.floats(0, 1))),
        bounds_mib=draw(st.dictionaries(st.sampled_from([2, 3, 4]), st.floats(-10, 1e6))),
        is_preallocated=draw(st.sampled_from([None, False, False, True])), is_on_mig=draw(st.booleans()),
        gpu_model=draw(st.sampled_from(["", "A100-80", "H100"])), capacity_mib=draw(maybe),
    )  # fmt: skip


@given(families(), families())
def test_nothing_unknown_leads_to_advice(first: PackingFamily, second: PackingFamily) -> None:
    advice = decide_packing((first, second), RULES)
    assert not advice.is_advised or (advice.needed_mib or math.inf) <= (advice.usable_mib or 0)
    assert not advice.is_advised or (first.gpu_count, first.node_count) == (second.gpu_count, 1)


good = st.builds(
    family, name=st.text(max_size=8), sm=st.floats(0, 1), dram=st.floats(0, 1), bound_gib=st.floats(0.1, 60),
    coverage=st.floats(0.5, 1),
)  # fmt: skip


@given(good, good)
def test_swapping_the_two_swaps_their_speeds(first: Any, second: Any) -> None:
    advice, swapped = (decide_packing(pair, RULES) for pair in ((first, second), (second, first)))
    assert (swapped.reason, swapped.gain) == (advice.reason, advice.gain)
    assert swapped.speeds == advice.speeds[::-1]


@given(good, good, st.floats(1, 100), st.floats(0, 0.5))
def test_more_memory_or_more_demand_never_makes_advice(first: Any, second: Any, factor: float, more: float) -> None:
    advice = decide_packing((first, second), RULES)
    larger = dataclasses.replace(first, bounds_mib={2: first.bounds_mib[2] * factor})
    busier = dataclasses.replace(first, sm=tuple(min(each + more, 1.0) for each in first.sm))
    for worse in (larger, busier):
        assert not decide_packing((worse, second), RULES).is_advised or advice.is_advised


@given(good, st.randoms(use_true_random=False), st.lists(st.floats(0, 1), min_size=5, max_size=20))
def test_the_order_of_runs_does_not_matter(one: Any, random: Any, sm: list[float]) -> None:
    pairs = [(each, 1 - each) for each in sm]
    before = dataclasses.replace(one, sm=tuple(a for a, _ in pairs), dram=tuple(b for _, b in pairs))
    random.shuffle(pairs)
    after = dataclasses.replace(one, sm=tuple(a for a, _ in pairs), dram=tuple(b for _, b in pairs))
    assert decide_packing((before, before), RULES).speeds == decide_packing((after, after), RULES).speeds


@given(good, good)
def test_a_range_is_one_and_the_gain_its_sum(first: Any, second: Any) -> None:
    advice = decide_packing((first, second), RULES)
    assert all(0 < each.low <= each.high <= 1 for each in advice.speeds)
    if advice.gain is not None:
        assert advice.gain.low == pytest.approx(sum(each.low for each in advice.speeds))
        assert advice.is_advised == (advice.gain.low >= RULES.min_gain)


Floats = npt.NDArray[np.float64]
PAIRS = 1500


def shared(sm: Floats, dram: Floats) -> Floats:
    """The GPU does no more than all of its work, and all are slowed alike."""
    scarce = np.maximum(sm.sum(axis=1), dram.sum(axis=1))
    speeds: Floats = np.repeat(1 / np.maximum(1.0, scarce)[:, None], 2, axis=1)
    return speeds


def loss(rng: np.random.Generator, most: float) -> Floats:
    kept: Floats = 1 - rng.uniform(0, most, (PAIRS, 2))
    return kept


Made = Callable[[np.random.Generator, Floats, Floats], Floats]
CONTENTION: dict[str, Made] = {
    "shared": lambda _, sm, dram: shared(sm, dram),
    "noise of 10%": lambda rng, sm, dram: shared(sm, dram) * np.exp(0.1 * rng.standard_normal((PAIRS, 2))),
    "5 to 10% lost": lambda rng, sm, dram: shared(sm, dram) * (1 - rng.uniform(0.05, 0.1, (PAIRS, 2))),
    "0 to 30% lost": lambda rng, sm, dram: shared(sm, dram) * loss(rng, 0.3),
    "caches": lambda rng, sm, dram: shared(sm, dram) * (1 - 0.35 * dram[:, ::-1]),
    "both resources": lambda rng, sm, dram: (
        1 / (np.maximum(1, sm.sum(axis=1)) * np.maximum(1, dram.sum(axis=1)))[:, None] * loss(rng, 0.1)
    ),
    "waiting for the other": lambda rng, sm, dram: 1 / (1 + sm[:, ::-1]) * loss(rng, 0.1),
    "a fair half each": lambda rng, sm, dram: (
        np.maximum(0.5, 1 - sm[:, ::-1]) / np.maximum(sm, np.maximum(0.5, 1 - sm[:, ::-1])) * loss(rng, 0.1)
    ),
}


@pytest.mark.parametrize("kind", CONTENTION)
def test_nine_of_ten_advised_pairs_keep_the_low_ends(kind: str) -> None:
    rng = np.random.default_rng(7)
    sm = rng.beta(1.2, 1.8, (PAIRS, 2))
    dram = np.clip(sm * rng.uniform(0.2, 1.1, (PAIRS, 2)), 0, 1)
    speeds = np.minimum(CONTENTION[kind](rng, sm, dram), 1)
    ranges = [
        speed_ranges([PackingDemand(*one), PackingDemand(*other)])
        for one, other in np.stack([sm, dram], axis=2).tolist()
    ]
    low = np.array([[each.low for each in pair] for pair in ranges])
    advised, is_light = np.asarray(low.sum(axis=1) >= 1.15), np.asarray(speeds.min(axis=1) >= 0.85)
    is_held = np.asarray((speeds >= low).all(axis=1))
    assert is_held[advised].mean() >= 0.9
    assert advised[is_light].mean() >= 0.6


def test_ranges_by_hand() -> None:
    alone = speed_ranges([PackingDemand(0, 0), PackingDemand(0, 0)])
    assert alone == (Range(0.77, 1.0),) * 2
    first, second = speed_ranges([PackingDemand(1.0, 0.2), PackingDemand(0.5, 0.9)])
    assert first == pytest.approx((0.77 / 1.54 / math.sqrt(1.5), 1 / 1.5))
    assert second == pytest.approx((0.77 / 1.6 / math.sqrt(1.5), 1 / 1.5))
