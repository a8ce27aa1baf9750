"""Blend estimates of a duration, and put an interval around them.

People are told the median of the last runs of the same job, unless LightGBM's middle is clearly better. The queue is
ranked by LightGBM's mean, its percentile, and the user's habit. "helios" in place of both is the paper's own blend,
w · rolling estimate + (1 - w) · LightGBM (Hu et al., SC'21, 4.2.2).

Intervals are split-conformal, by the error that LightGBM expects of a job's last runs (Vovk, Gammerman and Shafer 2005,
by class). Their proof asks for exchangeable jobs. Those of one burst share their fate: each weighs 1 / √(jobs of its
burst), so that no burst of hundreds is the whole evidence. And users change what they do: a job's weight halves for
each HALF_LIFE_S that it ended before the newest one, down to LEAST_WEIGHT of it (Barber, Candes, Ramdas and Tibshirani
2023, Conformal prediction beyond exchangeability).

advisor/duration/rank.py turns the ranking value into the order of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.backtest import Floats, ranks
from advisor.duration.features import Features
from advisor.duration.replay import DurationReplay
from almanac.config import Predictor, Training

WEIGHT_STEP = 0.1
MAX_HABIT = 0.5
"""Most weight of habit in the queue: if users change what they do, habit ranks them by what they no longer do."""
MAX_PERCENTILE = 0.5
"""Most weight of the percentile among LightGBM's own."""
CLEARLY = 3
"""Standard errors by which LightGBM must be better than the last runs."""


@dataclass(frozen=True)
class BlendWeights:
    """Shares of a blend, 0..1; LightGBM has the rest."""

    habit: float = 0.0
    last_runs: float = 0.0
    rolling: float = 0.0
    percentile: float = 0.0

    @property
    def model(self) -> float:
        return max(1.0 - self.habit - self.last_runs - self.rolling - self.percentile, 0.0)


PEOPLE = (BlendWeights(last_runs=1.0), BlendWeights(last_runs=0.5), BlendWeights())
"""Blends that people can be told, the simplest first."""


@dataclass(frozen=True)
class Parts:
    """The estimates that are blended: seconds, one per job; NaN where there is none.

    log_error: the |log error| that is expected of the last runs.
    """

    mean_s: Floats
    percentile_s: Floats
    middle_s: Floats
    log_error: Floats
    habit_s: Floats
    last_runs_s: Floats
    rolling_s: Floats


def point(predictor: Predictor, weights: BlendWeights, parts: Parts) -> Floats:
    """The prediction for people, seconds."""
    if predictor == "helios":
        return _helios(weights, parts)
    return blend(
        [(weights.model, parts.middle_s), (weights.habit, parts.habit_s), (weights.last_runs, parts.last_runs_s)]
    )


def ranking(predictor: Predictor, weights: BlendWeights, parts: Parts) -> Floats:
    """The value that ranks the queue, seconds."""
    if predictor == "helios":
        return _helios(weights, parts)
    return blend(
        [(weights.model, parts.mean_s), (weights.percentile, parts.percentile_s), (weights.habit, parts.habit_s)]
    )


def _helios(weights: BlendWeights, parts: Parts) -> Floats:
    rolling_s = np.where(np.isnan(parts.rolling_s), parts.mean_s, parts.rolling_s)
    seconds: Floats = weights.rolling * rolling_s + weights.model * parts.mean_s
    return seconds


def blend(weighted: Iterable[tuple[float, Floats]]) -> Floats:
    """Weighted mean of logarithms of what is known, seconds; where that has no weight, the first."""
    shares, seconds = zip(*weighted, strict=True)
    values = np.log(np.maximum(np.stack(seconds), 1.0))
    known = np.array(shares)[:, None] * np.isfinite(values)
    total = known.sum(axis=0)
    mean = (known * np.nan_to_num(values)).sum(axis=0) / np.where(total > 0, total, 1.0)
    blended: Floats = np.exp(np.where(total > 0, mean, values[0]))
    return blended


