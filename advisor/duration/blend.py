"""Weighted means of what is known of a duration, and how much each part weighs.

People are told the median of the last runs of the same job, unless LightGBM's middle is clearly better. The queue is
ranked by LightGBM's mean and the user's habit. "helios" in place of both is the paper's own blend, w · rolling estimate
+ (1 - w) · LightGBM (helios-qssf-ces, 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.duration.features import Features
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats, ranks
from almanac.config import Predictor, Training

WEIGHT_STEP = 0.1
MAX_HABIT = 0.5
"""In the queue: where users change what they do, habit ranks them by what they no longer do."""
CLEARLY = 3
"""Standard errors by which LightGBM must be better than the last runs."""


@dataclass(frozen=True)
class Weights:
    """Shares of a blend, 0..1; LightGBM has the rest."""

    habit: float = 0.0
    last_runs: float = 0.0
    rolling: float = 0.0

    @property
    def model(self) -> float:
        return max(1.0 - self.habit - self.last_runs - self.rolling, 0.0)


PEOPLE = (Weights(last_runs=1.0), Weights(last_runs=0.5), Weights())
"""What people can be told, the simplest first."""


@dataclass(frozen=True)
class Parts:
    """The estimates that are blended: seconds, one per job; NaN where there is none."""

    mean_s: Floats
    middle_s: Floats
    habit_s: Floats
    last_runs_s: Floats
    rolling_s: Floats


def point(predictor: Predictor, weights: Weights, parts: Parts) -> Floats:
    """The prediction for people, seconds."""
    if predictor == "helios":
        return _helios(weights, parts)
    return blend(
        [(weights.model, parts.middle_s), (weights.habit, parts.habit_s), (weights.last_runs, parts.last_runs_s)]
    )


def ranking(predictor: Predictor, weights: Weights, parts: Parts) -> Floats:
    """The value that ranks the queue, seconds."""
    if predictor == "helios":
        return _helios(weights, parts)
    return blend([(weights.model, parts.mean_s), (weights.habit, parts.habit_s)])


def _helios(weights: Weights, parts: Parts) -> Floats:
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
    """At least 1 s, and not above the time limit where one is set."""
    limit_s = np.exp(features.number("log_time_limit"))
    clipped: Floats = np.maximum(np.fmin(predicted_s, limit_s), 1.0)
    return clipped


def choose_weights(parts: Parts, newest: DurationReplay, config: Training) -> tuple[Weights, Weights]:
    """For people and for the queue, from jobs that LightGBM had not seen."""

    def losses(is_queue: bool, choices: Sequence[Weights]) -> Floats:
        """(choices, jobs)."""
        estimate, losses_of = (ranking, _rank_losses) if is_queue else (point, _error_losses)
        predicted = (clip_to_limit(estimate(config.predictor, each, parts), newest.features) for each in choices)
        return np.array([losses_of(each, newest.duration_s) for each in predicted])

    grid = [round(float(each), 10) for each in np.arange(0.0, 1.0 + WEIGHT_STEP / 2, WEIGHT_STEP)]
    if config.predictor == "helios":
        choices = [Weights(rolling=each) for each in grid]
        people, queue = (choices[_near_best(losses(is_queue, choices), 1.0)[-1]] for is_queue in (False, True))
        return people, queue
    near = _near_best(losses(True, [Weights(each) for each in grid]), 2.0)
    people = PEOPLE[_clearly_better(losses(False, PEOPLE), newest.bursts())]
    return people, Weights(min(float(np.mean([grid[place] for place in near])), MAX_HABIT))


def unproven(config: Training) -> tuple[Weights, Weights]:
    """For people and for the queue, where there are too few jobs to choose on."""
    if config.predictor == "helios":
        return (Weights(),) * 2
    return PEOPLE[0], Weights(habit=MAX_HABIT)


def _near_best(losses: Floats, errors: float) -> list[int]:
    """Places of the choices within so many standard errors of the best, of the paired difference.

    losses: (choices, jobs).
    """
    paired = losses - losses[int(np.argmin(np.round(losses.mean(axis=1), 9)))]
    near = paired.mean(axis=1) <= errors * paired.std(axis=1) / np.sqrt(losses.shape[1]) + 1e-9
    return [int(place) for place in np.flatnonzero(near)]


def _clearly_better(losses: Floats, bursts: npt.NDArray[np.int64]) -> int:
    """Place of the best choice that is better than the first by CLEARLY standard errors; 0 where none is.

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


def _rank_losses(predicted_s: Floats, actual_s: Floats) -> Floats:
    """Job by job, so that their mean is 1 - Spearman's rank correlation; a constant prediction has none."""
    predicted, actual = (_standard(ranks(each)) for each in (predicted_s, actual_s))
    losses: Floats = 1.0 - predicted * actual
    return losses


def _standard(values: Floats) -> Floats:
    spread = values.std()
    standard: Floats = (values - values.mean()) / (spread if spread > 0 else 1.0)
    return standard
