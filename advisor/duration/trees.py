"""LightGBM on submit-time features, to the mean of log durations or to their middle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from advisor.duration.features import NUMBERS, Features
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats

CATEGORIES = ("account", "partition", "qos", "tier")
"""Encoded for LightGBM. User and name family are left out: their aggregates say more, and many values only overfit."""
MIN_VALUE_COUNT = 20
ROUNDS = 150
SEED = 1
"""Of LightGBM: the same jobs give the same model."""
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
    "deterministic": True,
    "force_row_wise": True,
    # The sums of a histogram depend on how rows are shared between threads: a fixed number makes them repeatable, and
    # one is the fastest for trees this small, most of all on a busy machine.
    "num_threads": 1,
    "verbosity": -1,
}

Vocabularies = Mapping[str, tuple[str, ...]]


def encode(features: Features, vocabularies: Mapping[str, Sequence[str]]) -> Floats:
    """(jobs, NUMBERS + CATEGORIES): categories as codes, NaN for a value that was not seen in training."""
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


def fit_trees(past: DurationReplay, log_from: Floats, vocabularies: Vocabularies, objective: str, seed: int) -> str:
    """LightGBM's own text of a model of log durations, less log_from."""
    import lightgbm  # 0.4 s, and not needed by what only reads advice

    data = lightgbm.Dataset(
        encode(past.features, vocabularies),
        np.log(np.maximum(past.duration_s, 1.0)) - log_from,
        feature_name=[*NUMBERS, *CATEGORIES],
        categorical_feature=[name for name in CATEGORIES if vocabularies[name]],
        params={"verbosity": -1},
    )
    smallest_leaf = max(10, min(100, len(past) // 40))
    parameters = {**_PARAMETERS, "objective": objective, "min_data_in_leaf": smallest_leaf, "seed": seed}
    text: str = lightgbm.train(parameters, data, num_boost_round=ROUNDS).model_to_string()
    return text


def predict_logs(model: Any, encoded: Floats) -> Floats:
    """Natural logarithms of seconds, one per row."""
    logs: Floats = np.asarray(model.predict(encoded, num_threads=1), dtype="float64")
    return logs
