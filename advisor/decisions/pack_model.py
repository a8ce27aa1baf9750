"""Throughput of packed jobs at shares that were not tried: a smooth surface through what was measured.

The surface (kriging) is a sum of one smooth curve for each job's share and a small interaction. It steers which shares
`pack_shares` tries, and nothing else. Without numpy, because almanac-pack runs where no library is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_LENGTH_PCT = 40.0
"""Shares nearer than this have similar throughput."""
_INTERACTION, _SLOPE, _NUGGET = 0.1, 0.001, 1e-4
"""Variances relative to that of the curve of one share; the slope's is per percent squared."""
_LEAST = 1e-3
"""Of the largest rate: a prediction is never zero or negative."""
_NEAR = [math.exp(-0.5 * (distance / _LENGTH_PCT) ** 2) for distance in range(101)]
Measured = tuple[tuple[int, ...], tuple[float | None, ...]]
"""Shares, and the rate of each job under them."""


def predict_throughputs(measured: Sequence[Measured], shares: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """Steps per second of each job, one row per entry of shares. Every measured rate must be above zero."""
    known = [tried for tried, _ in measured]
    rates = [[rate or 0.0 for rate in rates] for _, rates in measured]
    tops = [max(column) for column in zip(*rates, strict=True)]
    scaled = [[rate / top for rate, top in zip(row, tops, strict=True)] for row in rates]
    means = [sum(column) / len(column) for column in zip(*scaled, strict=True)]
    covariance = [[_covariance(one, other) for other in known] for one in known]
    for place, row in enumerate(covariance):
        row[place] += _NUGGET
    columns = _solve(covariance, [[rate - mean for rate, mean in zip(row, means, strict=True)] for row in scaled])
    weights = list(zip(*columns, strict=True))
    found = []
    for wanted in shares:
        near = [_covariance(wanted, tried) for tried in known]
        found.append(
            [top * _height(mean, near, weight) for top, mean, weight in zip(tops, means, weights, strict=True)]
        )
    return found


def _height(mean: float, near: Sequence[float], weights: Sequence[float]) -> float:
    return max(_LEAST, mean + sum(one * weight for one, weight in zip(near, weights, strict=True)))


def _covariance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    curves, product, slope = 0.0, 1.0, 0
    for share, wanted in zip(one, other, strict=True):
        near = _NEAR[abs(share - wanted)]
        curves, product, slope = curves + near, product * near, slope + share * wanted
    return curves + _INTERACTION * product + _SLOPE * slope


def _solve(matrix: Sequence[list[float]], right: Sequence[list[float]]) -> list[list[float]]:
    """X of matrix X = right, by elimination without pivots: the matrix is positive definite."""
    rows = [[*left, *values] for left, values in zip(matrix, right, strict=True)]
    size = len(rows)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            row[place:] = [value - factor * above for value, above in zip(row[place:], pivot[place:], strict=True)]
    found: list[list[float]] = [[] for _ in rows]
    for place in reversed(range(size)):
        row = rows[place]
        values = row[size:]
        for later in range(place + 1, size):
            values = [value - row[later] * known for value, known in zip(values, found[later], strict=True)]
        found[place] = [value / row[place] for value in values]
    return found
