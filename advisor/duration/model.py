"""The duration model: LightGBM on submit-time features, with two outputs, because they are two jobs.

The value that ranks the queue is a weighted mean of logarithms of LightGBM's mean, of its percentile, and of the user's
habit (the decayed mean of their last runs): the first two rank users and shapes, the third follows what a user does
just now. LightGBM's mean is that of two models, one of the duration and one of how far it is from the habit: where
users change their ways the second is the better one, elsewhere the first. The percentile is that of the duration among
all; no outlier pulls it far. The prediction for people is the median of the last runs of the same job, or where that is
clearly better LightGBM's middle, with an interval. The interval is as wide as LightGBM expects the last runs to be off.

LightGBM learns from what was known when a job started. At submission much of it is not known yet: the jobs of a burst
see none of the others end, and would teach that the last runs say little.

Weights are chosen, and intervals made (advisor.duration.blend), on LightGBM's predictions for jobs that it had not
seen: each training predicts the jobs that ended since the last one with the model of that time, and keeps the newest.
Only the first training tries a model of older jobs on the newest ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.backtest import Floats, ranks
from advisor.duration.blend import (
    COVERAGE,
    BlendWeights,
    Margin,
    Parts,
    around,
    at_limit,
    choose_weights,
    clip_to_limit,
    conformal_margins,
    point,
    ranking,
    unproven,
)
from advisor.duration.features import NUMBERS, Features
from advisor.duration.replay import DurationReplay
from advisor.version_folders import booster
from almanac.config import Predictor, Training

CATEGORIES = ("account", "partition", "qos", "tier")
"""Encoded for LightGBM. User and name family are left out: their aggregates say more, and many values only overfit."""
MIN_VALUE_COUNT = 20
ROUNDS = 150
SEED = 1
"""Seed of LightGBM: the same jobs give the same model."""
MEAN, MIDDLE = "regression", "huber"
"""Objectives. The mean protects the queue from under-rating long jobs; people are told what half of the jobs take."""

_PARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.05,
    "num_leaves": 7,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 5.0,
    "cat_smooth": 30.0,
    "max_bin": 63,
    "deterministic": True,
    "force_row_wise": True,
    # The sums of a histogram depend on how rows are shared between threads: a fixed number makes them repeatable, and
    # one is the fastest for trees this small, most of all on a busy machine.
    "num_threads": 1,
    "verbosity": -1,
}

Vocabularies = Mapping[str, tuple[str, ...]]


def encode(features: Features, vocabularies: Mapping[str, Sequence[str]]) -> Floats:
    """Return (jobs, NUMBERS + CATEGORIES): categories as codes, NaN for a value that was not seen in training."""
    codes = np.empty((len(features), len(CATEGORIES)))
    for place, name in enumerate(CATEGORIES):
        table = {value: float(code) for code, value in enumerate(vocabularies.get(name, ()))}
        codes[:, place] = [table.get(value, math.nan) for value in features.category(name)]
    return np.hstack([features.numbers, codes])


def vocabularies_of(features: Features) -> dict[str, tuple[str, ...]]:
    """Values with enough jobs, sorted, so that the codes do not depend on the order of rows."""
    found = {}
    for name in CATEGORIES:
        values, counts = np.unique(np.array([value for value in features.category(name) if value]), return_counts=True)
        found[name] = tuple(str(value) for value in values[counts >= MIN_VALUE_COUNT])
    return found


def fit_trees(encoded: Floats, vocabularies: Vocabularies, tasks: Mapping[str, tuple[Floats, str]]) -> dict[str, str]:
    """LightGBM's own texts, by task. tasks: the value of each row, and the objective. encoded: of encode."""
    import lightgbm  # 0.4 s, and not needed by what only reads advice

    smallest_leaf = max(10, min(100, len(encoded) // 40))
    parameters = {**_PARAMETERS, "min_data_in_leaf": smallest_leaf, "seed": SEED}
    data = lightgbm.Dataset(
        encoded,
        feature_name=[*NUMBERS, *CATEGORIES],
        categorical_feature=[name for name in CATEGORIES if vocabularies[name]],
        params=parameters,
    )
    texts: dict[str, str] = {}
    for name, (values, objective) in tasks.items():
        given = {**parameters, "objective": objective}
        trees = lightgbm.train(given, data.set_label(values), ROUNDS, keep_training_booster=True)
        texts[name] = trees.model_to_string()
    return texts


def predict_trees(model: Any, encoded: Floats) -> Floats:
    """One value per row."""
    logs: Floats = np.asarray(model.predict(encoded, num_threads=1), dtype="float64")
    return logs


SAME_JOB = ("twin_log_median5", "family_log_median5", "shape_log_median5", "user_log_median5")
HABIT_COLUMNS = ("clock_decayed", "user_decayed")
UNSEEN, NEW_UNSEEN, MIN_UNSEEN = 3000, 1000, 30
"""Jobs that a model is judged on: at most in all, at most of one training, and at least."""
VALIDATION_SHARE = 0.2
"""Newest share of the jobs that tests the first model; later models are tested on newer jobs."""
LEARNED = 50_000
"""Jobs that a model learns from, at most: evenly spaced among all, in order of submission."""
TREES = ("mean", "change", "percentile", "middle", "error")
"""LightGBM's models: the mean of log durations, the mean of what they are above the habit, their percentile, their
middle, and the |log error| of the last runs.
"""
QUANTILES = 101
"""Evenly spaced quantiles of log durations, which map a percentile back."""


@dataclass(frozen=True)
class PredictedDurations:
    """Seconds, one per job: the prediction for people and its interval, that of the queue, and LightGBM's."""

    duration_s: Floats
    low_s: Floats
    high_s: Floats
    rank_s: Floats
    model_s: Floats


class Unseen(NamedTuple):
    """LightGBM's prediction for a job that it had not seen, seconds."""

    job_id: int
    submit_s: int
    mean_s: float
    middle_s: float
    percentile_s: float
    log_error: float


OUTPUTS = Unseen._fields[2:]
"""Fields of Parts that are LightGBM's."""


@dataclass(frozen=True)
class DurationModel:
    """A trained model of run times. texts: LightGBM's own, by TREES. vocabularies: values in the order of their codes.

    habit_s: the habit of an unknown user. log_quantiles: of log durations. margins: the log residuals that enclosed the
    share `coverage` of unseen jobs. unseen: those jobs, oldest end first, at most UNSEEN. trained_s: the model has seen
    only jobs that ended before.
    """

    predictor: Predictor
    texts: Mapping[str, str]
    vocabularies: Vocabularies
    habit_s: float
    log_quantiles: tuple[float, ...]
    weights: BlendWeights
    rank_weights: BlendWeights
    coverage: float
    margins: tuple[Margin, ...]
    trained_s: int
    unseen: tuple[Unseen, ...]

    @cached_property
    def _trees(self) -> dict[str, Any]:
        return {name: booster(self.texts[name]) for name in TREES}

    def parts(self, features: Features, rolling_s: Floats) -> Parts:
        encoded, habit = encode(features, self.vocabularies), log_habit(features, self.habit_s)
        mean, change, percentile, middle, error = (predict_trees(self._trees[name], encoded) for name in TREES)
        return Parts(
            mean_s=_seconds((mean + habit + change) / 2),
            percentile_s=_seconds(np.interp(percentile, np.linspace(0, 1, QUANTILES), self.log_quantiles)),
            middle_s=_seconds(middle),
            log_error=error,
            habit_s=_seconds(habit),
            last_runs_s=np.exp(features.first_known(*SAME_JOB)),
            rolling_s=rolling_s,
        )

    def predict_all(self, features: Features, rolling_s: Floats) -> PredictedDurations:
        """Predict each job's duration, at least 1 s, and not above the time limit."""
        return self.blend(self.parts(features, rolling_s), features)

    def blend(self, parts: Parts, features: Features) -> PredictedDurations:
        """Blend estimates that `parts` made into predictions, at least 1 s, and not above the time limit."""
        point_s = clip_to_limit(point(self.predictor, self.weights, parts), features)
        rank_s = clip_to_limit(ranking(self.predictor, self.rank_weights, parts), features)
        low_s, high_s = (clip_to_limit(end_s, features) for end_s in around(point_s, parts.log_error, self.margins))
        return PredictedDurations(point_s, low_s, high_s, rank_s, parts.middle_s)


def untrained(features: Features, rolling_s: Floats) -> PredictedDurations:
    """Predict without a model: the median of the last runs of the same job, or else the rolling estimate.

    The rolling estimate ranks the queue.
    """
    last_s = np.exp(features.first_known(*SAME_JOB))
    point_s = clip_to_limit(np.where(np.isnan(last_s), rolling_s, last_s), features)
    nothing = np.full(len(features), math.nan)
    return PredictedDurations(point_s, nothing, nothing, clip_to_limit(rolling_s, features), nothing)


def log_habit(features: Features, habit_s: float) -> Floats:
    """The decayed mean of logarithms of the user's last runs, of timers' and of others'; habit_s for a new user."""
    known = features.first_known(*HABIT_COLUMNS)
    return np.where(np.isnan(known), math.log(habit_s), known)


def _seconds(logs: Floats) -> Floats:
    seconds: Floats = np.exp(np.clip(logs, 0.0, 25.0))
    return seconds


@dataclass(frozen=True)
class Fitted:
    """model has seen all jobs; `newest` are those it was judged on; parts: their predictions before it saw them.

    parts is None if there were too few jobs to judge one. before: the jobs that were known then.
    """

    model: DurationModel
    parts: Parts | None
    before: DurationReplay
    newest: DurationReplay


def learned_rows(
    job_id: npt.NDArray[np.int64],
    submit_s: npt.NDArray[np.int64],
    end_s: npt.NDArray[np.int64] | Floats,
    previous: DurationModel | None,
) -> npt.NDArray[np.intp]:
    """Return the rows of ended jobs that fit() needs, ascending: at most LEARNED, and those that test `previous`."""
    order = np.lexsort((end_s, job_id, submit_s))
    if len(order) > LEARNED:
        order = order[np.linspace(0, len(order) - 1, LEARNED).astype("int64")]
    said = {(each.job_id, each.submit_s) for each in previous.unseen} if previous else set()
    is_said = [key in said for key in zip(job_id.tolist(), submit_s.tolist(), strict=True)] if said else []
    return np.union1d(order, np.flatnonzero(is_said))


def split(past: DurationReplay) -> tuple[DurationReplay, DurationReplay]:
    """(jobs that had ended before the newest share of submissions, that share)."""
    since_s = np.quantile(past.submit_s, 1 - VALIDATION_SHARE) if len(past) else 0.0
    return past.select(past.end_s < since_s), past.select(past.submit_s >= since_s)


def fit(
    past: DurationReplay,
    config: Training,
    now_s: float,
    previous: DurationModel | None = None,
) -> Fitted | None:
    """A model of these jobs, which ended before now_s; None below config.min_jobs. previous: the model in use."""
    if len(past) < config.min_jobs:
        return None
    newest, parts = _since(past, previous) if previous else (past.select(np.full(len(past), False)), None)
    if parts is None:
        before, newest = split(past)
        if len(before) < config.min_jobs // 2 or not len(newest):
            people, queue = unproven(config)
            return Fitted(_fit(past, config, now_s, people, queue), None, before, newest)
        newest = newest.select(_by_end(newest, np.full(len(newest), True))[-UNSEEN:])
        parts = _fit(before, config, now_s, BlendWeights(), BlendWeights()).parts(newest.features, newest.rolling_s)
    before = past.select(past.end_s < newest.end_s.min())
    people, queue = choose_weights(parts, newest, config)
    point_s = clip_to_limit(point(config.predictor, people, parts), newest.features)
    margins = conformal_margins(point_s, parts.log_error, newest, COVERAGE)
    model = _fit(past, config, now_s, people, queue)
    return Fitted(dataclasses.replace(model, margins=margins, unseen=_unseen(newest, parts)), parts, before, newest)


def _since(past: DurationReplay, previous: DurationModel) -> tuple[DurationReplay, Parts | None]:
    """Jobs that LightGBM had not seen when it predicted them, newest UNSEEN by end; None where there are too few.

    Of the jobs that ended since the last training, by the model of then, at most NEW_UNSEEN, evenly spaced: they are
    those of some days, and not of a night.
    """
    said = {(each.job_id, each.submit_s): each for each in previous.unseen}
    recorded = [said.get(key) for key in zip(past.job_id.tolist(), past.submit_s.tolist(), strict=True)]
    is_recorded = np.array([each is not None for each in recorded])
    new = _by_end(past, ~is_recorded & (past.end_s >= previous.trained_s))
    rows = np.concatenate([_by_end(past, is_recorded), new[:: max(math.ceil(len(new) / NEW_UNSEEN), 1)]])[-UNSEEN:]
    newest = past.select(rows)
    if not previous.unseen or len(rows) < MIN_UNSEEN:
        return newest, None
    parts = previous.parts(newest.features, newest.rolling_s)
    then = np.array([recorded[row][2:] if recorded[row] else [math.nan] * len(OUTPUTS) for row in rows])
    now = np.stack([getattr(parts, name) for name in OUTPUTS], axis=1)
    outputs = np.where(np.isnan(then), now, then)
    return newest, dataclasses.replace(parts, **{name: outputs[:, place] for place, name in enumerate(OUTPUTS)})


def _by_end(past: DurationReplay, is_in: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """These rows, oldest end first."""
    rows = np.flatnonzero(is_in)
    return rows[np.lexsort((past.job_id[rows], past.end_s[rows]))]


def _unseen(newest: DurationReplay, parts: Parts) -> tuple[Unseen, ...]:
    outputs = [[float(f"{value:.6g}") for value in getattr(parts, name).tolist()] for name in OUTPUTS]
    return tuple(map(Unseen, newest.job_id.tolist(), newest.submit_s.tolist(), *outputs))


def _fit(
    past: DurationReplay, config: Training, now_s: float, weights: BlendWeights, rank_weights: BlendWeights
) -> DurationModel:
    """Without margins, and with the default scale of the ranking."""
    known, vocabularies = past.at_start, vocabularies_of(past.features)
    log_s = np.log(np.maximum(past.duration_s, 1.0))
    log_habits = log_habit(known, habit_s := float(np.exp(np.mean(log_s))))
    last = known.first_known(*SAME_JOB)
    last_s = clip_to_limit(np.exp(np.where(np.isnan(last), log_habits, last)), known)
    errors = np.abs(np.log(np.maximum(at_limit(past.duration_s, known), 1.0)) - np.log(last_s))
    tasks = {
        "mean": (log_s, MEAN),
        "change": (log_s - log_habits, MEAN),
        "percentile": ((ranks(log_s) - 0.5) / len(past), MEAN),
        "middle": (log_s, MIDDLE),
        "error": (errors, MEAN),
    }
    return DurationModel(
        predictor=config.predictor,
        texts=fit_trees(encode(known, vocabularies), vocabularies, tasks),
        vocabularies=vocabularies,
        habit_s=habit_s,
        log_quantiles=tuple(np.quantile(log_s, np.linspace(0, 1, QUANTILES)).tolist()),
        weights=weights,
        rank_weights=rank_weights,
        coverage=COVERAGE,
        margins=(),
        trained_s=int(now_s),
        unseen=(),
    )
