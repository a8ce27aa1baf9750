"""What simple predictors say, beside ours: nothing learned is worth more than it adds to these."""

from __future__ import annotations

import math

import numpy as np

from advisor.duration.blend import clip_to_limit
from advisor.duration.model import SAME_JOB, Predicted, untrained
from advisor.evaluation.replay import DurationReplay
from advisor.evaluation.scores import Floats, Scores, score

OURS = ("almanac", "ranking", "rolling", "model")
RANKS_ONLY = ("GPU count",)


def baselines(newest: DurationReplay, before: DurationReplay) -> dict[str, Floats]:
    """Seconds by name; a user or family without ended jobs gets the next wider one, at last the global median.

    before: the jobs that are known. "GPU count" is no duration: it ranks jobs alone.
    """
    middle_s = float(np.median(before.duration_s)) if len(before) else math.nan

    def first_known(*names: str) -> Floats:
        known = np.exp(newest.features.first_known(*names))
        return np.where(np.isnan(known), middle_s, known)

    return {
        "global median": np.full(len(newest), middle_s),
        "user last 2 mean": first_known("user_log_mean2"),
        "user last 5 median": first_known("user_log_median5"),
        "family last 5 median": first_known("family_log_median5", "user_log_median5"),
        "same job last 5 median": first_known(*SAME_JOB),
        "time limit": np.exp(newest.features.number("log_time_limit")),
        "GPU count": newest.features.number("gpu_count"),
    }


def predictions_of(predicted: Predicted | None, newest: DurationReplay, before: DurationReplay) -> dict[str, Floats]:
    """Seconds by predictor: OURS ("almanac" for people, the "ranking" value, "model": LightGBM) and the baselines.

    predicted: None without a model.
    """
    predictions = baselines(newest, before)
    predictions["rolling"] = clip_to_limit(newest.rolling_s, newest.features)
    told = predicted or untrained(newest.features, newest.rolling_s)
    predictions["almanac"], predictions["ranking"] = told.duration_s, told.rank_s
    if predicted is not None:
        predictions["model"] = predicted.model_s
    return predictions


def scores_of(predictions: dict[str, Floats], newest: DurationReplay) -> dict[str, Scores]:
    gpu_count = newest.features.number("gpu_count")
    return {
        name: score(seconds, newest.duration_s, gpu_count, name not in RANKS_ONLY)
        for name, seconds in predictions.items()
    }
