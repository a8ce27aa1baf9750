"""Laws of memory growth and their least-squares fits, in pure Python: the wrapper on a compute node has no numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """A law of growth g, increasing in the time as a share of the run so far, and its inverse."""

    grown: Callable[[float], float]
    reached: Callable[[float], float]


def _straight() -> Law:
    return Law(lambda share: share, lambda level: level)


def _logarithmic(scale: float) -> Law:
    return Law(
        lambda share: math.log1p(share / scale),
        lambda level: scale * math.expm1(level) if level < 50 else math.inf,
    )


def _saturating(scale: float) -> Law:
    return Law(
        lambda share: -math.expm1(-share / scale),
        lambda level: -scale * math.log1p(-level) if level < 1 else math.inf,
    )


LAWS = (
    _straight(),
    *(_logarithmic(scale) for scale in (0.02, 0.1, 0.3, 1.0)),
    *(_saturating(scale) for scale in (0.1, 0.15, 0.2, 0.28, 0.4, 0.55, 0.75, 1.0, 1.5, 2.5)),
)


@dataclass(frozen=True)
class Fit:
    """error: the squared error; slope: less z standard errors."""

    law: Law
    error: float
    slope: float

    def full_share(self, room: float) -> float:
        """When `room` more is used, as a share of the run so far; infinite where it never is."""
        if self.slope <= 0:
            return math.inf
        return self.law.reached(self.law.grown(1.0) + room / self.slope)


def fit(law: Law, points: Sequence[tuple[float, float]], z: float) -> Fit:
    """Least squares of used memory on law(time); points: (share of the run so far, MiB), three or more."""
    xs = [law.grown(share) for share, _ in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(mib for _, mib in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (mib - mean_y) for x, (_, mib) in zip(xs, points, strict=True)) / spread
    error = sum((mib - mean_y - slope * (x - mean_x)) ** 2 for x, (_, mib) in zip(xs, points, strict=True))
    return Fit(law, error, slope - z * math.sqrt(error / (len(points) - 2) / spread))


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


def plausible(points: Sequence[tuple[float, float]], doubt: float, floor: float) -> list[int]:
    """Indices in LAWS of the laws whose squared error is at most doubt times the least, or below floor."""
    errors = [fit(law, points, 0.0).error for law in LAWS]
    return [index for index, error in enumerate(errors) if error <= doubt * min(errors) + floor]
