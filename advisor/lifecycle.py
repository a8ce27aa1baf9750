"""Whether a trained model may still be believed: its age, its scores beside the simplest, and how it has done since."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.duration.features import has_ended, known_at
from advisor.evaluation.replay import replay_durations
from advisor.evaluation.scores import NOTHING, Scores, score
from advisor.service import Trained
from almanac.config import Config

SIMPLEST = "user last 5 median"
WORSE_BY = 1.1
MAX_AGE_DAYS = 14
"""Age above which a model is not used, and the last runs predict: two weeks of failed trainings."""
DRIFT_BY = 1.3
MIN_JOBS_SINCE = 100
MAX_LOST_COVERAGE = 0.15


def faults_of(trained: Trained, config: Config, now_s: int) -> list[str]:
    """Why the duration model is not to be used at now_s, in words; empty where it is, and where there is none."""
    if trained.model is None:
        return []
    faults = []
    age_days = (now_s - trained.trained_s) / 86_400
    if age_days < -1:
        faults.append(f"trained {-age_days:.0f} days in the future, by a clock that was ahead: train again")
    if age_days > MAX_AGE_DAYS:
        faults.append(f"trained {age_days:.0f} days ago, the limit is {MAX_AGE_DAYS}")
    ours, simplest = trained.scores.get("almanac", NOTHING), trained.scores.get(SIMPLEST, NOTHING)
    if ours.median_abs_log_error > WORSE_BY * simplest.median_abs_log_error:
        faults.append(
            f"its median |log error| was {ours.median_abs_log_error:.2f} on the newest jobs, that of the user's last 5 "
            f"runs {simplest.median_abs_log_error:.2f}"
        )
    return faults


def trusted(trained: Trained | None, config: Config, now_s: int) -> Trained | None:
    """The trained models, without the duration model if it has faults: then the last runs of the same job predict."""
    if trained is None or not faults_of(trained, config, now_s):
        return trained
    return dataclasses.replace(trained, model=None)


@dataclass(frozen=True)
class Drift:
    """How the model has done on the jobs since its training. alarms: in words; empty where nothing is amiss."""

    since: Scores
    coverage: float
    alarms: tuple[str, ...]


def drift_of(trained: Trained, history: pd.DataFrame, config: Config, now_s: int) -> Drift | None:
    """None without a model, and below MIN_JOBS_SINCE jobs submitted since the training that have ended."""
    if trained.model is None:
        return None
    known = known_at(history, now_s)
    is_since = has_ended(known) & (known["submit_s"].to_numpy() >= trained.trained_s)
    if is_since.sum() < MIN_JOBS_SINCE:
        return None
    past = replay_durations(known, is_since)
    predicted = trained.model.predict_all(past.features, past.rolling_s)
    since = score(predicted.duration_s, past.duration_s, past.features.number("gpu_count"))
    coverage = float(np.mean((past.duration_s >= predicted.low_s) & (past.duration_s <= predicted.high_s)))
    then = trained.scores.get("almanac", NOTHING).median_abs_log_error
    alarms = []
    if not math.isnan(then) and since.median_abs_log_error > DRIFT_BY * then:
        alarms.append(
            f"the median |log error| is {since.median_abs_log_error:.2f} since the training, {then:.2f} before"
        )
    if coverage < trained.model.coverage - MAX_LOST_COVERAGE:
        alarms.append(f"{coverage:.0%} of jobs ran within their interval, the goal was {trained.model.coverage:.0%}")
    return Drift(since, coverage, tuple(alarms))
