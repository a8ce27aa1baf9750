"""Ranges of speeds: that their low ends hold where they were not fitted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from advisor.packing.speeds import Demand, Range, speed_ranges

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
    ranges = [speed_ranges([Demand(*one), Demand(*other)]) for one, other in np.stack([sm, dram], axis=2).tolist()]
    low = np.array([[each.low for each in pair] for pair in ranges])
    advised, is_light = np.asarray(low.sum(axis=1) >= 1.15), np.asarray(speeds.min(axis=1) >= 0.85)
    is_held = np.asarray((speeds >= low).all(axis=1))
    assert is_held[advised].mean() >= 0.9
    assert advised[is_light].mean() >= 0.6


def test_ranges_by_hand() -> None:
    alone = speed_ranges([Demand(0, 0), Demand(0, 0)])
    assert alone == (Range(0.77, 1.0),) * 2
    first, second = speed_ranges([Demand(1.0, 0.2), Demand(0.5, 0.9)])
    assert first == pytest.approx((0.77 / 1.54 / math.sqrt(1.5), 1 / 1.5))
    assert second == pytest.approx((0.77 / 1.6 / math.sqrt(1.5), 1 / 1.5))
