"""Early restart on generated memory series: jobs restarted in vain, and time saved on those that do not fit.

Run: make bench-mig, or benchmarks/mig_restart.py [SEEDS]. Series are those of memory_series.py, with seeds that no
parameter was chosen on (choices were made on seeds below 1,000 and from 100,000 to 100,099). A false restart is one
of a job that would have fitted. The waste of an out-of-memory end is the time from the start to it; what an early
restart saves is the time from the restart to it. The goals assume a known run time; further figures show what a
prediction, or a time limit, costs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from figures import Figure, at_least, at_most, main

from advisor.memory.restart import USE_SHARE, Z_ONE_SIDED, ExpectedEnd, GrowthWatch

CAPACITIES_MIB = (4864.0, 9728.0, 19968.0, 40192.0)
"""Capacities of 1g, 2g, 3g, and 7g of an A100-40."""
INTERVALS_S = (1.0, 5.0, 10.0, 15.0, 30.0, 60.0)
NOISES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)
"""Standard deviation, as a share of the capacity."""


@dataclass(frozen=True)
class MemorySeries:
    """One run as it would go without a restart. used_mib: NaN where a sample is lost; ends at the out-of-memory end.

    run_s: the run time if it fitted; oom_s: when it runs out of memory, None if it fits.
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
"""Use as a share of the capacity, from x in (0, 1), the level at the start, and the level at the end or the peak."""


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
    """Draw the samples that are missing: in half of the runs some, in a third one or two holes of up to a fifth of the
    run.
    """
    lost = rng.random(size) < (rng.uniform(0, 0.3) if rng.random() < 0.5 else 0.0)
    if rng.random() < 1 / 3:
        for _ in range(rng.integers(1, 3)):
            at, length = rng.integers(0, size), rng.integers(1, max(2, size // 5))
            lost[at : at + length] = True
    return lost


def series_of(shape: str, fits: bool, seed: int, least_peak: float = 0.5) -> MemorySeries:
    """A run whose memory fits, with a peak of at least least_peak of the capacity, or does not fit.

    Raises ValueError where the shape is always one of both.
    """
    rng = np.random.default_rng([list(SHAPES).index(shape), int(fits), seed])
    for _ in range(1000):
        found = _one(shape, fits, rng, least_peak)
        if (found.oom_s is None) == fits:
            return found
    raise ValueError(f"{shape}: no series that {'fits' if fits else 'does not fit'}")


def _one(shape: str, fits: bool, rng: np.random.Generator, least_peak: float) -> MemorySeries:
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
    return MemorySeries(shape, times[:end], used, capacity, samples * interval,
                  float(times[end]) if end < samples else None, low)  # fmt: skip


FIRST_SEED = 500_000
FALSE_GOALS = {"linear": 0.05, "sawtooth": 0.05, "flat": 0.05, "saturating": 0.2, "step": 0.2, "log": 0.2}
SAVED_GOAL = 0.4
GROWING = ("linear", "staircase", "saturating", "log", "step")
STARTS = ((0.3, 0.45), (0.45, 0.6), (0.6, 0.75))
TIGHT = 0.85
SPREAD = 0.5
"""Error of the logarithm of the predicted run time, if it is not exact."""
Restart = Callable[[MemorySeries], float | None]
"""Return the time of a rule's restart, in s since the job's start; None without one."""


def guarded(series: MemorySeries, run_time: ExpectedEnd) -> float | None:
    watch = GrowthWatch(series.capacity_mib, run_time)
    samples = zip(series.times_s.tolist(), series.used_mib.tolist(), strict=True)
    return next((at for at, used in samples if watch.observe(at, used) is not None), None)


def with_exact_time(series: MemorySeries) -> float | None:
    return guarded(series, ExpectedEnd(predicted_s=series.run_s))


def with_time_limit(series: MemorySeries) -> float | None:
    """Limits are 1 to 5 times the run time."""
    factor = np.random.default_rng(len(series.times_s)).uniform(1, 5)
    return guarded(series, ExpectedEnd(limit_s=series.run_s * factor))


def with_predicted_time(series: MemorySeries) -> float | None:
    rng = np.random.default_rng(len(series.times_s))
    predicted_s, factor = series.run_s * np.exp(rng.normal(0, SPREAD)), rng.uniform(1, 5)
    return guarded(series, ExpectedEnd(predicted_s, SPREAD, series.run_s * factor))


def paper(series: MemorySeries) -> float | None:
    """The paper's line and its upper 99% at the end of the run, on all samples so far, from the third on."""
    known = np.isfinite(series.used_mib)
    t, y = series.times_s[known], series.used_mib[known]
    n = np.arange(1, len(t) + 1)
    mean_t, mean_y = np.cumsum(t) / n, np.cumsum(y) / n
    spread = np.maximum(np.cumsum(t * t) - n * mean_t**2, 1e-9)
    both = np.cumsum(t * y) - n * mean_t * mean_y
    error = np.maximum(np.cumsum(y * y) - n * mean_y**2 - both**2 / spread, 0.0)
    sigma = np.sqrt(error / np.maximum(n - 2, 1))
    peak = mean_y + both / spread * (series.run_s - mean_t) + Z_ONE_SIDED * sigma
    over = np.flatnonzero((n >= 3) & (peak > series.capacity_mib))
    return float(t[over[0]]) if len(over) else None


def false_share(shape: str, seeds: Iterable[int], rule: Restart, least_peak: float = 0.5) -> float:
    return float(np.mean([rule(series_of(shape, True, seed, least_peak)) is not None for seed in seeds]))


def saved_share(runs: Iterable[MemorySeries], rule: Restart) -> float:
    """Return the share saved of the time that out-of-memory ends would waste; NaN without runs."""
    ends = [(series.oom_s, rule(series)) for series in runs if series.oom_s]
    waste = sum(oom for oom, _ in ends)
    return sum(oom - at for oom, at in ends if at is not None) / waste if waste else float("nan")


def at_use(series: MemorySeries) -> float | None:
    """Return the first time at which the use guard allows a restart: no rule with that guard saves more."""
    reached = np.flatnonzero(series.used_mib >= USE_SHARE * series.capacity_mib)
    return float(series.times_s[reached[0]]) if len(reached) else None


def measured(count: int) -> list[Figure]:
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    figures = []
    for shape in SHAPES:
        goal = FALSE_GOALS.get(shape)
        share = false_share(shape, seeds, with_exact_time)
        figures.append(at_most(f"{shape}: false restarts", share, goal))
        figures.append(Figure(f"{shape}: false restarts, the paper's rule alone", false_share(shape, seeds, paper)))
        tight = false_share(shape, seeds, with_exact_time, TIGHT)
        figures.append(Figure(f"{shape}: false restarts, peaks of {TIGHT:.0%} and more alone", tight))
    for shape in GROWING:
        runs = [series_of(shape, False, seed) for seed in seeds]
        share, goal = saved_share(runs, with_exact_time), SAVED_GOAL if shape == "linear" else None
        figures.append(at_least(f"{shape}: saved of the wasted time", share, goal))
        figures.append(Figure(f"{shape}: the most that the use guard allows", saved_share(runs, at_use)))
        if shape == "linear":
            figures += by_start(runs)
    return figures + other_times(seeds)


def by_start(runs: list[MemorySeries]) -> list[Figure]:
    figures = []
    for low, high in STARTS:
        some = [series for series in runs if low <= series.start_share < high]
        about = f"linear from {low:.0%} to {high:.0%} of the capacity"
        figures.append(Figure(f"{about}: saved", saved_share(some, with_exact_time)))
        figures.append(Figure(f"{about}: the most that the use guard allows", saved_share(some, at_use)))
    return figures


def other_times(seeds: range) -> list[Figure]:
    figures = []
    rules = (("a time limit alone", with_time_limit), (f"a predicted time, spread {SPREAD}", with_predicted_time))
    for about, rule in rules:
        runs = (series_of("linear", False, seed) for seed in seeds)
        figures.append(Figure(f"linear, {about}: false restarts", false_share("linear", seeds, rule)))
        figures.append(Figure(f"linear, {about}: saved", saved_share(runs, rule)))
    return figures


def measure() -> list[Figure]:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    started = time.perf_counter()
    figures = measured(count)
    return [*figures, Figure(f"{count} seeds a shape, s", time.perf_counter() - started)]


if __name__ == "__main__":
    main(measure)
