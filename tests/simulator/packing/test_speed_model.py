"""Stragglers, sample stealing, and squeezing: known answers and bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from batch_shares import split_batch

from simulator.traces.packing import (
    SHARES,
    relieved_speed,
    squeeze_pair,
    squeezed_speed,
    stealing_speed,
    straggling_speed,
)


def test_a_synchronous_job_waits_for_its_slowest_worker() -> None:
    assert straggling_speed([1.0, 1.0, 0.5, 1.0]) == 0.5


def whole_sample_speed(workers: list[float], batch: int) -> float:
    """Speed with the batches that UnequalSampler plans: each step ends with its last worker."""
    batches = split_batch(batch, workers)
    return batch / len(workers) / max(count / speed for count, speed in zip(batches, workers, strict=True))


def test_stealing_ends_all_workers_together() -> None:
    """Speeds 1, 1, 1, .5 with 28 samples: 8, 8, 8, and 4, a step of 8 units instead of 14 (28 / 4 at .5)."""
    workers = [1.0, 1.0, 1.0, 0.5]
    assert stealing_speed(workers) == whole_sample_speed(workers, 28) == 0.875


def test_whole_samples_never_beat_the_model_and_come_close_to_it() -> None:
    rng = np.random.default_rng(4)
    for _ in range(500):
        workers = rng.uniform(0.05, 1.0, int(rng.integers(1, 9))).tolist()
        ideal = stealing_speed(workers)
        assert whole_sample_speed(workers, int(rng.integers(len(workers), 300))) <= ideal + 1e-9
        assert whole_sample_speed(workers, 100_000) == pytest.approx(ideal, rel=2e-2)


def test_no_worker_loses_by_its_partners_limit_or_gains_by_its_own() -> None:
    for free, used in product((0.2, 0.5, 0.9, 1.0), (0.05, 0.5, 1.0)):
        own = [squeezed_speed(free, share, used) for share in SHARES]
        partner = [relieved_speed(free, share) for share in SHARES]
        assert own[0] == pytest.approx(free) and partner[0] == pytest.approx(free)
        assert own == sorted(own, reverse=True) and partner == sorted(partner)
        assert own[-1] > 0 and partner[-1] <= 1


def test_a_pair_is_squeezed_only_where_the_sum_grows() -> None:
    rng = np.random.default_rng(8)
    for _ in range(200):
        free = (float(rng.uniform(0.2, 1)), float(rng.uniform(0.2, 1)))
        used = (float(rng.uniform(0.05, 1)), float(rng.uniform(0.05, 1)))
        both = squeeze_pair(free, used)
        assert sum(both) >= sum(free) - 1e-8
        assert max(both) <= 1
    assert squeeze_pair((0.4, 0.9), (0.9, 0.1))[0] > 0.4, "a light job that hurts another one is squeezed"
    assert squeeze_pair((1.0, 1.0), (0.5, 0.5)) == (1.0, 1.0)
