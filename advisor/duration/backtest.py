"""Score predicted durations on rolling origins, with simple baselines: as if almanac had run all along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.backtest import (
    Floats,
    MethodComparison,
    Scores,
    compare_methods,
    score,
    score_of_users,
    training_times,
)
from advisor.duration.blend import at_limit, clip_to_limit
from advisor.duration.model import SAME_JOB, DurationModel, Fitted, PredictedDurations, fit, learned_rows, untrained
from advisor.duration.replay import DurationReplay, replay_durations
from almanac.config import Config
from almanac.records import MAX_SPAN

OURS = ("almanac", "ranking", "rolling", "model")
RANKS_ONLY = ("GPU count",)
KNOWN_RUNS = 5
"""Ended jobs of a user who is not cold."""


def baselines(newest: DurationReplay, before: DurationReplay) -> dict[str, Floats]:
    """Return the predictions of simple methods, by name, in seconds.

    A user or family without ended jobs gets the next wider estimate, at last the global median. before: the jobs that
    are known. "GPU count" is no duration: it ranks jobs alone.
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


def predictions_of(
    predicted: PredictedDurations | None, newest: DurationReplay, before: DurationReplay
) -> dict[str, Floats]:
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


@dataclass(frozen=True)
class Evaluation:
    """Scores by predictor (advisor.duration.backtest): of all tested jobs, of users, and of jobs by their history.

    cold: of users with fewer than KNOWN_RUNS ended jobs; warm: the others. coverage: the share of jobs within their
    interval, and in each quarter of the jobs, oldest first; told: the share of intervals that people are told
    (almanac.records.Duration.is_regular). None and () without a model old enough for an interval. comparison: of the
    log errors; None without jobs.
    """

    jobs: int
    trainings: int
    since_s: int | None
    all: Mapping[str, Scores]
    users: Mapping[str, Scores]
    cold: Mapping[str, Scores]
    warm: Mapping[str, Scores]
    coverage: float | None
    coverage_by_quarter: tuple[float, ...] = ()
    told: float | None = None
    comparison: MethodComparison | None = None


def evaluate(history: pd.DataFrame, config: Config, share: float = 0.4) -> Evaluation:
    """Score the newest `share` of jobs, retrained every training.retrain_hours on the jobs that had ended by then."""
    past = replay_durations(history)
    past = past.select(np.isfinite(past.duration_s))
    if not len(past):
        return Evaluation(0, 0, None, {}, {}, {}, {}, None)
    folds, tested = [], []
    previous: DurationModel | None = None
    first_s, last_s = float(np.quantile(past.submit_s, 1 - share)), float(past.submit_s.max())
    edges_s = [*training_times(first_s, last_s + 1, config.training.retrain_hours * 3600), math.inf]
    for since_s, until_s in itertools.pairwise(edges_s):
        jobs = past.select((past.submit_s >= since_s) & (past.submit_s < until_s))
        if len(jobs):
            tested.append(jobs)
            before = past.select(past.end_s < since_s)
            learned = before.select(learned_rows(before.job_id, before.submit_s, before.end_s, previous))
            fitted = fit(learned, config.training, math.ceil(since_s), previous)
            previous = fitted.model if fitted else None
            folds.append(_predict(fitted, before, jobs))
    return _judge(folds, tested, int(edges_s[0]))


def _predict(fitted: Fitted | None, before: DurationReplay, jobs: DurationReplay) -> dict[str, Floats]:
    predicted = fitted.model.predict_all(jobs.features, jobs.rolling_s) if fitted else None
    predictions = predictions_of(predicted, jobs, before)
    if predicted and fitted and fitted.parts:
        predictions |= {_LOW: predicted.low_s, _HIGH: predicted.high_s}
    return predictions


SIMPLE = ("same job last 5 median", "user last 2 mean")
"""Baselines that a site has without a model, and that always know a time."""
_LOW, _HIGH = "interval from", "interval to"


def _judge(folds: list[dict[str, Floats]], tested: list[DurationReplay], since_s: int) -> Evaluation:
    def whole(name: str) -> Floats:
        missing = [np.full(len(jobs), math.nan) for jobs in tested]
        return np.concatenate([fold.get(name, nan) for fold, nan in zip(folds, missing, strict=True)])

    actual = np.concatenate([jobs.duration_s for jobs in tested])
    gpus = np.concatenate([jobs.features.number("gpu_count") for jobs in tested])
    users = np.concatenate([np.array(jobs.features.category("user")) for jobs in tested])
    runs = np.concatenate([jobs.features.number("user_log_runs") for jobs in tested])
    is_cold = ~(runs >= math.log1p(KNOWN_RUNS) - 1e-9)
    low, high = whole(_LOW), whole(_HIGH)
    names = sorted(set().union(*folds) - {_LOW, _HIGH})
    predicted = {name: whole(name) for name in names}

    def scored(rows: npt.NDArray[np.bool_]) -> dict[str, Scores]:
        return {
            name: score(values[rows], actual[rows], gpus[rows], name not in RANKS_ONLY)
            for name, values in predicted.items()
        }

    has_interval = np.isfinite(low)
    known_s = np.concatenate([at_limit(jobs.duration_s, jobs.features) for jobs in tested])
    inside = ((known_s >= low) & (known_s <= high))[has_interval]
    submit_s = np.concatenate([jobs.submit_s for jobs in tested])
    order = np.argsort(submit_s[has_interval], kind="stable")
    compared = {name: predicted[name] for name in (OURS[0], *SIMPLE)}
    compared["shuffled"] = np.random.default_rng(1).permutation(predicted[OURS[0]])
    quarters = np.array_split(inside[order], 4) if len(inside) >= 4 else []
    return Evaluation(
        jobs=len(actual),
        trainings=len(folds),
        since_s=since_s,
        all=scored(np.full(len(actual), True)),
        users={n: score_of_users(each, actual, gpus, users, n not in RANKS_ONLY) for n, each in predicted.items()},
        cold=scored(is_cold),
        warm=scored(~is_cold),
        coverage=float(inside.mean()) if len(inside) else None,
        coverage_by_quarter=tuple(float(quarter.mean()) for quarter in quarters),
        told=float(np.mean((high <= MAX_SPAN * low)[has_interval])) if len(inside) else None,
        comparison=compare_methods(
            "|log error|", OURS[0],
            {name: np.abs(np.log(np.maximum(each, 1) / np.maximum(actual, 1))) for name, each in compared.items()},
            submit_s, ("shuffled",), is_cost=True,
        ),
    )  # fmt: skip
