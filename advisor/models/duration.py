"""The duration model: two outputs, because they are two jobs.

The value that ranks the queue is a weighted mean of logarithms of LightGBM's mean and of the user's habit (the decayed
mean of their last runs): the first ranks users and shapes, the second follows what a user does just now. LightGBM's
mean is that of two models, one of the duration and one of how far it is from the habit: where users change their ways
the second is the better one, elsewhere the first. The
prediction for people is a weighted mean of logarithms of LightGBM's middle, the habit and the median of the last five
runs of the same kind, with an interval.

Weights are chosen on the newest jobs of the training span, predicted by models that saw only jobs that had ended
before the first of them: by rank correlation for the queue, by typical error for people. Intervals are split-conformal
on the same jobs, by how much was known of each (Vovk, Gammerman and Shafer 2005).

"helios" in their place is the paper's own blend, w · rolling estimate + (1 - w) · LightGBM (helios-qssf-ces, 4.2.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.features import Features
from advisor.models.trees import MEAN, MIDDLE, Vocabularies, booster, encode, fit_trees, predict_logs, vocabularies_of
from advisor.replay import Replay
from advisor.scores import Floats, ranks
from almanac.config import Training

ALMANAC, HELIOS = "almanac", "helios"
WEIGHT_STEP = 0.1
LAST_RUNS = ("twin_log_median5", "family_log_median5", "shape_log_median5", "user_log_median5")
HABIT = ("clock_decayed", "user_decayed")
TREES = ("mean", "change", "middle")
"""LightGBM's models: the mean of log durations, the mean of what they are above the habit, their middle."""
CLASSES = ("same kind", "same user", "new user")
KNOWN_RUNS = 5
MIN_RESIDUALS = 30
"""With fewer residuals a class has the interval of all jobs together."""


@dataclass(frozen=True)
class Weights:
    """Shares of a blend, 0..1; LightGBM has the rest."""

    habit: float = 0.0
    last_runs: float = 0.0
    rolling: float = 0.0

    @property
    def model(self) -> float:
        return max(1.0 - self.habit - self.last_runs - self.rolling, 0.0)


@dataclass(frozen=True)
class Parts:
    """The estimates that are blended: seconds, one per job; NaN where there is none."""

    mean_s: Floats
    middle_s: Floats
    habit_s: Floats
    last_runs_s: Floats
    rolling_s: Floats


@dataclass(frozen=True)
class Predicted:
    """Seconds, one per job: the prediction for people and its interval, the value that ranks the queue, LightGBM's."""

    duration_s: Floats
    low_s: Floats
    high_s: Floats
    rank_s: Floats
    model_s: Floats


@dataclass(frozen=True)
class DurationModel:
    """predictor: ALMANAC or HELIOS. texts: LightGBM's own, by TREES; vocabularies: values in the order of their codes.

    habit_s: the habit of a user of whom nothing is known. margins: by class the log residuals between which the
    share `coverage` of the validation jobs lay.
    """

    predictor: str
    texts: Mapping[str, str]
    vocabularies: Vocabularies
    habit_s: float
    weights: Weights
    rank_weights: Weights
    coverage: float
    margins: Mapping[str, tuple[float, float]]

    @cached_property
    def _trees(self) -> dict[str, Any]:
        return {name: booster(self.texts[name]) for name in TREES}

    def parts(self, features: Features, rolling_s: Floats) -> Parts:
        encoded, habit = encode(features, self.vocabularies), log_habit(features, self.habit_s)
        mean, change, middle = (predict_logs(self._trees[name], encoded) for name in TREES)
        return Parts(
            mean_s=_seconds((mean + habit + change) / 2),
            middle_s=_seconds(middle),
            habit_s=_seconds(habit),
            last_runs_s=np.exp(features.first_known(*LAST_RUNS)),
            rolling_s=rolling_s,
        )

    def predict_all(self, features: Features, rolling_s: Floats) -> Predicted:
        """At least 1 s, and not above the time limit."""
        parts = self.parts(features, rolling_s)
        point_s = clip_to_limit(point(self.predictor, self.weights, parts), features)
        rank_s = clip_to_limit(ranking(self.predictor, self.rank_weights, parts), features)
        everyone = self.margins.get("", (0.0, 0.0))
        margins = np.array([self.margins.get(name, everyone) for name in evidence_classes(features)]).reshape(-1, 2)
        low_s, high_s = (clip_to_limit(point_s * np.exp(margins[:, side]), features) for side in (0, 1))
        return Predicted(point_s, low_s, high_s, rank_s, parts.middle_s)


def log_habit(features: Features, habit_s: float) -> Floats:
    """The decayed mean of logarithms of the user's last runs, of timers' and of others'; habit_s for a new user."""
    known = features.first_known(*HABIT)
    return np.where(np.isnan(known), math.log(habit_s), known)


def _seconds(logs: Floats) -> Floats:
    seconds: Floats = np.exp(np.clip(logs, 0.0, 25.0))
    return seconds


def point(predictor: str, weights: Weights, parts: Parts) -> Floats:
    """The prediction for people, seconds."""
    if predictor == HELIOS:
        return _helios(weights, parts)
    return blend(
        [(weights.model, parts.middle_s), (weights.habit, parts.habit_s), (weights.last_runs, parts.last_runs_s)]
    )


def ranking(predictor: str, weights: Weights, parts: Parts) -> Floats:
    """The value that ranks the queue, seconds."""
    if predictor == HELIOS:
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


def evidence_classes(features: Features) -> npt.NDArray[np.str_]:
    """CLASSES, one per job, by whether KNOWN_RUNS runs of the same kind, or of the same user, had ended."""
    least = math.log1p(KNOWN_RUNS) - 1e-9
    is_kind, is_user = (features.number(f"{scope}_log_runs") >= least for scope in ("twin", "user"))
    return np.where(is_kind, CLASSES[0], np.where(is_user, CLASSES[1], CLASSES[2]))


