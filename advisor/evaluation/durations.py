"""Rolling-origin scores of predicted durations: what would have been said, had almanac run all along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.baselines import RANKS_ONLY, predictions_of
from advisor.duration.intervals import CLASSES, evidence_classes
from advisor.duration.model import DurationModel, Fitted, fit, learned_rows
from advisor.evaluation.replay import DurationReplay, replay_durations
from advisor.evaluation.scores import Floats, Scores, score, score_of_users
from almanac.config import Config
from almanac.records import MAX_SPAN

MAX_TRAININGS = 200


@dataclass(frozen=True)
class Evaluation:
    """Scores by predictor (advisor.duration.baselines): of all tested jobs, of users, and of jobs by their history.

    cold: of users with fewer than KNOWN_RUNS ended jobs; warm: the others. coverage: the share of jobs within their
    interval, and in each quarter of the jobs, oldest first; told: the share of intervals that people are told
    (almanac.records.Duration.is_regular). None and () where no model was old enough for an interval.
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


def evaluate(history: pd.DataFrame, config: Config, share: float = 0.4) -> Evaluation:
    """On the newest `share` of jobs, retrained every training.retrain_hours, each time on what had ended by then."""
    past = replay_durations(history)
    past = past.select(np.isfinite(past.duration_s))
    if not len(past):
        return Evaluation(0, 0, None, {}, {}, {}, {}, None)
    folds, tested = [], []
    previous: DurationModel | None = None
    edges_s = origins(past.submit_s, share, config.training.retrain_hours * 3600)
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


def origins(submit_s: npt.NDArray[np.int64], share: float, every_s: int) -> list[float]:
    """Times of training over the newest `share` of submissions, at most MAX_TRAININGS, and infinity."""
    first_s, last_s = float(np.quantile(submit_s, 1 - share)), float(submit_s.max())
    every_s = max(every_s, math.ceil((last_s - first_s + 1) / MAX_TRAININGS))
    return [*np.arange(first_s, last_s + 1, every_s).tolist(), math.inf]


def _predict(fitted: Fitted | None, before: DurationReplay, jobs: DurationReplay) -> dict[str, Floats]:
    predicted = fitted.model.predict_all(jobs.features, jobs.rolling_s) if fitted else None
    predictions = predictions_of(predicted, jobs, before)
    if predicted and fitted and fitted.parts:
        predictions |= {_LOW: predicted.low_s, _HIGH: predicted.high_s}
    return predictions


_LOW, _HIGH = "interval from", "interval to"


def _judge(folds: list[dict[str, Floats]], tested: list[DurationReplay], since_s: int) -> Evaluation:
    def whole(name: str) -> Floats:
        missing = [np.full(len(jobs), math.nan) for jobs in tested]
        return np.concatenate([fold.get(name, nan) for fold, nan in zip(folds, missing, strict=True)])

    actual = np.concatenate([jobs.duration_s for jobs in tested])
    gpus = np.concatenate([jobs.features.number("gpu_count") for jobs in tested])
    users = np.concatenate([np.array(jobs.features.category("user")) for jobs in tested])
    is_cold = np.concatenate([evidence_classes(jobs.features) for jobs in tested]) == CLASSES[-1]
    low, high = whole(_LOW), whole(_HIGH)
    names = sorted(set().union(*folds) - {_LOW, _HIGH})
    predicted = {name: whole(name) for name in names}

    def scored(rows: npt.NDArray[np.bool_]) -> dict[str, Scores]:
        return {
            name: score(values[rows], actual[rows], gpus[rows], name not in RANKS_ONLY)
            for name, values in predicted.items()
        }

    has_interval = np.isfinite(low)
    inside = ((actual >= low) & (actual <= high))[has_interval]
    order = np.argsort(np.concatenate([jobs.submit_s for jobs in tested])[has_interval], kind="stable")
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
    )
