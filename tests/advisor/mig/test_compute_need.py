"""Slow-down of a run on a MIG slice: by hand, against samples over time, and unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.mig.compute_need import Activity, activity_of, slow_down, slow_downs
from almanac.config import Tier
from almanac.tiers import SliceShare, slice_share

A100 = "A100-80"
SLICES = tuple(
    Tier(name=name, capacity_mib=1024 * gib, gpu_model=A100, gres=name)
    for name, gib in (("1g.10gb", 9), ("1g.20gb", 19), ("2g.20gb", 19), ("3g.40gb", 39), ("4g.40gb", 39))
)
SEVENTH = SliceShare(14 / 108, 1 / 8)
FRACTIONS = st.floats(0, 1)
NAN = math.nan


def run(sm: float, dram: float = 0.0, busy: float = 1.0, model: str = A100) -> Activity:
    return Activity(sm, dram, max(busy, sm, dram), model)


@pytest.mark.parametrize(
    ("gres", "sms", "bandwidth"),
    [("1g.10gb", 14 / 108, 1 / 8), ("1g.20gb", 14 / 108, 2 / 8), ("2g.20gb", 28 / 108, 2 / 8),
     ("3g.40gb", 42 / 108, 4 / 8), ("a100_4g.40gb", 56 / 108, 4 / 8), ("7g.80gb", 98 / 108, 1.0)],
)  # fmt: skip
def test_shares_count_the_multiprocessors_of_the_whole_gpu(gres: str, sms: float, bandwidth: float) -> None:
    assert slice_share(Tier(name="x", gres=gres), A100) == SliceShare(pytest.approx(sms), bandwidth)


def test_shares_of_other_models() -> None:
    h100 = slice_share(Tier(name="x", gres="1g.20gb"), "H100-80")
    assert h100 == SliceShare(26 / 132, 2 / 8)
    assert slice_share(Tier(name="x", gres="1g.6gb"), "A30") == SliceShare(14 / 56, 1 / 4)
    assert slice_share(Tier(name="x", gres="1g.23gb"), "B200-180") == SliceShare(1 / 7, 1 / 8)  # not published
    assert slice_share(Tier(name="x", gres="small", compute_slices=2), A100) == SliceShare(2 / 7, 2 / 8)
    assert slice_share(Tier(name="x", gres="1g.10gb"), "V100-32") is None
    assert slice_share(Tier(name="x", gres="a100"), A100) is None


def test_a_gpu_that_is_full_half_of_the_time_needs_its_compute_then() -> None:
    """0.5 + 0.5 x 108 / 14 = 4.36, and not max(1, 0.5 x 108 / 14) = 3.86 of the mean."""
    assert slow_down(run(0.5, busy=0.5), SEVENTH) == pytest.approx(0.5 + 0.5 * 108 / 14)


def test_memory_bandwidth_counts_too() -> None:
    assert slow_down(run(0.2, 1.0), SliceShare(1.0, 0.5)) == pytest.approx(2.0)
    wide, narrow = SliceShare(14 / 108, 2 / 8), SEVENTH
    assert slow_down(run(0.01, 0.2), wide) < slow_down(run(0.01, 0.2), narrow)


def test_an_idle_and_a_small_run_lose_nothing() -> None:
    assert slow_down(Activity(0, 0, 0, A100), SEVENTH) == 1.0
    assert slow_down(run(0.01), SEVENTH) == pytest.approx(1.0, abs=1e-3)


@given(FRACTIONS, FRACTIONS, FRACTIONS, st.floats(0.05, 1), st.floats(0.05, 1))
def test_between_no_loss_and_the_share(sm: float, dram: float, busy: float, sms: float, bandwidth: float) -> None:
    share = SliceShare(sms, bandwidth)
    found = slow_down(run(sm, dram, busy), share)
    assert 1 <= found <= max(1 / sms, 1 / bandwidth) + 1e-9
    # Never below a run whose level never changes, nor above one that is either full or idle.
    used = max(busy, sm, dram)
    constant = 1 - used + used * max(1, sm / used / sms, dram / used / bandwidth) if used else 1
    extreme = 1 + sm * (1 / sms - 1) + dram * (1 / bandwidth - 1)
    rounding = 1e-4 / min(sms, bandwidth)  # the levels are rounded to 4 digits
    assert constant - rounding <= found <= extreme + rounding


@given(FRACTIONS, FRACTIONS, st.floats(0.05, 0.95))
def test_a_larger_slice_is_never_slower(sm: float, dram: float, share: float) -> None:
    small, large = SliceShare(share, share), SliceShare(min(share * 1.2, 1), min(share * 1.2, 1))
    assert slow_down(run(sm, dram), large) <= slow_down(run(sm, dram), small) + 1e-9


def test_the_means_state_about_what_the_samples_say() -> None:
    """Of series with phases of random levels, the stated slow-down is off by at most a third, and by 10% on average."""
    rng = np.random.default_rng(7)
    errors = []
    for _ in range(400):
        levels = rng.beta(*rng.uniform(0.3, 4, 2), size=int(rng.integers(2, 40)))
        busy = rng.uniform(0.2, 1)
        samples = np.repeat(levels, 50) * (rng.random(len(levels) * 50) < busy)
        truth = float(np.maximum(samples / (42 / 108), 1.0).mean())
        found = slow_down(run(samples.mean(), busy=float((samples > 0).mean())), SliceShare(42 / 108, 0.5))
        errors.append(found / truth - 1)
    assert max(map(abs, errors)) < 0.34
    assert np.mean(np.abs(errors)) < 0.1


def test_what_is_not_known_is_no_zero() -> None:
    assert activity_of(NAN, 0.1, 0.5, A100) is None
    assert activity_of(0.1, NAN, 0.5, A100) is None
    assert activity_of(0.0, 0.0, 0.9, A100) is None  # the profiling counters are dead: the GPU was busy
    assert activity_of(0.1, 0.1, 0.5, A100, has_fault=True) is None
    assert activity_of(1.5, 0.1, 0.5, A100) is None
    assert activity_of(0.3, 0.1, NAN, A100) == Activity(0.3, 0.1, 0.3, A100)  # full while it was active


def test_runs_on_a_slice_are_read_as_shares_of_the_whole_gpu() -> None:
    slice_ = SLICES[2]
    found = activity_of(0.5, 0.4, 1.0, A100, slice_)
    assert found == Activity(pytest.approx(0.5 * 28 / 108), pytest.approx(0.4 * 2 / 8), 1.0, A100)
    assert activity_of(0.95, 0.4, 1.0, A100, slice_) is None  # it may have needed more
    assert activity_of(0.45, 0.1, 0.48, A100, slice_) is None  # so may one that was full while it was busy
    assert activity_of(0.5, 0.4, 1.0, "", slice_) is None


def test_the_slowest_tenth_of_the_newest_runs_decides() -> None:
    quiet, busy = run(0.02), run(0.9)
    assert slow_downs([quiet] * 18 + [busy] * 2, SLICES, 5)["1g.10gb"] < 1.05
    assert slow_downs([quiet] * 17 + [busy] * 3, SLICES, 5)["1g.10gb"] > 6
    assert slow_downs([busy] * 30 + [quiet] * 20, SLICES, 5)["1g.10gb"] < 1.05  # the newest 20


def test_too_few_runs_and_other_generations_say_nothing() -> None:
    assert slow_downs([run(0.1)] * 4, SLICES, 5) == {}
    assert slow_downs([], SLICES, 1) == {}
    assert slow_downs([run(0.1, model="H100-80")] * 9, SLICES, 5) == {}
    assert slow_downs([run(0.1, model="")] * 9, SLICES, 5) == {}
    unnamed = Tier(name="u", gres="1g.12gb")  # an H100 NVL's
    assert slow_downs([run(0.1)] * 9, [unnamed], 5) == {}


def test_a_model_with_the_same_multiprocessors_is_compared_by_its_bandwidth() -> None:
    """An A100-40 has 1555 GB/s, an A100-80 2039: the same traffic is a larger share of the former's."""
    small = Tier(name="s", gpu_model="A100-40", gres="1g.5gb")
    own = slow_downs([run(0.01, 0.1, model="A100-40")] * 5, [small], 5)["s"]
    other = slow_downs([run(0.01, 0.1)] * 5, [small], 5)["s"]
    assert other > own
    larger = Tier(name="l", gpu_model=A100, gres="1g.10gb")
    assert slow_downs([run(0.01, 0.1, model="A100-40")] * 5, [larger], 5)["l"] == pytest.approx(own)