def clip_to_limit(predicted_s: Floats, features: Features) -> Floats:
    """At least 1 s, and not above the time limit where one is set."""
    limit_s = np.exp(features.number("log_time_limit"))
    clipped: Floats = np.maximum(np.fmin(predicted_s, limit_s), 1.0)
    return clipped


@dataclass(frozen=True)
class Fitted:
    """model has seen all jobs; trial is the one that was judged: it saw `before`, and was tried on `newest`.

    trial is None where there were too few jobs to judge one.
    """

    model: DurationModel
    trial: DurationModel | None
    before: Replay
    newest: Replay


def split(past: Replay, validation_share: float) -> tuple[Replay, Replay]:
    """(jobs that had ended before the newest share of submissions, that share)."""
    since_s = np.quantile(past.submit_s, 1 - validation_share) if len(past) else 0.0
    return past.select(past.end_s < since_s), past.select(past.submit_s >= since_s)


def fit(past: Replay, config: Training) -> Fitted | None:
    """A model of these ended jobs; None below config.min_jobs."""
    if len(past) < config.min_jobs:
        return None
    before, newest = split(past, config.validation_share)
    if len(before) < config.min_jobs // 2 or not len(newest):
        unproven = Weights(rolling=max(config.blend, 0.0)) if config.predictor == HELIOS else Weights(habit=0.5)
        return Fitted(_fit(past, config, unproven, unproven, {}), None, before, newest)
    raw = _fit(before, config, Weights(), Weights(), {})
    parts = raw.parts(newest.features, newest.rolling_s)
    weights, rank_weights = _choose_weights(parts, newest, config)
    point_s = clip_to_limit(point(config.predictor, weights, parts), newest.features)
    margins = conformal_margins(point_s, newest, config.coverage)
    trial = DurationModel(
        config.predictor, raw.texts, raw.vocabularies, raw.habit_s, weights, rank_weights, config.coverage, margins
    )
    return Fitted(_fit(past, config, weights, rank_weights, margins), trial, before, newest)


def _fit(
    past: Replay, config: Training, weights: Weights, rank: Weights, margins: Mapping[str, tuple[float, float]]
) -> DurationModel:
    vocabularies = vocabularies_of(past.features)
    habit_s = float(np.exp(np.mean(np.log(np.maximum(past.duration_s, 1.0)))))
    nothing = np.zeros(len(past))
    tasks = {"mean": (nothing, MEAN), "change": (log_habit(past.features, habit_s), MEAN), "middle": (nothing, MIDDLE)}
    texts = {
        name: fit_trees(past, log_from, vocabularies, objective, config.seed)
        for name, (log_from, objective) in tasks.items()
    }
    return DurationModel(config.predictor, texts, vocabularies, habit_s, weights, rank, config.coverage, margins)


def _choose_weights(parts: Parts, newest: Replay, config: Training) -> tuple[Weights, Weights]:
    """For people and for the queue, from a grid.

    Of those within one standard error of the best (of the paired difference), the one that leans most on the habit
    (the one-SE rule, Breiman et al. 1984): where the model's gain could be chance, the simple estimate is the safer
    one.
    """
    grid = [round(float(each), 10) for each in np.arange(0.0, 1.0 + WEIGHT_STEP / 2, WEIGHT_STEP)]
    points = [Weights(habit, last) for habit, last in itertools.product(grid, grid) if habit + last <= 1 + 1e-9]
    queue = [Weights(habit) for habit in grid]
    if config.predictor == HELIOS:
        points = queue = [Weights(rolling=each) for each in (grid if config.blend < 0 else [config.blend])]
    points_s = [clip_to_limit(point(config.predictor, each, parts), newest.features) for each in points]
    ranks_s = [clip_to_limit(ranking(config.predictor, each, parts), newest.features) for each in queue]
    return (
        _choose(points, np.array([_error_losses(each, newest.duration_s) for each in points_s])),
        _choose(queue, np.array([_rank_losses(each, newest.duration_s) for each in ranks_s])),
    )


def _choose(choices: list[Weights], losses: Floats) -> Weights:
    """losses: (choices, jobs)."""
    means = losses.mean(axis=1)
    paired = losses - losses[int(np.argmin(np.round(means, 9)))]
    is_near = paired.mean(axis=1) <= paired.std(axis=1) / math.sqrt(losses.shape[1]) + 1e-9
    near = [weights for weights, near_best in zip(choices, is_near, strict=True) if near_best]
    return max(near, key=lambda weights: (weights.habit, weights.rolling, weights.last_runs))


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


def conformal_margins(point_s: Floats, newest: Replay, coverage: float) -> dict[str, tuple[float, float]]:
    """By class, and of all jobs under "": the log residuals that bound the share `coverage` of the next ones.

    On n residuals each side is the ceil((n + 1)(1 + coverage) / 2)-th from the other end, or the outermost.
    """
    residuals = np.log(np.maximum(newest.duration_s, 1.0)) - np.log(point_s)
    classes = evidence_classes(newest.features)
    groups = {"": residuals, **{name: residuals[classes == name] for name in CLASSES}}
    return {
        name: _margins(values, coverage) for name, values in groups.items() if not name or len(values) >= MIN_RESIDUALS
    }


def _margins(residuals: Floats, coverage: float) -> tuple[float, float]:
    place = min(math.ceil((len(residuals) + 1) * (1 + coverage) / 2), len(residuals))
    ordered = np.sort(residuals)
    return min(float(ordered[-place]), 0.0), max(float(ordered[place - 1]), 0.0)
