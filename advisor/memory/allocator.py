"""Peak GPU memory from an allocator's requests and its reuse ratio, by iteration (migm-mig-scheduling, Algorithm 1).

The paper fits a line to the requested memory (a + b i) and one to the inverse reuse ratio (c + d i), both over all
iterations so far:

    peak(T) = (a + b T + z sigma) / (c + d T) + workspaces + context

The reuse ratio is the memory that the allocator holds per byte requested, so its inverse is requested / held. The paper
does not give the test of convergence, T, the constant of the CUDA context, or whether z is one- or two-sided: they are
parameters here, with our choice as the default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.memory.growth import RULES, FamilyPeaks

Z_ONE_SIDED = 2.3263
"""99% of a normal distribution lie below it; two-sided it would be 2.5758."""


@dataclass(frozen=True)
class AllocatorRules:
    """What the paper leaves open.

    z: one-sided, because only a peak above the prediction matters. context_mib: of the CUDA context, about what a
    process without tensors shows in nvidia-smi on an A100; a job's own first sample is better where it is known.
    least_iterations: before the first prediction. in_a_row: predictions above the capacity, before a restart.
    newer_share: of the iterations, that the lines are fitted to; 1.0 is the paper's, 0.5 the guard of an early restart.
    least_inverse: the fitted inverse reuse ratio counts as at least this, where its line falls to zero or below; 1.0 is
    no reuse at all.
    """

    z: float = Z_ONE_SIDED
    context_mib: float = 450.0
    least_iterations: int = 3
    in_a_row: int = 5
    newer_share: float = 1.0
    least_inverse: float = 1.0


PAPER = AllocatorRules()
GUARDED = AllocatorRules(newer_share=0.5)


@dataclass(frozen=True)
class Iteration:
    """One iteration of a job. requested_mib: by its tensors; held_mib: what the allocator took for them, its peak."""

    requested_mib: float
    held_mib: float


@dataclass(frozen=True)
class Line:
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


def predicted_peak_mib(
    iterations: Sequence[Iteration], last: float, workspaces_mib: float = 0.0, rules: AllocatorRules = PAPER
) -> float | None:
    """The peak up to iteration `last` (counted from 1); None with too few iterations or an unusable value among them.

    Values that are not finite, a held memory of 0, and a `last` that is over are unusable.
    """
    first = round(len(iterations) * (1 - rules.newer_share))
    newer = iterations[first:]
    if len(newer) < max(2, rules.least_iterations) or not (math.isfinite(last) and last >= len(iterations)):
        return None
    if not all(_is_usable(each) for each in newer):
        return None
    requested = fit_line(first + 1, [each.requested_mib for each in newer])
    inverse = fit_line(first + 1, [each.requested_mib / each.held_mib for each in newer])
    reuse = max(inverse.at(last), rules.least_inverse)
    return (requested.at(last) + rules.z * requested.sigma) / reuse + workspaces_mib + rules.context_mib


def _is_usable(iteration: Iteration) -> bool:
    values = (iteration.requested_mib, iteration.held_mib)
    return all(math.isfinite(value) and value > 0 for value in values)


class AllocatorWatch:
    """Algorithm 1 with the guards of an early restart: observe() each iteration as it ends.

    capacity_mib: None, NaN, or not positive: unknown, and nothing is ever predicted.
    """

    def __init__(
        self,
        capacity_mib: float | None,
        workspaces_mib: float = 0.0,
        rules: AllocatorRules = GUARDED,
        use_share: float = RULES.use_share,
    ) -> None:
        self._capacity_mib, self._workspaces_mib = capacity_mib, workspaces_mib
        self._rules, self._use_share = rules, use_share
        self._iterations: list[Iteration] = []
        self._predictions: list[float | None] = []

    def observe(self, iteration: Iteration, last: float | None, family: FamilyPeaks | None = None) -> bool:
        """Whether to restart now. last: the number of the job's last iteration; None: unknown, nothing is predicted."""
        self._iterations.append(iteration)
        known = last if last is not None else math.nan
        self._predictions.append(predicted_peak_mib(self._iterations, known, self._workspaces_mib, self._rules))
        capacity = self._capacity_mib
        if capacity is None or not outgrows(self._predictions, capacity, self._rules):
            return False
        used = max(each.held_mib for each in self._iterations) + self._workspaces_mib + self._rules.context_mib
        if used < self._use_share * capacity:
            return False
        share = len(self._iterations) / known
        return not (family and family.explains(used, share, capacity, RULES.least_runs))


def outgrows(predictions: Sequence[float | None], capacity_mib: float | None, rules: AllocatorRules = GUARDED) -> bool:
    """Whether in_a_row predictions say that the job does not fit. False where the capacity is unknown."""
    if capacity_mib is None or not 0 < capacity_mib < math.inf or len(predictions) < rules.in_a_row:
        return False
    return all(each is not None and each > capacity_mib for each in predictions[-rules.in_a_row :])