def clip_to_limit(predicted_s: Floats, features: Features) -> Floats:
    """Clip predictions to at least 1 s, and to the time limit if one is set."""
    limit_s = np.exp(features.number("log_time_limit"))
    clipped: Floats = np.maximum(np.fmin(predicted_s, limit_s), 1.0)
    return clipped


def choose_weights(parts: Parts, newest: DurationReplay, config: Training) -> tuple[BlendWeights, BlendWeights]:
    """Choose the weights for people and for the queue, on jobs that LightGBM had not seen."""

    places = _standard(ranks(newest.duration_s))

    def losses(is_queue: bool, choices: Sequence[BlendWeights]) -> Floats:
        """(choices, jobs)."""
        estimate = ranking if is_queue else point
        predicted = (clip_to_limit(estimate(config.predictor, each, parts), newest.features) for each in choices)
        if is_queue:
            # Job by job, so that their mean is 1 - Spearman's rank correlation; a constant prediction has none.
            return np.array([1.0 - _standard(ranks(each)) * places for each in predicted])
        return np.array([_error_losses(each, newest.duration_s) for each in predicted])

    grid = [round(float(each), 10) for each in np.arange(0.0, 1.0 + WEIGHT_STEP / 2, WEIGHT_STEP)]
    if config.predictor == "helios":
        choices = [BlendWeights(rolling=each) for each in grid]
        people, queue = (choices[_near_best(losses(is_queue, choices), 1.0)[-1]] for is_queue in (False, True))
        return people, queue
    most = {habit: (1 - habit) * MAX_PERCENTILE + 1e-9 for habit in grid}
    pairs = [(habit, percentile) for habit in grid for percentile in grid if percentile <= most[habit]]
    near = _near_best(losses(True, [BlendWeights(habit, percentile=each) for habit, each in pairs]), 2.0)
    people = PEOPLE[_clearly_better(losses(False, PEOPLE), newest.bursts())]
    habit, percentile = np.mean([pairs[place] for place in near], axis=0).tolist()
    return people, BlendWeights(min(habit, MAX_HABIT), percentile=percentile)


def unproven(config: Training) -> tuple[BlendWeights, BlendWeights]:
    """Return the weights for people and for the queue to use if there are too few jobs to choose on."""
    if config.predictor == "helios":
        return (BlendWeights(),) * 2
    return PEOPLE[0], BlendWeights(habit=MAX_HABIT)


def _near_best(losses: Floats, errors: float) -> list[int]:
    """Places of the choices within so many standard errors of the best, of the paired difference.

    losses: (choices, jobs).
    """
    paired = losses - losses[int(np.argmin(np.round(losses.mean(axis=1), 9)))]
    near = paired.mean(axis=1) <= errors * paired.std(axis=1) / np.sqrt(losses.shape[1]) + 1e-9
    return [int(place) for place in np.flatnonzero(near)]


def _clearly_better(losses: Floats, bursts: npt.NDArray[np.int64]) -> int:
    """Place of the best choice that is better than the first by CLEARLY standard errors; 0 without one.

    losses: (choices, jobs). Errors are those of independent bursts with a mean of 0: jobs of one share their fate.
    """
    paired = losses - losses[0]
    means = paired.mean(axis=1)
    sums = np.array([np.bincount(bursts, each) for each in paired])
    is_better = means + CLEARLY * np.sqrt((sums**2).sum(axis=1)) / len(bursts) < 0
    return int(np.argmin(np.where(is_better, means, 0.0)))


def _error_losses(predicted_s: Floats, actual_s: Floats) -> Floats:
    """log(1 + |log error|): of the few that are far off, how far hardly matters."""
    losses: Floats = np.log1p(np.abs(np.log(predicted_s) - np.log(np.maximum(actual_s, 1.0))))
    return losses


