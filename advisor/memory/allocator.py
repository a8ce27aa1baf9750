"""Peak GPU memory from an allocator's requests and its reuse ratio, by iteration (migm-mig-scheduling, Algorithm 1).

The paper fits a line to the requested memory (a + b i) and one to the inverse reuse ratio (c + d i), both over all
iterations so far:

    peak(T) = (a + b T + z sigma) / (c + d T) + context

The reuse ratio is the memory that the allocator holds per byte requested, so its inverse is requested / held. The paper
does not give the test of convergence, T, the constant of the CUDA context, or whether z is one- or two-sided: the
constants below are our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from advisor.memory.growth import IN_A_ROW, NEWER_SHARE, USE_SHARE

Z_ONE_SIDED = 2.3263
"""99% of a normal distribution lie below it; two-sided it would be 2.5758. Only a peak above the prediction matters."""
CONTEXT_MIB = 450.0
"""Of the CUDA context: about what a process without tensors shows in nvidia-smi on an A100."""
LEAST_ITERATIONS = 3
"""Before the first prediction."""
LEAST_INVERSE = 1.0
"""The fitted inverse reuse ratio counts as at least this; 1.0 is no reuse at all."""


class Iteration(NamedTuple):
    """One iteration of a job. requested_mib: by its tensors; held_mib: what the allocator took for them, its peak."""

    requested_mib: float
    held_mib: float


class Line(NamedTuple):
    """a + b i by least squares. sigma: standard deviation of the residuals, with two degrees of freedom less."""

    intercept: float
    slope: float
    sigma: float

    def at(self, iteration: float) -> float:
        return self.intercept + self.slope * iteration


def fit_line(start: int, values: Sequence[float]) -> Line:
    """The line through (start, values[0]), (start + 1, values[1]) and so on; two values or more."""
    count = len(values)
    mean_i, mean = start + (count - 1) / 2, sum(values) / count
    spread = count * (count * count - 1) / 12
    slope = sum((start + n - mean_i) * (value - mean) for n, value in enumerate(values)) / spread
    error = sum((value - mean - slope * (start + n - mean_i)) ** 2 for n, value in enumerate(values))
    return Line(mean - slope * mean_i, slope, math.sqrt(error / (count - 2)) if count > 2 else 0.0)


def predicted_peak_mib(iterations: Sequence[Iteration], last: float, newer_share: float = 1.0) -> float | None:
    """The peak up to iteration `last` (counted from 1); None with too few iterations or an unusable value among them.

    Values that are not finite, a held memory of 0, and a `last` that is over are unusable. newer_share: of the
    iterations, that the lines are fitted to; 1.0 is the paper's.
    """
    first = round(len(iterations) * (1 - newer_share))
    newer = iterations[first:]
    if len(newer) < LEAST_ITERATIONS or not (math.isfinite(last) and last >= len(iterations)):
        return None
    if not all(math.isfinite(value) and value > 0 for each in newer for value in each):
        return None
    requested = fit_line(first + 1, [each.requested_mib for each in newer])
    inverse = fit_line(first + 1, [each.requested_mib / each.held_mib for each in newer])
    return (requested.at(last) + Z_ONE_SIDED * requested.sigma) / max(inverse.at(last), LEAST_INVERSE) + CONTEXT_MIB


class AllocatorWatch:
    """Algorithm 1 with the guards of an early restart: observe() each iteration as it ends.

    capacity_mib: None, NaN, or not positive: unknown, and nothing is ever predicted. family_peak_mib: see GrowthWatch.
    """

    def __init__(self, capacity_mib: float | None, family_peak_mib: float | None = None) -> None:
        self._capacity_mib = capacity_mib if capacity_mib is not None and 0 < capacity_mib < math.inf else math.inf
        self._family_peak_mib = family_peak_mib
        self._iterations: list[Iteration] = []
        self._row = 0

    def observe(self, iteration: Iteration, last: float | None) -> bool:
        """Return True to restart now. last: the number of the job's last iteration; None: nothing is predicted."""
        self._iterations.append(iteration)
        peak = predicted_peak_mib(self._iterations, math.nan if last is None else last, NEWER_SHARE)
        self._row = self._row + 1 if peak is not None and peak > self._capacity_mib else 0
        used, family = max(each.held_mib for each in self._iterations) + CONTEXT_MIB, self._family_peak_mib
        is_known = family is not None and used <= family <= self._capacity_mib
        return self._row >= IN_A_ROW and used >= USE_SHARE * self._capacity_mib and not is_known
