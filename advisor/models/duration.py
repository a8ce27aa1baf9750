"""The duration model: LightGBM on submit-time features, blended with what the last runs took.

The blend is a weighted mean of logarithms of three estimates: LightGBM's (Huber loss on the logarithm), the rolling
estimate of Helios, and the median of the last five runs of the same kind. Ranks gain from the first, typical errors
from the last. The weights are those with the least median |log error| on the newest jobs of the training span,
predicted by a model that saw only jobs that had ended before the first of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from advisor.features import NUMBERS
from advisor.replay import Replay
from advisor.scores import Floats, Scores, score, spearman
from almanac.config import Training

CATEGORIES = ("user", "account", "partition", "qos", "tier")
"""Encoded for LightGBM. The name family is left out: its aggregates say more, and its many values only overfit."""
MIN_VALUE_COUNT = 20
ROUNDS = 150
WEIGHT_STEP = 0.1
LAST_RUNS = ("twin_log_median5", "family_log_median5", "shape_log_median5", "user_log_median5")

_PARAMETERS: Mapping[str, Any] = {
    "objective": "huber",
    "learning_rate": 0.05,
    "num_leaves": 7,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 5.0,
    "cat_smooth": 30.0,
    "deterministic": True,
    "force_row_wise": True,
    # The sums of a histogram depend on how rows are shared between threads: a fixed number makes them repeatable, and
    # one is the fastest for trees this small, most of all on a busy machine.
    "num_threads": 1,
    "verbosity": -1,
}


@dataclass(frozen=True)
class Weights:
    """Of the rolling estimate and of the last runs; LightGBM has the rest."""

    rolling: float
    last_runs: float

    @property
    def model(self) -> float:
        return 1.0 - self.rolling - self.last_runs


_ONLY_MODEL = Weights(0.0, 0.0)


@dataclass(frozen=True)
class DurationModel:
    """LightGBM's own text, the values of each category in the order of their codes, and the two blends."""

    model_text: str
    vocabularies: Mapping[str, tuple[str, ...]]
    weights: Weights
    rank_weights: Weights

    @cached_property
    def _booster(self) -> Any:
        import lightgbm  # 0.4 s, and not needed by what only reads advice

        return lightgbm.Booster(model_str=self.model_text)

    def predict(self, features: pd.DataFrame) -> Floats:
        """LightGBM's estimate, seconds, one per row."""
        encoded = encode(features, self.vocabularies)
        logs: Floats = np.asarray(self._booster.predict(encoded, num_threads=1), dtype="float64")
        seconds: Floats = np.exp(np.clip(logs, 0.0, 25.0))
        return seconds

    def predict_all(self, features: pd.DataFrame, rolling_s: Floats) -> Predicted:
        """All of them seconds, one per row, and not above the time limit."""
        model_s, last_s = self.predict(features), last_runs_s(features)
        point_s, rank_s = (blend(each, model_s, rolling_s, last_s) for each in (self.weights, self.rank_weights))
        return Predicted(clip_to_limit(point_s, features), clip_to_limit(rank_s, features), model_s)


@dataclass(frozen=True)
class Predicted:
    """Seconds, one per job: the prediction for people, the value that ranks the queue, LightGBM's own estimate."""

    duration_s: Floats
    rank_s: Floats
    model_s: Floats


def encode(features: pd.DataFrame, vocabularies: Mapping[str, Sequence[str]]) -> Floats:
    """(jobs, NUMBERS + CATEGORIES): categories as codes, NaN for a value that was not seen in training."""
    codes = []
    for name in CATEGORIES:
        table = {value: float(code) for code, value in enumerate(vocabularies.get(name, ()))}
        codes.append([table.get(value, math.nan) for value in features[name].tolist()])
    return np.column_stack([features[list(NUMBERS)].to_numpy("float64"), np.array(codes, dtype="float64").T])


def last_runs_s(features: pd.DataFrame) -> Floats:
    """Median of the last five runs of the narrowest group that the user has any of; NaN for a new user."""
    filled = features[list(LAST_RUNS)].bfill(axis=1).iloc[:, 0]
    seconds: Floats = np.exp(filled.to_numpy("float64"))
    return seconds


def blend(weights: Weights, model_s: Floats, rolling_s: Floats, last_s: Floats) -> Floats:
    """Weighted mean of logarithms of what is known; where that has no weight, LightGBM's estimate."""
    values = np.log(np.maximum(np.stack([model_s, rolling_s, last_s]), 1.0))
    shares = np.array([[max(weights.model, 0.0)], [weights.rolling], [weights.last_runs]]) * np.isfinite(values)
    total = shares.sum(axis=0)
    mean = (shares * np.nan_to_num(values)).sum(axis=0) / np.where(total > 0, total, 1.0)
    seconds: Floats = np.exp(np.where(total > 0, mean, values[0]))
    return seconds


def clip_to_limit(predicted_s: Floats, features: pd.DataFrame) -> Floats:
    """At least 1 s, and not above the time limit where one is set."""
    limit_s = np.exp(features["log_time_limit"].to_numpy("float64"))
    clipped: Floats = np.maximum(np.fmin(predicted_s, limit_s), 1.0)
    return clipped


