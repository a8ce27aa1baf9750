"""How good predicted durations are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """spearman: rank correlation of duration, NaN where a side is constant. Errors are of natural logarithms."""

    jobs: int
    spearman: float
    median_abs_log_error: float
    share_within_2x: float


def score(predicted_s: Floats, actual_s: Floats) -> Scores:
    """Of jobs where both are known; NaN scores where there is none."""
    known = np.isfinite(predicted_s) & np.isfinite(actual_s)
    predicted, actual = np.maximum(predicted_s[known], 1.0), np.maximum(actual_s[known], 1.0)
    if not len(actual):
        return Scores(0, math.nan, math.nan, math.nan)
    errors = np.abs(np.log(predicted) - np.log(actual))
    return Scores(
        jobs=len(actual),
        spearman=spearman(predicted, actual),
        median_abs_log_error=float(np.median(errors)),
        share_within_2x=float(np.mean(errors <= math.log(2))),
    )


def spearman(left: Floats, right: Floats) -> float:
    """Rank correlation, ties at their mean rank; NaN below two values or where a side is constant."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return math.nan
    return float(np.corrcoef(pd.Series(left).rank(), pd.Series(right).rank())[0, 1])
