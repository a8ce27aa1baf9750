"""The speed of one family on each type, from all evidence: a Gaussian posterior of logarithms. Pure.

Let x be the log speeds of a family on the site's GPU types. Before its own runs, x has the mean of the specifications
plus what the site's other families showed on top of them (effect), and the covariance of both. A completed run on type
r says a - x[r], an achieved rate says c + x[r]; the levels a and c are free, so no unit matters. All is linear, so
the posterior is exact: a Bayesian linear model (Gelman et al., Bayesian Data Analysis, 3rd ed., chapter 14).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
OWN_BIAS = 0.05
"""Standard deviation of ln time by which runs on two types may differ in their work, however many there are."""
MEDIAN_FACTOR = math.pi / 2
"""Variance of a median over that of a mean, for many values; a median of one or two is a mean."""
_FREE = 1e3
"""Standard deviation of a level: nothing is known of it. Levels are taken from the middle of the values."""


@dataclass(frozen=True)
class Level:
    """Values of one measure with its own free level, by type.

    sign: -1 for times, 1 for rates. spread: of one run about its type's usual value. bias: of a type's value, however
    many runs it has. Standard deviations of logarithms.
    """

    values: Mapping[str, Sequence[float]]
    sign: int
    spread: float
    bias: float

    def observed(self, types: Sequence[str]) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """(places in types, medians, variances) of the types with values."""
        held = [(place, self.values[name]) for place, name in enumerate(types) if self.values.get(name)]
        places = np.array([place for place, _ in held], dtype=np.int64)
        medians = np.array([float(np.median(values)) for _, values in held])
        return places, medians, np.array([self._variance(len(values)) for _, values in held])

    def _variance(self, number: int) -> float:
        factor = MEDIAN_FACTOR if number > 2 else 1.0
        return self.bias**2 + factor * self.spread**2 / number


@dataclass(frozen=True)
class Posterior:
    """Logarithms of the run time on each type: mean and covariance. The level is that of the first measure."""

    mean: Floats
    covariance: Floats

    def deviation(self, place: int) -> float:
        return math.sqrt(max(float(self.covariance[place, place]), 0.0))


def posterior(types: Sequence[str], prior: Floats, covariance: Floats, levels: Sequence[Level]) -> Posterior | None:
    """None unless the first of the levels, the family's own run times, has a value."""
    observed = [level.observed(types) for level in levels]
    if not observed or not len(observed[0][0]):
        return None
    used = [(level, each) for level, each in zip(levels, observed, strict=True) if len(each[0])]
    number, size = len(types), len(types) + len(used)
    middles = [float(np.median(medians - level.sign * prior[places])) for level, (places, medians, _) in used]
    mean = np.concatenate([prior, middles])
    matrix = np.zeros((size, size))
    matrix[:number, :number] = covariance
    matrix[range(number, size), range(number, size)] = _FREE**2
    rows, values, variances = [], [], []
    for place, (level, (places, medians, own)) in enumerate(used):
        design = np.zeros((len(places), size))
        design[range(len(places)), places] = level.sign
        design[:, number + place] = 1.0
        rows.append(design)
        values.append(medians)
        variances.append(own)
    design, seen = np.concatenate(rows), np.concatenate(values)
    gain = np.linalg.solve(design @ matrix @ design.T + np.diag(np.concatenate(variances)), design @ matrix)
    mean = mean + gain.T @ (seen - design @ mean)
    left = matrix - gain.T @ design @ matrix
    times = np.hstack([-np.eye(number), np.zeros((number, len(used)))])
    times[:, number] = 1.0
    return Posterior(times @ mean, times @ left @ times.T)
