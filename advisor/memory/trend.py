"""Fit the straight line that shows growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MIN_TREND_RUNS = 5


class TrendLine(NamedTuple):
    slope: float
    correlation: float


def straight_line(times: Sequence[int], values: Sequence[float]) -> TrendLine | None:
    """Least squares; None for fewer than MIN_TREND_RUNS points, or where one side does not vary."""
    number = len(values)
    if number < MIN_TREND_RUNS:
        return None
    mean_t, mean_v = sum(times) / number, math.fsum(values) / number
    offsets, heights = [time - mean_t for time in times], [value - mean_v for value in values]
    squares_t, squares_v = math.fsum([t * t for t in offsets]), math.fsum([v * v for v in heights])
    if squares_t <= 0 or squares_v <= 1e-18:
        return None
    product = math.fsum([t * v for t, v in zip(offsets, heights, strict=True)])
    return TrendLine(product / squares_t, product / math.sqrt(squares_t * squares_v))
