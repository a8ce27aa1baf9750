"""Rolling-origin scores of predicted durations: what would have been said, had almanac run all along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.baselines import predictions_of
from advisor.models.duration import fit
from advisor.replay import Replay, replay_durations
from advisor.scores import Floats, Scores, score
from almanac.config import Config


def evaluate(history: pd.DataFrame, config: Config, share: float = 0.4, folds: int = 4) -> dict[str, Scores]:
    """Scores of what predictions_of names, on the newest `share` of jobs.

    Retrained `folds` times on the way, each time on the jobs that had ended by then. Empty without ended jobs.
    """
    past = replay_durations(history, config.rolling)
    past = past.select(np.isfinite(past.duration_s))
    if not len(past.duration_s):
        return {}
    predictions: list[Mapping[str, Floats]] = []
    actual: list[Floats] = []
    for since_s, until_s in itertools.pairwise(fold_edges(past.submit_s, share, folds)):
        tested = past.select((past.submit_s >= since_s) & (past.submit_s < until_s))
        predictions.append(_predict_fold(past.select(past.end_s < since_s), tested, config))
        actual.append(tested.duration_s)
    names = sorted(set().union(*predictions))
    return {name: _score_folds(name, predictions, actual) for name in names}


def fold_edges(submit_s: npt.NDArray[np.int64], share: float, folds: int) -> list[float]:
    """Starts of the folds that hold the newest `share` of submissions in equal parts, and infinity."""
    return [*np.quantile(submit_s, np.linspace(1 - share, 1, folds + 1)[:-1]).tolist(), math.inf]


def _predict_fold(before: Replay, tested: Replay, config: Config) -> dict[str, Floats]:
    fitted = fit(before, config.training)
    return predictions_of(fitted.model if fitted else None, tested, before)


def _score_folds(name: str, predictions: list[Mapping[str, Floats]], actual: list[Floats]) -> Scores:
    folds = [each.get(name, np.full(len(seconds), math.nan)) for each, seconds in zip(predictions, actual, strict=True)]
    return score(np.concatenate(folds), np.concatenate(actual))