def fit(past: Replay, config: Training) -> tuple[DurationModel, dict[str, Scores]] | None:
    """A model of these ended jobs and its scores on the newest share of them; None below config.min_jobs.

    The scores are of a model of the jobs before that share; the model returned has seen all.
    """
    if len(past.duration_s) < config.min_jobs:
        return None
    since_s = np.quantile(past.submit_s, 1 - config.validation_share)
    newest, before = past.select(past.submit_s >= since_s), past.select(past.end_s < since_s)
    if len(before.duration_s) < config.min_jobs // 2 or not len(newest.duration_s):
        unproven = Weights(config.blend if config.blend >= 0 else 0.5, 0.0)
        return DurationModel(*_fit_trees(past, config), unproven, unproven), {}
    text, vocabularies = _fit_trees(before, config)
    trial = DurationModel(text, vocabularies, *_choose_weights(text, vocabularies, newest, config.blend))
    model = DurationModel(*_fit_trees(past, config), trial.weights, trial.rank_weights)
    return model, score_all(trial, newest, before)


def _fit_trees(past: Replay, config: Training) -> tuple[str, dict[str, tuple[str, ...]]]:
    import lightgbm

    vocabularies = {name: _vocabulary(past.features[name]) for name in CATEGORIES}
    names = [*NUMBERS, *CATEGORIES]
    data = lightgbm.Dataset(
        encode(past.features, vocabularies),
        np.log(np.maximum(past.duration_s, 1.0)),
        feature_name=names,
        categorical_feature=[name for name in CATEGORIES if vocabularies[name]],
        params={"verbosity": -1},
    )
    smallest_leaf = max(10, min(100, len(past.duration_s) // 40))
    parameters = {**_PARAMETERS, "min_data_in_leaf": smallest_leaf, "seed": config.seed}
    booster = lightgbm.train(parameters, data, num_boost_round=ROUNDS)
    return booster.model_to_string(), vocabularies


def _vocabulary(values: pd.Series) -> tuple[str, ...]:
    """Values with enough jobs, sorted, so that the codes do not depend on the order of rows."""
    counts = values[values != ""].value_counts()
    return tuple(sorted(str(value) for value in counts.index[counts >= MIN_VALUE_COUNT]))


def _choose_weights(
    text: str, vocabularies: Mapping[str, tuple[str, ...]], newest: Replay, fixed_rolling: float
) -> tuple[Weights, Weights]:
    """For people and for the queue, from a grid.

    For people: of those within one standard error of the best (of the paired difference), the one that leans most on
    the last runs (the one-SE rule, Breiman et al. 1984): where the model's gain could be chance, the simple estimate
    is the safer one.
    """
    model_s = DurationModel(text, vocabularies, _ONLY_MODEL, _ONLY_MODEL).predict(newest.features)
    last_s, log_actual = last_runs_s(newest.features), np.log(np.maximum(newest.duration_s, 1.0))
    grid = np.round(np.arange(0.0, 1.0 + WEIGHT_STEP / 2, WEIGHT_STEP), 10)
    rolling_choices = grid if fixed_rolling < 0 else [fixed_rolling]
    choices = [Weights(float(r), float(a)) for r, a in itertools.product(rolling_choices, grid) if r + a <= 1 + 1e-9]
    roots, ranks = [], []
    for weights in choices:
        predicted_s = clip_to_limit(blend(weights, model_s, newest.rolling_s, last_s), newest.features)
        roots.append(np.sqrt(np.abs(np.log(predicted_s) - log_actual)))
        ranks.append(round(float(np.nan_to_num(spearman(predicted_s, newest.duration_s))), 9))
    losses = np.array(roots) - roots[int(np.argmin([np.mean(each) for each in roots]))]
    is_near = losses.mean(axis=1) <= losses.std(axis=1) / math.sqrt(losses.shape[1])
    near = [weights for weights, near_best in zip(choices, is_near, strict=True) if near_best]
    point = max(near, key=lambda weights: (weights.last_runs, weights.rolling))
    return point, choices[int(np.argmax(ranks))]


def score_all(model: DurationModel | None, newest: Replay, before: Replay) -> dict[str, Scores]:
    """Scores on `newest` of what predictions_of says."""
    predictions = predictions_of(model, newest, before)
    return {name: score(values, newest.duration_s) for name, values in predictions.items()}


def predictions_of(model: DurationModel | None, newest: Replay, before: Replay) -> dict[str, Floats]:
    """Seconds by predictor: "almanac", its "ranking", its parts "rolling" and "model", and the baselines.

    before: the jobs that the baselines know.
    Without a model "almanac" and "ranking" are the rolling estimate.
    """
    predictions = _baselines(newest, before)
    for name in ("rolling", "almanac", "ranking"):
        predictions[name] = clip_to_limit(newest.rolling_s, newest.features)
    if model is not None and len(newest.duration_s):
        predicted = model.predict_all(newest.features, newest.rolling_s)
        predictions["almanac"], predictions["ranking"] = predicted.duration_s, predicted.rank_s
        predictions["model"] = predicted.model_s
    return predictions


def _baselines(newest: Replay, before: Replay) -> dict[str, Floats]:
    """Simple predictors; a user or family without ended jobs gets the next wider one, at last the global median."""
    middle_s = float(np.median(before.duration_s)) if len(before.duration_s) else math.nan
    logs = newest.features

    def first_known(*names: str) -> Floats:
        known = np.exp(logs[list(names)].bfill(axis=1).iloc[:, 0].to_numpy("float64"))
        return np.where(np.isnan(known), middle_s, known)

    return {
        "global median": np.full(len(newest.duration_s), middle_s),
        "user last 2 mean": first_known("user_log_mean2"),
        "user last 5 median": first_known("user_log_median5"),
        "family last 5 median": first_known("family_log_median5", "user_log_median5"),
        "time limit": np.exp(logs["log_time_limit"].to_numpy("float64")),
    }
