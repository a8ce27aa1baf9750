"""Generated memory series of jobs, for benchmarks/mig_restart.py: shapes, noise, sampling, holes, preallocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CAPACITIES_MIB = (4864.0, 9728.0, 19968.0, 40192.0)
"""Of 1g, 2g, 3g and 7g of an A100-40."""
INTERVALS_S = (1.0, 5.0, 10.0, 15.0, 30.0, 60.0)
NOISES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)
"""Standard deviation, as a share of the capacity."""


@dataclass(frozen=True)
class Series:
    """One run as it would go without a restart. used_mib: NaN where a sample is lost; ends at the out-of-memory end.

    run_s: how long the run would take if it fitted; oom_s: when it runs out of memory, None where it fits.
    start_share: the level at the start, as a share of the capacity.
    """

    shape: str
    times_s: np.ndarray
    used_mib: np.ndarray
    capacity_mib: float
    run_s: float
    oom_s: float | None
    start_share: float


Shape = Callable[[np.ndarray, float, float, np.random.Generator], np.ndarray]
"""Of x in (0, 1), the level at the start, and the level at the end or the peak: the use, as a share of the capacity."""


def _linear(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    return low + (high - low) * x


def _staircase(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    """Linear growth below a caching allocator, which reserves in chunks."""
    chunk = rng.uniform(0.005, 0.05)
    return low + np.ceil((high - low) * x / chunk) * chunk


def _saturating(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    scale = rng.uniform(0.05, 0.5)
    return low + (high - low) * -np.expm1(-x / scale) / -np.expm1(-1 / scale)


def _log(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    scale = 10 ** rng.uniform(-2.5, -0.5)
    return low + (high - low) * np.log1p(x / scale) / np.log1p(1 / scale)


def _sawtooth(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    """Rises and collapses: 4 to 60 teeth, whose tops differ by up to 5%."""
    phase = x * rng.uniform(4, 60) + rng.uniform(0, 1)
    tops = rng.uniform(0.95, 1.0, 64)[phase.astype(int)]
    return low + (high - low) * tops * (phase % 1.0)


def _step(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    steps = rng.integers(1, 5)
    parts = rng.dirichlet(np.ones(steps)) * (high - low)
    times = rng.uniform(0.02, 0.98, steps)
    return low + sum(part * (x >= at) for part, at in zip(parts, times, strict=True))


def _flat(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    """At one level after it has loaded; two of five preallocate 75% to 95% of the memory from the start."""
    if rng.random() < 0.4:
        return np.full_like(x, rng.uniform(0.75, 0.95))
    return high * np.minimum(1.0, 0.3 + x / rng.uniform(0.002, 0.06))


def _phases(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> np.ndarray:
    """Flat training, and evaluation that uses more every N minutes."""
    phase = (x * rng.uniform(2, 40) + rng.uniform(0, 1)) % 1.0
    return np.where(phase < rng.uniform(0.03, 0.4), high, low)


SHAPES: dict[str, Shape] = {
    "linear": _linear,
    "sawtooth": _sawtooth,
    "flat": _flat,
    "saturating": _saturating,
    "step": _step,
    "log": _log,
    "staircase": _staircase,
    "phases": _phases,
}


def _noise(size: int, capacity_share: float, rng: np.random.Generator) -> np.ndarray:
    """White noise; in one of three runs each value also keeps 80% of the one before."""
    white = rng.normal(0.0, capacity_share, size)
    if rng.random() < 2 / 3:
        return white
    kept = np.empty(size)
    last = 0.0
    for index, value in enumerate(white):
        last = 0.8 * last + 0.6 * value
        kept[index] = last
    return kept


def _lost(size: int, rng: np.random.Generator) -> np.ndarray:
    """Which samples are missing: in half of the runs some, in a third one or two holes of up to a fifth of the run."""
    lost = rng.random(size) < (rng.uniform(0, 0.3) if rng.random() < 0.5 else 0.0)
    if rng.random() < 1 / 3:
        for _ in range(rng.integers(1, 3)):
            at, length = rng.integers(0, size), rng.integers(1, max(2, size // 5))
            lost[at : at + length] = True
    return lost


def series_of(shape: str, fits: bool, seed: int, least_peak: float = 0.5) -> Series:
    """A run whose memory fits, with a peak of at least least_peak of the capacity, or does not fit.

    Raises ValueError where the shape is always one of both.
    """
    rng = np.random.default_rng([list(SHAPES).index(shape), int(fits), seed])
    for _ in range(1000):
        found = _one(shape, fits, rng, least_peak)
        if (found.oom_s is None) == fits:
            return found
    raise ValueError(f"{shape}: no series that {'fits' if fits else 'does not fit'}")


def _one(shape: str, fits: bool, rng: np.random.Generator, least_peak: float) -> Series:
    capacity = float(rng.choice(CAPACITIES_MIB))
    interval = float(rng.choice(INTERVALS_S))
    samples = int(10 ** rng.uniform(np.log10(60), np.log10(3000)))
    x = (np.arange(samples) + rng.random()) / samples
    low = rng.uniform(0.3, 0.75)
    high = rng.uniform(max(low, least_peak), 1.0) if fits else rng.uniform(1.02, 2.0)
    noise = _noise(samples, float(rng.choice(NOISES)), rng)
    share = np.maximum(SHAPES[shape](x, low, high, rng) + noise, 0.0)
    times = x * samples * interval
    over = np.flatnonzero(share > 1.0)
    end = int(over[0]) if len(over) else samples
    used = np.where(_lost(samples, rng), np.nan, share * capacity)[:end]
    return Series(shape, times[:end], used, capacity, samples * interval,
                  float(times[end]) if end < samples else None, low)  # fmt: skip
