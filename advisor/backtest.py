"""Frame of all back-tests (training times, weeks, baselines, intervals), and scores of predicted durations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from almanac.units import DAY_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MIN_JOBS_OF_A_USER = 10
MAX_TRAININGS = 200
RESAMPLES = 1000
LEAST_WEEKS = 4
"""Shorter spans are drawn by the day."""


def training_times(first: float, end: float, every: float) -> list[float]:
    """Times from first to before end at which a replay trains, at most MAX_TRAININGS.

    A model trained at one of them learns from what ended before, and is tested on what comes up to the next.
    """
    spacing = max(every, math.ceil((end - first) / MAX_TRAININGS))
    times: list[float] = np.arange(first, end, spacing).tolist()
    return times


def bootstrap(values: Floats, blocks: Ints, seed: int) -> Floats:
    """Return RESAMPLES means of the values, each over whole blocks (users or days) that are drawn with replacement.

    blocks: number of the block of each value, from 0 on without gaps.
    """
    count = int(blocks.max()) + 1
    sums, sizes = np.bincount(blocks, values, count), np.bincount(blocks, minlength=count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    means: Floats = (draws @ sums) / (draws @ sizes)
    return means


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(values: Floats, blocks: Ints, seed: int) -> Interval:
    """Mean of the finite values, with an interval by bootstrap over whole blocks; NaN ends below two blocks."""
    finite = values[np.isfinite(values)]
    mean = float(finite.mean()) if len(finite) else math.nan
    if blocks.max(initial=0) < 1:
        return Interval(mean, math.nan, math.nan)
    low, high = np.percentile(bootstrap(values, blocks, seed), (2.5, 97.5)).tolist()
    return Interval(mean, low, high)


@dataclass(frozen=True)
class Rate:
    """Share of `jobs` with a 95% interval, by bootstrap over users; NaN without jobs."""

    jobs: int
    share: float
    low: float
    high: float


def rate_of(is_hit: pd.Series, users: pd.Series, seed: int = 1) -> Rate:
    """Share of true entries. Without a single one the interval ends where 2.5% of such samples would show none."""
    number = len(is_hit)
    if not number:
        return Rate(0, math.nan, math.nan, math.nan)
    user_numbers, _ = pd.factorize(users[is_hit.index], sort=True)
    low, high = np.quantile(bootstrap(is_hit.to_numpy("float64"), user_numbers, seed), [0.025, 0.975]).tolist()
    none_seen = 1 - 0.025 ** (1 / number)
    return Rate(number, float(is_hit.mean()), low, high if is_hit.any() else none_seen)


@dataclass(frozen=True)
class MethodScore:
    """The mean measure of one method. role: almanac, baseline, or control. gain: almanac's over it, above 0 if better.

    gain is None for almanac itself.
    """

    method: str
    role: str
    value: Interval
    gain: Interval | None


@dataclass(frozen=True)
class MethodComparison:
    """Methods side by side on the same units (jobs or minutes); the intervals draw whole weeks or days.

    advisor.trial gives verdicts.
    """

    measure: str
    units: int
    blocks: int
    block: str
    methods: tuple[MethodScore, ...]


def compare_methods(
    measure: str, ours: str, measured: Mapping[str, Floats], times_s: npt.ArrayLike,
    controls: Collection[str] = (), is_cost: bool = False,
) -> MethodComparison:  # fmt: skip
    """Compare what one span gave under each method.

    measured: value of each unit by method; a unit that lacks one of them is left out. times_s: of the units. controls:
    trivial methods; the others but ours are baselines. is_cost: less is better.
    """
    known = np.isfinite(np.array(list(measured.values()))).all(axis=0)
    found_s = np.asarray(times_s, dtype="float64")[known]
    is_long = len(found_s) and np.ptp(found_s) >= LEAST_WEEKS * 7 * DAY_S
    size_s = 7 * DAY_S if is_long else DAY_S
    blocks = pd.factorize((found_s - found_s.min(initial=math.inf)) // size_s)[0]

    def scored(name: str) -> MethodScore:
        role = "almanac" if name == ours else "control" if name in controls else "baseline"
        gain = (measured[ours] - measured[name])[known] * (-1 if is_cost else 1)
        over = None if name == ours else bootstrap_mean(gain, blocks, 1)
        return MethodScore(name, role, bootstrap_mean(measured[name][known], blocks, 1), over)

    methods = tuple(map(scored, measured))
    return MethodComparison(
        measure, len(found_s), int(blocks.max(initial=-1)) + 1, "weeks" if is_long else "days", methods
    )  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Rank correlations of duration and of GPU-time (Spearman), and errors of natural logarithms.

    NaN if a side of a correlation is constant, or if no job has both sides.
    """

    jobs: int
    spearman: float
    gpu_time_spearman: float
    median_abs_log_error: float
    share_within_2x: float


NOTHING = Scores(0, math.nan, math.nan, math.nan, math.nan)


def score(predicted_s: Floats, actual_s: Floats, gpu_count: Floats, is_duration: bool = True) -> Scores:
    """Score the jobs whose times are both known; NaN scores without any.

    is_duration: False for what only ranks jobs (a GPU count): its errors are NaN.
    """
    known = np.isfinite(predicted_s) & np.isfinite(actual_s)
    if not known.any():
        return NOTHING
    predicted, actual = np.maximum(predicted_s[known], 1.0), np.maximum(actual_s[known], 1.0)
    errors = np.abs(np.log(predicted) - np.log(actual))
    weighed = predicted * gpu_count[known] if is_duration else predicted
    return Scores(
        jobs=len(actual),
        spearman=spearman(predicted, actual),
        gpu_time_spearman=spearman(weighed, actual * gpu_count[known]),
        median_abs_log_error=float(np.median(errors)) if is_duration else math.nan,
        share_within_2x=float(np.mean(errors <= math.log(2))) if is_duration else math.nan,
    )


def score_of_users(
    predicted_s: Floats, actual_s: Floats, gpu_count: Floats, users: npt.NDArray[np.str_], is_duration: bool = True
) -> Scores:
    """Medians over users of their own scores, each user alike; `jobs` is how many users.

    Users with fewer than MIN_JOBS_OF_A_USER jobs are left out, and where a score is NaN from that score.
    """
    known = np.isfinite(predicted_s) & np.isfinite(actual_s)
    each = []
    for user in np.unique(users[known]):
        rows = known & (users == user)
        if rows.sum() >= MIN_JOBS_OF_A_USER:
            each.append(score(predicted_s[rows], actual_s[rows], gpu_count[rows], is_duration))
    middles = [
        _median_known([getattr(scores, name) for scores in each]) for name in Scores.__annotations__ if name != "jobs"
    ]
    return Scores(len(each), *middles)


def _median_known(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation, ties at their mean rank; NaN below two values or where a side is constant."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return math.nan
    return float(np.corrcoef(ranks(left), ranks(right))[0, 1])


def ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    ranked: Floats = np.asarray(pd.Series(values).rank(), dtype="float64")
    return ranked
