"""How good predicted durations are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]
MIN_JOBS_OF_A_USER = 10


@dataclass(frozen=True)
class Scores:
    """Rank correlations of duration and of GPU-time (Spearman), and errors of natural logarithms.

    NaN where a side of a correlation is constant, or where no job has both sides.
    """

    jobs: int
    spearman: float
    gpu_time_spearman: float
    median_abs_log_error: float
    share_within_2x: float


NOTHING = Scores(0, math.nan, math.nan, math.nan, math.nan)


def score(predicted_s: Floats, actual_s: Floats, gpu_count: Floats, is_duration: bool = True) -> Scores:
    """Of jobs where both are known; NaN scores where there is none.

    is_duration: False for what only ranks jobs (a GPU count): its errors are NaN.
    """
    known = np.isfinite(predicted_s) & np.isfinite(actual_s)
    if not known.any():
        return NOTHING
    predicted, actual = np.maximum(predicted_s[known], 1.0), np.maximum(actual_s[known], 1.0)
    errors = np.abs(np.log(predicted) - np.log(actual))
    weighed = predicted * gpu_count[known] if is_duration else predicted
    return Scores(
        jobs=len(actual),
        spearman=spearman(predicted, actual),
        gpu_time_spearman=spearman(weighed, actual * gpu_count[known]),
        median_abs_log_error=float(np.median(errors)) if is_duration else math.nan,
        share_within_2x=float(np.mean(errors <= math.log(2))) if is_duration else math.nan,
    )


def score_of_users(
    predicted_s: Floats, actual_s: Floats, gpu_count: Floats, users: npt.NDArray[np.str_], is_duration: bool = True
) -> Scores:
    """Medians over users of their own scores, each user alike; `jobs` is how many users.

    Users with fewer than MIN_JOBS_OF_A_USER jobs are left out, and where a score is NaN from that score.
    """
    known = np.isfinite(predicted_s) & np.isfinite(actual_s)
    each = []
    for user in np.unique(users[known]):
        rows = known & (users == user)
        if rows.sum() >= MIN_JOBS_OF_A_USER:
            each.append(score(predicted_s[rows], actual_s[rows], gpu_count[rows], is_duration))
    middles = [
        _median_known([getattr(scores, name) for scores in each]) for name in Scores.__annotations__ if name != "jobs"
    ]
    return Scores(len(each), *middles)


def _median_known(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation, ties at their mean rank; NaN below two values or where a side is constant."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return math.nan
    return float(np.corrcoef(ranks(left), ranks(right))[0, 1])


def ranks(values: Floats) -> Floats:
    """From 1, ties at their mean rank."""
    ranked: Floats = np.asarray(pd.Series(values).rank(), dtype="float64")
    return ranked
