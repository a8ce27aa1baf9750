"""Policies of packing by name: which two jobs may share GPUs, and how their workers are calibrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulator.packing.pairs import Kind, PairTable
from simulator.packing.speed_model import squeeze_pair, stealing_speed, straggling_speed
from simulator.packing.workload import PackingJob

LEAST_SUM = 1.2
LEAST_EACH = 0.6


@dataclass(frozen=True)
class SharedPair:
    """Two jobs on one GPU. work: done on the shared GPUs, 1 is one job alone. least: the slower worker's speed.

    utilization: of both, summed.
    """

    work: float
    least: float
    utilization: float


Rule = Callable[[SharedPair], float | None]
"""What a pair gains, the more the better; None if it must not share."""


def never(pair: SharedPair) -> float | None:
    """No packing."""
    return None


def whatever_fits(pair: SharedPair) -> float | None:
    """Blind packing: the first pair that fits."""
    return 0.0


def by_utilization(most: float) -> Rule:
    """Lucid's idea: pairs whose utilizations sum to at most this, the lowest sum first."""
    return lambda pair: -pair.utilization if pair.utilization <= most else None


def by_speed(pair: SharedPair) -> float | None:
    """Pairs that do at least 1.2 times the work, each at 0.6 of its speed or more; the most work first."""
    return pair.work if pair.work >= LEAST_SUM and pair.least >= LEAST_EACH else None


@dataclass(frozen=True)
class PackingPolicy:
    """same_user: only one user's jobs share. unequal: jobs of unequal size share. steals, squeezes: see speed_model."""

    about: str
    rule: Rule
    same_user: bool = False
    unequal: bool = True
    steals: bool = False
    squeezes: bool = False

    def worker_speeds(self, table: PairTable, one: Kind, other: Kind) -> tuple[float, float] | None:
        """Speeds of two workers on one GPU; None if they do not fit."""
        free = table.speeds(one, other)
        if free is None or not self.squeezes:
            return free
        if one > other:
            swapped = self.worker_speeds(table, other, one)
            return swapped and (swapped[1], swapped[0])
        used = table.utilization
        return squeeze_pair(free, (used[one[0]], used[other[0]]))

    def job_speed(self, workers: list[float]) -> float:
        """Speed of a job from the speeds of its workers."""
        return stealing_speed(workers) if self.steals else straggling_speed(workers)

    def gain(self, table: PairTable, job: PackingJob, other: PackingJob) -> float | None:
        """What the two gain by sharing; None if they must not."""
        if (self.same_user and job.user != other.user) or not (self.unequal or job.gpus == other.gpus):
            return None
        speeds = self.worker_speeds(table, job.kind, other.kind)
        if speeds is None:
            return None
        small, large = sorted((job.gpus, other.gpus))
        by_size = sorted(zip((job.gpus, other.gpus), speeds, strict=True), reverse=True)
        spared = [1.0] * (large - small)
        of_large = self.job_speed([by_size[0][1]] * small + spared) * large - len(spared)
        used = table.utilization
        return self.rule(
            SharedPair(
                work=(of_large + by_size[1][1] * small) / small,
                least=min(speeds),
                utilization=used.get(job.kind[0], 1.0) + used.get(other.kind[0], 1.0),
            )
        )


POLICIES: Mapping[str, PackingPolicy] = {
    "none": PackingPolicy("one job a GPU", never),
    "blind": PackingPolicy("the first job that fits", whatever_fits),
    "utilization": PackingPolicy("utilizations sum to at most 100% (Lucid's rule)", by_utilization(1.0), unequal=False),
    "utilization-140": PackingPolicy("at most 140%, tuned to Gavel's V100 pairs", by_utilization(1.4), unequal=False),
    "speed": PackingPolicy("pairs of equal size, chosen by their speeds", by_speed, unequal=False),
    "same-user": PackingPolicy("the same, and only jobs of one user", by_speed, same_user=True, unequal=False),
    "stars": PackingPolicy("chosen by speed, jobs of unequal size too", by_speed),
    "stars-steal": PackingPolicy("the same, with sample stealing", by_speed, steals=True),
    "stars-all": PackingPolicy("the same, with sample stealing and squeezing", by_speed, steals=True, squeezes=True),
}  # fmt: skip
