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

import numpy as np
from figures import Figure, at_least, at_most, main
from memory_series import SHAPES, Series, series_of

from advisor.memory.allocator import Z_ONE_SIDED
from advisor.memory.growth import USE_SHARE, GrowthWatch, RunTime

FIRST_SEED = 500_000
FALSE_GOALS = {"linear": 0.05, "sawtooth": 0.05, "flat": 0.05, "saturating": 0.2, "step": 0.2, "log": 0.2}
SAVED_GOAL = 0.4
GROWING = ("linear", "staircase", "saturating", "log", "step")
STARTS = ((0.3, 0.45), (0.45, 0.6), (0.6, 0.75))
TIGHT = 0.85
SPREAD = 0.5
"""Of the logarithm of the predicted run time, where it is not exact."""
Restart = Callable[[Series], float | None]
"""When a rule restarts the job, in s since its start; None where it does not."""


def guarded(series: Series, run_time: RunTime) -> float | None:
    watch = GrowthWatch(series.capacity_mib, run_time)
    samples = zip(series.times_s.tolist(), series.used_mib.tolist(), strict=True)
    return next((at for at, used in samples if watch.observe(at, used) is not None), None)


def with_exact_time(series: Series) -> float | None:
    return guarded(series, RunTime(predicted_s=series.run_s))


def with_time_limit(series: Series) -> float | None:
    """Limits are 1 to 5 times the run time."""
    factor = np.random.default_rng(len(series.times_s)).uniform(1, 5)
    return guarded(series, RunTime(limit_s=series.run_s * factor))


def with_predicted_time(series: Series) -> float | None:
    rng = np.random.default_rng(len(series.times_s))
    predicted_s, factor = series.run_s * np.exp(rng.normal(0, SPREAD)), rng.uniform(1, 5)
    return guarded(series, RunTime(predicted_s, SPREAD, series.run_s * factor))


def paper(series: Series) -> float | None:
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


def saved_share(runs: Iterable[Series], rule: Restart) -> float:
    """Of the time that out-of-memory ends would waste; NaN without runs."""
    ends = [(series.oom_s, rule(series)) for series in runs if series.oom_s]
    waste = sum(oom for oom, _ in ends)
    return sum(oom - at for oom, at in ends if at is not None) / waste if waste else float("nan")


def at_use(series: Series) -> float | None:
    """When the use guard first allows a restart: no rule with that guard saves more."""
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


def by_start(runs: list[Series]) -> list[Figure]:
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
