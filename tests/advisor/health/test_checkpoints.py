"""MTTF intervals, chances of failure, and Daly's interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from advisor.health.checkpoints import (
    Exposure,
    FailureRate,
    advise_checkpoints,
    chance_of_failure,
    failure_rate,
    mttf_by_gpus,
    mttf_interval,
    save_every_s,
)


@pytest.mark.parametrize("failures", [4.0, 20.0, 100.0])
def test_the_interval_holds_the_truth_in_95_of_100(failures: float) -> None:
    counts = np.random.default_rng(1).poisson(failures, 2000)
    held = sum(low <= 1 <= high for low, high in (mttf_interval(int(n), failures) for n in counts))
    assert 0.93 < held / 2000 < 0.98


def test_no_failure_has_no_upper_end() -> None:
    only = mttf_by_gpus([Exposure(4, 100, 0), Exposure(3, 50, 0)])
    assert [(each.from_gpus, each.to_gpus, each.hours, each.mttf_h) for each in only] == [(3, 4, 150, None)]
    assert 0 < only[0].low_h < 150 < only[0].high_h == math.inf


def test_sizes_are_powers_of_two_and_odd_values_are_left_out() -> None:
    rows = [Exposure(1, 10, 1), Exposure(2, 10, 0), Exposure(9, 10, 2), Exposure(0, 9, 9), Exposure(8, math.nan, 1)]
    assert [(each.from_gpus, each.to_gpus) for each in mttf_by_gpus(rows)] == [(1, 1), (2, 2), (9, 16)]
    assert failure_rate(rows) == FailureRate(3, 10 + 20 + 90)


def test_daly_loses_least() -> None:
    mttf_s, cost_s = 8 * 3600.0, 300.0

    def wall(work_s: float) -> float:  # Daly's equation 20, without the restart
        return mttf_s * math.expm1((work_s + cost_s) / mttf_s) / work_s

    best = min(range(60, 20000, 10), key=wall)
    assert save_every_s(cost_s, mttf_s) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("cost_s", [10.0, 240.0, 300.0, 700.0, 1e5])
def test_the_work_between_checkpoints_takes_as_long_as_one_at_least(cost_s: float) -> None:
    assert save_every_s(cost_s, 300) >= cost_s
    advice = advise_checkpoints(FailureRate(12, 1), 1, 1e6, cost_s)
    assert advice is not None and advice.every_s >= advice.cost_s


def test_only_long_large_jobs_are_told() -> None:
    rate = FailureRate(20, 200_000)
    advice = advise_checkpoints(rate, 64, 24 * 3600, 300)
    assert advice is not None
    assert advice.mttf_s == pytest.approx(156.25 * 3600)
    assert advice.chance == pytest.approx(1 - math.exp(-24 / 156.25))
    assert advise_checkpoints(rate, 1, 24 * 3600, 300) is None
    assert advise_checkpoints(rate, 64, None, 300) is None
    assert advise_checkpoints(FailureRate(2, 10), 64, 24 * 3600, 300) is None
    assert chance_of_failure(100, -5) == 0
