"""The smallest tier that holds a bound; MIG slices only for one GPU and only with enough compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.memory.tier import ONE_GPU, decide_tier
from almanac.config import Tier
from almanac.records import JobRequest, MemoryBound, TierAdvice

WHOLE_GPUS = (
    Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"),
    Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"),
)


def bound(mib: float) -> MemoryBound:
    return MemoryBound(mib, mib, 0.01, mib * 0.9, 10, "family", "family, steady")


def request(constraints: str = "gpu&hbm80g", gpu_count: int = 4, **rest: str) -> JobRequest:
    return JobRequest(user="ann", job_name="x", constraints=constraints, gpu_count=gpu_count, **rest)


def test_the_smallest_tier_that_holds_the_bound() -> None:
    for constraints, mib, reason, tier, option in [
        ("gpu&hbm80g", 20000, "smaller", "hbm40g", "--constraint=gpu&hbm40g"),
        ("gpu&hbm80g", 60000, "fits", "hbm80g", None),
        ("gpu&hbm40g", 60000, "larger", "hbm80g", "--constraint=gpu&hbm80g"),
        ("gpu&hbm40g", 20000, "fits", "hbm40g", None), ("gpu", 20000, "name it", "hbm40g", "--constraint=gpu&hbm40g"),
        ("", 60000, "name it", "hbm80g", "--constraint=hbm80g"),
        ("gpu&hbm80g", 81500, "none large enough", None, None), ("hbm40g|hbm80g", 20000, "choice", None, None),
        ("gpu&hbm80g&nvme", 20000, "smaller", "hbm40g", "--constraint=gpu&hbm40g&nvme"),
        ("[rack1|rack2]&hbm80g", 20000, "not rewritable", "hbm40g", None),
    ]:  # fmt: skip
        advice = decide_tier(request(constraints), bound(mib), WHOLE_GPUS, headroom_mib=1024)
        assert (advice.reason, advice.tier, advice.rewrite) == (reason, tier, option)


def test_the_headroom_is_kept_free() -> None:
    tiers = [decide_tier(request(), bound(40960 - room), WHOLE_GPUS, headroom_mib=1024).tier for room in (1024, 1023)]
    assert tiers == ["hbm40g", "hbm80g"]


def test_silence_without_gpus_tiers_or_evidence() -> None:
    assert decide_tier(request(gpu_count=0), bound(1), WHOLE_GPUS, 0).reason == "no GPU"
    assert decide_tier(request(), bound(1), (), 0).reason == "no tiers"
    assert decide_tier(request(), None, WHOLE_GPUS, 0).reason == "no evidence"


SLICES = {"1g.10gb": 9728, "1g.20gb": 19968, "2g.20gb": 19968, "3g.40gb": 40192}
TIERS = (
    *(Tier(name, mib, "A100-80", gres=name) for name, mib in SLICES.items()),
    Tier("a100", 81920, "A100-80", gres="a100"),
)
FAST = dict.fromkeys(SLICES, 1.0)


def decide(mib: float, slow_downs: dict[str, float], tiers: tuple[Tier, ...] = TIERS, **asked: Any) -> TierAdvice:
    bound = MemoryBound(mib, mib, 0.01, mib, 10, "family", "")
    request = JobRequest("ann", **{"gpu_count": 1, "gres": "gpu:a100:1", "gpu_type": "a100", **asked})
    return decide_tier(request, bound, tiers, 1024, slow_downs=slow_downs)


@pytest.mark.parametrize(
    ("mib", "slow_downs", "tier"),
    [
        (5000, FAST, "1g.10gb"),
        (5000, {**FAST, "1g.10gb": 1.5}, "1g.10gb"),
        (5000, {**FAST, "1g.10gb": 1.51}, "1g.20gb"),
        (15360, FAST, "1g.20gb"),
        (15360, {**FAST, "1g.20gb": 3.9, "2g.20gb": 1.4}, "2g.20gb"),  # issue: a 15 GB bound, a busy GPU
        (15360, dict.fromkeys(SLICES, 7.0), "a100"),
        (15360, {}, "a100"),
        (9000, FAST, "1g.20gb"),  # nominal 10 GB, but 9.5 GiB and headroom
        (60000, FAST, "a100"),
    ],
)
def test_the_smallest_slice_that_keeps_memory_and_time(mib: float, slow_downs: dict[str, float], tier: str) -> None:
    advice = decide(mib, slow_downs)
    assert advice.tier == tier
    assert advice.rewrite == (None if tier == "a100" else f"--gres=gpu:{tier}:1")
    assert advice.slow_down == (slow_downs.get(tier) if tier != "a100" else None)


@pytest.mark.parametrize("more", [{"gpu_count": 4}, {"node_count": 2}, {"may_use_more": True}])
def test_never_a_slice_for_more_than_one_gpu(more: dict[str, Any]) -> None:
    advice = decide(5000, FAST, **more)
    assert (advice.tier, advice.rewrite, advice.no_slice) == ("a100", None, "")
    none = decide(5000, FAST, TIERS[:-1], **{**more, "gres": "gpu:1", "gpu_type": ""})
    assert (none.tier, none.note) == (None, ONE_GPU)


def test_why_no_slice_is_said() -> None:
    assert decide(5000, {}).no_slice == "too few past runs on such GPUs have SM_ACTIVE and DRAM_ACTIVE"
    busy = decide(5000, {"1g.10gb": 6.2, "2g.20gb": 3.4, "1g.20gb": 6.2, "3g.40gb": 2.26})
    assert (busy.tier, busy.no_slice) == ("a100", "on 3g.40gb such jobs would run about 2.3 times as long")
    assert decide(60000, {}).no_slice == ""
    assert decide(5000, FAST).no_slice == ""


def test_whoever_runs_on_a_slice_stays_or_gets_no_smaller_one() -> None:
    asked = {"gres": "gpu:2g.20gb:1", "gpu_type": "2g.20gb"}
    assert decide(5000, {}, **asked).reason == "fits"
    larger = decide(25000, {}, **asked)
    assert (larger.tier, larger.reason, larger.slow_down) == ("3g.40gb", "larger", None)
    assert decide(25000, {"3g.40gb": 2.0}, **asked).tier == "a100"
    assert decide(5000, {"2g.20gb": 2.0, "3g.40gb": 1.2}, **asked).tier == "3g.40gb"
    assert decide(5000, FAST, **asked).tier == "1g.10gb"


def test_the_untyped_request_is_named_a_type() -> None:
    for option in ("--gpus", "--gpus-per-node", "--gpus-per-task"):
        advice = decide(5000, FAST, gres="", gpu_type="", gpu_options=((option, "1"),))
        assert (advice.reason, advice.rewrite) == ("name it", f"{option}=1g.10gb:1")


def test_equal_memory_is_decided_by_compute_and_not_by_name() -> None:
    tiers = (
        Tier("a-two", 19968, gres="2g.20gb"),
        Tier("b-one", 19968, gres="1g.20gb"),
        Tier("0-whole", 19968, gres="rtx"),
    )
    assert decide(15360, {"a-two": 1.1, "b-one": 1.2}, tiers, gres="gpu:rtx:1", gpu_type="rtx").tier == "b-one"
    assert decide(15360, {"a-two": 1.1, "b-one": 1.6}, tiers, gres="gpu:rtx:1", gpu_type="rtx").tier == "a-two"
    kept = decide(15360, {}, tiers, gres="gpu:rtx:1", gpu_type="rtx")
    assert (kept.tier, kept.reason) == ("0-whole", "fits")


@given(
    st.floats(1, 90000), st.dictionaries(st.sampled_from([*SLICES]), st.floats(1, 9)), st.integers(1, 3),
    st.sampled_from(["", "a100", *SLICES]), st.booleans(),
)  # fmt: skip
def test_what_must_hold(mib: float, slow_downs: dict[str, float], gpus: int, kind: str, may_use_more: bool) -> None:
    gres = f"gpu:{kind}:{gpus}" if kind else f"gpu:{gpus}"
    advice = decide(mib, slow_downs, gpu_count=gpus, gres=gres, gpu_type=kind, may_use_more=may_use_more)
    chosen = next((tier for tier in TIERS if tier.name == advice.tier), None)
    if chosen is not None:
        assert chosen.capacity_mib - 1024 >= mib
    if chosen is not None and chosen.is_slice and advice.is_change:
        assert gpus == 1 and not may_use_more
        assert slow_downs.get(chosen.name, 1.5 if kind in SLICES else 9) <= 1.5


def test_a_partition_of_slices() -> None:
    tiers = (Tier("mig", 9728, partition="mig", compute_slices=1), Tier("full", 81920, partition="gpu"))
    asked = {"gres": "gpu:1", "gpu_type": "", "partition": "gpu"}
    assert decide(5000, {"mig": 1.2}, tiers, **asked).rewrite == "--partition=mig"
    assert decide(5000, {}, tiers, **asked).tier == "full"
    assert decide(5000, {"mig": 1.2}, tiers, **{**asked, "gpu_count": 2}).tier == "full"


def test_the_sizes_of_tiers() -> None:
    slice_, whole = TIERS[0], dataclasses.replace(TIERS[-1], capacity_mib=9728)
    assert slice_.size < whole.size
    assert [tier.compute_slices for tier in TIERS] == [1, 1, 2, 3, 0]
