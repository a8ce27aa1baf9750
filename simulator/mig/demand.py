"""Jobs of one GPU or slice that arrive at a MIG cluster: the generator, with every assumption as a parameter.

Arrivals are Poisson with a rate that follows the hour of the day. Each class of jobs has its own share of the offered
time, by day and by night. Run times are lognormal. A job needs memory and keeps some compute slices busy; its shape is
the smallest that holds the memory and slows it down by at most 1.5 (the advice's own rule). The load is the time that
the jobs would take on full GPUs, over the GPUs' time: with slices, loads above 1 can be served.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from advisor.mig.replay import PoolJob
from advisor.mig.sizes import Sizes, sizes_of
from almanac.mig import MigModel
from almanac.units import DAY_S, HOUR_S

MAX_SLOWDOWN = 1.5


@dataclass(frozen=True)
class SliceRequest:
    """A job of the simulated cluster. full_s: run time on a full GPU. compute: compute slices that it keeps busy."""

    submit_s: float
    full_s: float
    shape: str
    compute: float


@dataclass(frozen=True)
class JobClass:
    """Jobs of one kind. day, night: weight of its offered time at 15:00 and at 3:00, before the load scales them.

    median_s, sigma: of the lognormal run time on a full GPU. memory_gib, compute: uniform between the two.
    """

    name: str
    day: float
    night: float
    median_s: float
    sigma: float
    memory_gib: tuple[float, float]
    compute: tuple[float, float]

    @property
    def mean_s(self) -> float:
        """Mean run time on a full GPU."""
        return self.median_s * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True)
class Demand:
    """What arrives. classes: see JobClass; flat demand uses the mean of day and night.

    drift_per_day: factor per day on the weights of the classes, in their order; () for none. bursts_per_day,
    burst_jobs: times that one class submits many jobs at once, such as an array, and the mean number of these.
    """

    classes: tuple[JobClass, ...]
    is_flat: bool = False
    drift_per_day: tuple[float, ...] = ()
    bursts_per_day: float = 0.0
    burst_jobs: float = 0.0


CLASSES = (
    JobClass("notebook", 0.40, 0.08, 20 * 60, 1.0, (0.5, 4.6), (0.2, 1.4)),
    JobClass("inference", 0.30, 0.12, 30 * 60, 1.0, (4.9, 9.4), (0.6, 3.0)),
    JobClass("fine-tuning", 0.28, 0.18, 60 * 60, 1.0, (10.0, 19.0), (1.5, 6.0)),
    JobClass("training", 0.18, 0.30, 90 * 60, 1.0, (20.0, 38.0), (3.5, 7.0)),
)
"""Shares of a site where people work on notebooks by day and train whole models overnight (an assumption)."""
TIGHT = (
    JobClass("notebook", 0.30, 0.06, 30 * 60, 1.0, (0.5, 4.6), (0.2, 1.4)),
    JobClass("inference", 0.24, 0.10, 45 * 60, 1.0, (4.9, 9.4), (0.6, 3.0)),
    JobClass("fine-tuning", 0.36, 0.20, 90 * 60, 1.0, (10.0, 19.0), (1.5, 6.0)),
    JobClass("training", 0.30, 0.34, 150 * 60, 1.0, (20.0, 38.0), (3.5, 7.0)),
)
"""Longer jobs, and more that need much of a GPU: at a load of 1.31 the slices are nine tenths full by day."""
DEMANDS = {
    "tight": Demand(TIGHT),
    "tight-flat": Demand(TIGHT, is_flat=True),
    "daynight": Demand(CLASSES),
    "flat": Demand(CLASSES, is_flat=True),
    "small": Demand((_small := JobClass("notebook", 0.6, 0.2, 20 * 60, 1.2, (0.5, 4.6), (0.2, 1.4)), *CLASSES[1:])),
    "large": Demand((*CLASSES[:3], JobClass("training", 0.5, 0.7, 240 * 60, 0.8, (20.0, 38.0), (3.5, 7.0)))),
    "drift": Demand(CLASSES, drift_per_day=(1.5, 1.2, 0.8, 0.7)),
    "drift-large": Demand(CLASSES, drift_per_day=(0.7, 0.8, 1.2, 1.4)),
    "heavy": Demand(
        tuple(JobClass(c.name, c.day, c.night, c.median_s / 2, 1.6, c.memory_gib, c.compute) for c in CLASSES)
    ),
    "short": Demand(_scaled := tuple(replace(each, median_s=each.median_s / 2) for each in CLASSES)),
    "short-flat": Demand(_scaled, is_flat=True),
    "bursts": Demand(CLASSES, bursts_per_day=4, burst_jobs=30),
}
"""Named demands. `daynight` and `flat` are the ones that the goals name; the others test robustness."""


def shape_of(model: MigModel, memory_gib: float, compute: float) -> str:
    """The smallest shape that holds the memory and keeps the slow-down; the whole GPU where no slice does."""
    sizes = sizes_of(model)
    for shape, slices in zip(sizes.shapes[:-1], sizes.compute, strict=False):
        profile = model.profile(shape)
        held_gib = profile.memory_gib[0] if profile and profile.memory_gib else 0.0
        if memory_gib <= held_gib and compute / slices <= MAX_SLOWDOWN:
            return shape
    return sizes.shapes[-1]


def generate(demand: Demand, model: MigModel, gpus: int, load: float, days: float, seed: int) -> list[SliceRequest]:
    """Jobs by submit time. The same arguments give the same jobs. `load` is the expected one."""
    rng = random.Random(f"mig {seed}")
    scale = load * gpus / _mean_weight(demand, days)
    jobs: list[SliceRequest] = []
    for place, each in enumerate(demand.classes):
        peak = (
            scale * max(_weight(demand, place, hour * HOUR_S) for hour in range(math.ceil(days * 24) + 1)) / each.mean_s
        )
        share = _burst_share(demand, each, scale) if demand.bursts_per_day else 0.0
        now_s = 0.0
        while (now_s := now_s + rng.expovariate(peak)) < days * DAY_S:
            if rng.random() * peak < scale * _weight(demand, place, now_s) / each.mean_s * (1 - share):
                jobs.append(_job(rng, each, model, now_s))
    jobs += _bursts(rng, demand, model, days)
    return sorted(jobs, key=lambda job: job.submit_s)


def pool_jobs(jobs: Sequence[SliceRequest], sizes: Sizes) -> list[PoolJob]:
    """The jobs as advisor.mig.replay wants them."""
    places = {shape: place for place, shape in enumerate(sizes.shapes)}
    return [PoolJob(job.submit_s, places[job.shape], sizes.run_times(job.full_s, job.compute)) for job in jobs]


def _weight(demand: Demand, place: int, now_s: float) -> float:
    each = demand.classes[place]
    day = 0.5 if demand.is_flat else 0.5 + 0.5 * math.cos(2 * math.pi * (now_s / DAY_S - 15 / 24))
    drift = demand.drift_per_day[place] ** (now_s / DAY_S) if demand.drift_per_day else 1.0
    return (each.night + (each.day - each.night) * day) * drift


def _mean_weight(demand: Demand, days: float) -> float:
    times = [hour * HOUR_S for hour in range(max(1, round(days * 24)))]
    return sum(_weight(demand, place, now_s) for place in range(len(demand.classes)) for now_s in times) / len(times)


def _burst_share(demand: Demand, each: JobClass, scale: float) -> float:
    """The part of a class's mean offered time that arrives in bursts, at most one half."""
    burst_s = demand.bursts_per_day / len(demand.classes) * demand.burst_jobs * each.mean_s
    return min(0.5, burst_s / (scale * (each.day + each.night) / 2 * DAY_S))


def _bursts(rng: random.Random, demand: Demand, model: MigModel, days: float) -> list[SliceRequest]:
    jobs: list[SliceRequest] = []
    now_s = 0.0
    while demand.bursts_per_day and (now_s := now_s + rng.expovariate(demand.bursts_per_day / DAY_S)) < days * DAY_S:
        each = rng.choice(demand.classes)
        first = _job(rng, each, model, now_s)
        for _ in range(round(rng.uniform(0.5, 1.5) * demand.burst_jobs)):
            jobs.append(
                SliceRequest(now_s, rng.lognormvariate(math.log(each.median_s), each.sigma), first.shape, first.compute)
            )
    return jobs


def _job(rng: random.Random, each: JobClass, model: MigModel, now_s: float) -> SliceRequest:
    compute = rng.uniform(*each.compute)
    shape = shape_of(model, rng.uniform(*each.memory_gib), compute)
    return SliceRequest(now_s, rng.lognormvariate(math.log(each.median_s), each.sigma), shape, compute)