def _standard(values: Floats) -> Floats:
    spread = values.std()
    standard: Floats = (values - values.mean()) / (spread if spread > 0 else 1.0)
    return standard


COVERAGE = 0.8
"""Share of jobs that end inside the interval of their predicted duration: what the advice calls usual."""
CLASSES, CLASS_JOBS, MIN_RESIDUALS = 3, 100, 30
"""Most classes of jobs, of equal weight, by the error expected; mean jobs of one, and least residuals."""
HALF_LIFE_S, LEAST_WEIGHT = 36 * 3600, 0.05
"""Compared on both parts of the Helios and Mason traces; no unseen trace confirms it (docs/predictor-trials.md)."""
OVER_LIMIT_S = 60
"""Slurm ends a job up to about so long after its time limit."""


class Margin(NamedTuple):
    """Log residuals between which the share `coverage` ended, of jobs with at least this error expected (log)."""

    from_error: float
    low: float
    high: float


def at_limit(duration_s: Floats, features: Features) -> Floats:
    """Return durations where those that ended within OVER_LIMIT_S after their time limit count as the limit."""
    limit_s = np.exp(features.number("log_time_limit"))
    is_at = (duration_s > limit_s) & (duration_s <= limit_s + OVER_LIMIT_S)
    return np.where(is_at, limit_s, duration_s)


def conformal_margins(
    point_s: Floats, log_error: Floats, newest: DurationReplay, coverage: float
) -> tuple[Margin, ...]:
    """Return the margins that bound the share `coverage` of the next jobs, the least error first.

    If n jobs of a class ended at once, each a burst of its own, a side is the ceil((n + 1)(1 + coverage) / 2)-th
    residual from the other end, or the outermost.
    """
    residuals = np.log(np.maximum(at_limit(newest.duration_s, newest.features), 1.0)) - np.log(point_s)
    bursts = newest.bursts()
    age_s = newest.end_s.max() - newest.end_s
    weights = np.maximum(np.exp2(-age_s / HALF_LIFE_S), LEAST_WEIGHT) / np.sqrt(np.bincount(bursts)[bursts])
    order = np.argsort(log_error, kind="stable")
    reached, classes = np.cumsum(weights[order]), max(min(CLASSES, len(newest) // CLASS_JOBS), 1)
    places = np.searchsorted(reached, reached[-1] * np.arange(1, classes) / classes)
    inner = np.unique(log_error[order[places]])
    edges = np.array([-math.inf, *inner[inner > log_error.min()].tolist()])
    found = []
    for number, edge in enumerate(edges.tolist()):
        rows = np.searchsorted(edges, log_error, "right") == number + 1
        rows = rows if rows.sum() >= MIN_RESIDUALS else np.full(len(newest), True)
        lower, upper = (_upper(side * residuals[rows], weights[rows], coverage) for side in (-1, 1))
        found.append(Margin(edge, min(-lower, 0.0), max(upper, 0.0)))
    return tuple(found)


def around(point_s: Floats, log_error: Floats, margins: Sequence[Margin]) -> tuple[Floats, Floats]:
    """Return both ends of the intervals around these points, seconds; the points themselves without margins."""
    known = np.array(margins or [Margin(-math.inf, 0.0, 0.0)])
    own = known[np.maximum(np.searchsorted(known[:, 0], log_error, "right") - 1, 0)]
    return point_s * np.exp(own[:, 1]), point_s * np.exp(own[:, 2])


def _upper(residuals: Floats, weights: Floats, coverage: float) -> float:
    """The weighted quantile (1 + coverage) / 2, where the next job weighs as much as the heaviest."""
    order = np.argsort(residuals, kind="stable")
    reached = np.cumsum(weights[order]) / (weights.sum() + weights.max())
    place = int(np.searchsorted(reached, (1 + coverage) / 2 - 1e-12))
    return float(residuals[order[min(place, len(order) - 1)]])
