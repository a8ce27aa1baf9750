"""Predict from samples of used GPU memory alone whether a running job outgrows its GPU.

The samples of DCGM or nvidia-smi say what a framework holds, not what it needs: a caching allocator climbs in stairs, a
preallocating one is flat, evaluation phases come and go. The rule therefore extrapolates the highest use so far, takes
the least growth that explains it, and restarts a job only after five predictions in a row and above 80% of the
capacity. Memory that rises in one step is never predicted: nothing announces it.

In pure Python: the wrapper on a compute node has no numpy. benchmarks/mig_restart.py measures the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

USE_SHARE = 0.8  # of the capacity, that the highest use must have reached
NEWER_SHARE = 0.5  # of the run so far, that the fit is on: what a program loads at its start is no growth
LAW_SHARE = 0.75  # of the run so far, on which the law is chosen as well: a curve shows better on more of it
IN_A_ROW = 5  # predictions that must all say that the job does not fit
STEP_SHARE = 0.005  # of the run so far, between two predictions, so that five are not one
LEAST_ELAPSED_SHARE = 0.15  # of the expected run time; before it, the first tooth of a sawtooth looks like growth
BLOCKS = 10  # of equal length, whose highest uses are fitted; half of them need samples
LEAST_SAMPLES = 12  # before the first prediction
MOST_JUMP_SHARE = 0.6  # of the growth in the fitted part, that one block may have; above it the growth is a step
FALLEN_SHARE = 0.1  # of the capacity, by which the newest use may be below the highest
Z = 2.33  # standard errors taken off the fitted growth: one-sided 99%
LEAST_CHANCE = 0.95  # that the job still runs when the memory would be full
ALIKE = 1e-6  # squared error, as a share of the squared capacity, below which all laws fit
LEAST_POINTS = 3  # that a law is fitted to
MOST_POINTS = 256  # samples kept; with more, neighbors become one, the higher of them

Series = Sequence[tuple[float, float]]
"""Shares of the run so far, and MiB."""
Law = tuple[Callable[[float], float], Callable[[float], float]]
"""Growth by the time as a share of the run so far, increasing, and its inverse."""


def _logarithmic(scale: float) -> Law:
    return (
        lambda share: math.log1p(share / scale),
        lambda level: scale * math.expm1(level) if level < 50 else math.inf,
    )


def _saturating(scale: float) -> Law:
    return (
        lambda share: -math.expm1(-share / scale),
        lambda level: -scale * math.log1p(-level) if level < 1 else math.inf,
    )


LAWS: tuple[Law, ...] = (
    (lambda share: share, lambda level: level),
    *(_logarithmic(scale) for scale in (0.02, 0.1, 0.3, 1.0)),
    *(_saturating(scale) for scale in (0.1, 0.15, 0.2, 0.28, 0.4, 0.55, 0.75, 1.0, 1.5, 2.5)),
)


def fit(law: Law, series: Series, z: float) -> tuple[float, float]:
    """Fit used memory to law(time) by least squares. Returns the squared error, and the slope less z standard errors.

    Needs three points.
    """
    points = [(law[0](share), mib) for share, mib in series]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    error = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return error, slope - z * math.sqrt(error / (len(points) - 2) / spread)


def full_share(series: Sequence[Series], room_mib: float, floor: float) -> float:
    """When room_mib more is used, as a share of the run so far; infinite where it never is.

    By the slowest law whose squared error is the least, or below floor, on any of the series; its slope is that of the
    first one.
    """
    full = 0.0
    for each in series:
        errors = [fit(law, each, 0.0)[0] for law in LAWS]
        for law, error in zip(LAWS, errors, strict=True):
            if error <= min(errors) + floor:
                grown, reached = law
                slope = fit(law, series[0], Z)[1]
                full = max(full, reached(grown(1.0) + room_mib / slope) if slope > 0 else math.inf)
    return full


@dataclass(frozen=True)
class RunTime:
    """What is known of the time at which a job ends, in s since its start.

    predicted_s: its median; spread: the standard deviation of its logarithm (0: it is exact). limit_s: the time limit;
    alone, every end up to it is equally likely.
    """

    predicted_s: float | None = None
    spread: float = 0.0
    limit_s: float | None = None

    @property
    def end_s(self) -> float | None:
        """The predicted end, at most the limit; None where neither is known."""
        known = [end for end in (self.predicted_s, self.limit_s) if end is not None and 0 < end < math.inf]
        return min(known, default=None)

    def chance_of_reaching(self, time_s: float, now_s: float) -> float:
        """The probability that the job still runs at time_s, given that it runs now. 0 where nothing is known."""
        limit = self.limit_s if self.limit_s is not None and self.limit_s > 0 else math.inf
        if not time_s < limit or self.end_s is None:
            return 0.0
        predicted = self.predicted_s
        if predicted is None or not 0 < predicted < math.inf or (self.spread <= 0 and now_s >= predicted):
            return 0.0 if limit == math.inf else max(0.0, (limit - time_s) / (limit - now_s))
        if self.spread <= 0:
            return 1.0 if time_s <= predicted else 0.0
        tails = [math.erfc(math.log(max(at, 1e-9) / predicted) / self.spread / 2**0.5) for at in (time_s, now_s)]
        return tails[0] / tails[1] if tails[1] > 0 else 0.0


@dataclass(frozen=True)
class Point:
    """Neighboring samples: the time of the newest, their highest, their mean, and how many they are."""

    time_s: float
    highest_mib: float
    mean_mib: float
    samples: int

    def joined(self, after: Point) -> Point:
        samples = self.samples + after.samples
        mean = (self.mean_mib * self.samples + after.mean_mib * after.samples) / samples
        return Point(after.time_s, max(self.highest_mib, after.highest_mib), mean, samples)


class GrowthWatch:
    """The samples of one run: observe() each of them, in order, as it comes.

    capacity_mib: of the GPU or slice; None, NaN, or not positive: unknown, and nothing is ever predicted.
    family_peak_mib: of completed runs of the family; growth up to it is no reason to restart, if it fits.
    """

    def __init__(self, capacity_mib: float | None, run_time: RunTime, family_peak_mib: float | None = None) -> None:
        self._capacity_mib = capacity_mib if capacity_mib is not None and 0 < capacity_mib < math.inf else None
        self._run_time, self._family_peak_mib = run_time, family_peak_mib
        self._points: list[Point] = []
        self._stride = 1
        self._newest_s, self._predicted_s = -1.0, -math.inf
        self._row = 0
        self._full_s: float | None = None

    def observe(self, time_s: float, used_mib: float | None) -> float | None:
        """Note the use at a time, s since the start. Returns when the memory is full, if the job is to restart now.

        A sample that is missing, not finite, negative, or not later than the one before changes nothing.
        """
        is_finite = used_mib is not None and math.isfinite(used_mib) and math.isfinite(time_s)
        if not is_finite or used_mib is None or used_mib < 0 or time_s <= self._newest_s:
            return self._full_s
        self._newest_s = time_s
        self._note(time_s, used_mib)
        if time_s - self._predicted_s >= STEP_SHARE * time_s:
            self._predicted_s = time_s
            full_s = self._predict(time_s)
            self._row = 0 if full_s is None else self._row + 1
            self._full_s = full_s if full_s is not None and self._may_restart(time_s, used_mib) else None
        return self._full_s

    def _note(self, time_s: float, used_mib: float) -> None:
        """Join every _stride samples to one point; past MOST_POINTS, each two points to one."""
        sample = Point(time_s, used_mib, used_mib, 1)
        if self._points and self._points[-1].samples < self._stride:
            self._points[-1] = self._points[-1].joined(sample)
        else:
            self._points.append(sample)
        if len(self._points) > MOST_POINTS:
            rest = self._points[len(self._points) // 2 * 2 :]
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [before.joined(after) for before, after in pairs] + rest
            self._stride *= 2

    def _predict(self, now_s: float) -> float | None:
        """When the memory is full, in s since the start, if the job outgrows it; without a look at the present use."""
        if self._capacity_mib is None or self._run_time.end_s is None or len(self._points) < LEAST_SAMPLES:
            return None
        newer, longer = (self._blocks(now_s, share) for share in (NEWER_SHARE, LAW_SHARE))
        if len(newer) < BLOCKS // 2:
            return None
        before = self._points[: round(len(self._points) * (1 - NEWER_SHARE))]
        start_mib = max((point.highest_mib for point in before), default=0.0)
        peaks = list(accumulate((block.highest_mib for block in newer), max, initial=start_mib))[1:]
        rises = [after - before for before, after in pairwise(peaks)]
        if sum(rises) <= 0 or max(rises) > MOST_JUMP_SHARE * sum(rises):
            return None
        both = [newer, longer if len(longer) >= LEAST_POINTS else newer]  # after a long gap in the samples
        series = [[(block.time_s / now_s, block.mean_mib) for block in blocks] for blocks in both]
        full_s = now_s * full_share(series, self._capacity_mib - peaks[-1], ALIKE * self._capacity_mib**2)
        return full_s if self._run_time.chance_of_reaching(full_s, now_s) >= LEAST_CHANCE else None

    def _blocks(self, now_s: float, share: float) -> list[Point]:
        """This newest share of the samples in blocks of equal length; a block without samples is left out."""
        newer = self._points[round(len(self._points) * (1 - share)) :]
        start_s, length_s = newer[0].time_s, now_s - newer[0].time_s
        blocks: dict[int, Point] = {}
        for point in newer:
            index = min(int((point.time_s - start_s) / length_s * BLOCKS), BLOCKS - 1)
            blocks[index] = blocks[index].joined(point) if index in blocks else point
        return list(blocks.values())

    def _may_restart(self, now_s: float, used_mib: float) -> bool:
        capacity, end_s, family = self._capacity_mib or 0.0, self._run_time.end_s or 0.0, self._family_peak_mib
        highest = max(point.highest_mib for point in self._points)
        return (
            now_s >= LEAST_ELAPSED_SHARE * end_s
            and highest >= USE_SHARE * capacity
            and highest - used_mib <= FALLEN_SHARE * capacity
            and self._row >= IN_A_ROW
            and not (family is not None and highest <= family <= capacity)
        )
