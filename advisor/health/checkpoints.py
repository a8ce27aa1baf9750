"""Mean time to failure (MTTF) of jobs by their number of GPUs, the chance that a job fails, and how often to save.

Failures come as a Poisson process whose rate grows with the number of GPUs, as on Meta's two clusters (Kokolis et al.,
Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, section III). docs/formulas.md has
the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from almanac.units import format_duration

TOLD_CHANCE = 0.05
"""A job with a higher chance of failure gets advice on checkpoints."""
LEAST_GPU_S = 36_000
"""A job with less GPU time than 10 GPU-hours is not looked at: no site fails so often."""
LEAST_FAILURES = 3
"""Fewer failures tell no rate to plan by."""


@dataclass(frozen=True)
class Exposure:
    """Jobs of one number of GPUs: their run time in hours, added up, and those that a node failed."""

    gpus: int
    hours: float
    failures: int


@dataclass(frozen=True)
class Mttf:
    """Hours between failures of a job with from_gpus to to_gpus GPUs, and the 95% interval; inf without an end.

    mttf_h: hours / failures; None without a failure.
    """

    from_gpus: int
    to_gpus: int
    hours: float
    failures: int
    mttf_h: float | None
    low_h: float
    high_h: float


@dataclass(frozen=True)
class FailureRate:
    """Failures of a site's jobs on gpu_hours."""

    failures: int
    gpu_hours: float

    def mttf_s(self, gpus: int) -> float | None:
        """Seconds between failures of a job with so many GPUs; None if too few failures are known."""
        if self.failures < LEAST_FAILURES or not 0 < self.gpu_hours < math.inf or gpus < 1:
            return None
        return 3600 * self.gpu_hours / (self.failures * gpus)


@dataclass(frozen=True)
class CheckpointAdvice:
    """Save every every_s seconds if one checkpoint takes cost_s. chance: that the job meets a failure."""

    chance: float
    mttf_s: float
    every_s: float
    cost_s: float


def failure_rate(exposures: Iterable[Exposure]) -> FailureRate:
    """Pool jobs of all sizes: failures per GPU-hour."""
    known = [each for each in exposures if each.gpus > 0 and 0 <= each.hours < math.inf]
    return FailureRate(sum(each.failures for each in known), sum(each.gpus * each.hours for each in known))


def mttf_by_gpus(exposures: Iterable[Exposure]) -> list[Mttf]:
    """MTTF of jobs with 1, 2, 3 to 4, 5 to 8, ... GPUs; without sizes that no job had."""
    sizes = dict[int, tuple[float, int]]()
    for each in exposures:
        if each.gpus > 0 and 0 < each.hours < math.inf:
            size = (each.gpus - 1).bit_length()
            hours, failures = sizes.get(size, (0.0, 0))
            sizes[size] = hours + each.hours, failures + each.failures
    found = []
    for size, (hours, failures) in sorted(sizes.items()):
        low_h, high_h = mttf_interval(failures, hours)
        mttf_h = hours / failures if failures else None
        found.append(Mttf((1 << size) // 2 + 1, 1 << size, hours, failures, mttf_h, low_h, high_h))
    return found


def mttf_interval(failures: int, hours: float) -> tuple[float, float]:
    """95% interval of the hours between failures, of a Poisson count by Jeffreys' prior; (low, inf) for no failure."""
    from scipy.special import gammaincinv

    low = hours / float(gammaincinv(failures + 0.5, 0.975))
    return low, hours / float(gammaincinv(failures + 0.5, 0.025)) if failures else math.inf


def chance_of_failure(mttf_s: float, run_s: float) -> float:
    """Return the probability that a job of run_s seconds meets at least one failure."""
    return -math.expm1(-max(run_s, 0.0) / mttf_s)


def chance_text(chance: float) -> str:
    """Chance in words: "1 in 8", or "7 in 10" if it is over one half."""
    if chance > 0.5:
        return f"{min(round(10 * chance), 9)} in 10"
    return f"1 in {round(1 / chance)}"


def checkpoint_text(advice: CheckpointAdvice) -> str:
    """ "about 1 in 8 such jobs meets a failure; a checkpoint every 47 min loses least (5 min each)"."""
    chance, every, cost = chance_text(advice.chance), format_duration(advice.every_s), format_duration(advice.cost_s)
    return f"about {chance} such jobs meets a failure; a checkpoint every {every} loses least ({cost} each)"


def save_every_s(cost_s: float, mttf_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time (Daly 2006, equation 37).

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006) 303-312.
    Its first term is Young's sqrt(2 cost MTTF) (CACM 17 (1974) 530). Never less than one checkpoint takes: from
    cost_s = 0.79 mttf_s on, the formula asks for less time to work than to save.
    """
    if cost_s >= mttf_s:
        return cost_s
    part = cost_s / (2 * mttf_s)
    return max(math.sqrt(2 * cost_s * mttf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s, cost_s)


def advise_checkpoints(rate: FailureRate, gpus: int, run_s: float | None, cost_s: float) -> CheckpointAdvice | None:
    """Advise a job of this size and run time, if its chance of a failure is over 5% and known."""
    mttf_s = rate.mttf_s(gpus)
    if mttf_s is None or run_s is None or not 0 < run_s < math.inf or not 0 < cost_s < math.inf:
        return None
    chance, every_s = chance_of_failure(mttf_s, run_s), save_every_s(cost_s, mttf_s)
    return CheckpointAdvice(chance, mttf_s, every_s, cost_s) if chance > TOLD_CHANCE and every_s < run_s else None
