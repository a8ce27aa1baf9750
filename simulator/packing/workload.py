"""Jobs that arrive at random, of the kinds in a table of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from almanac.errors import RequestError
from almanac.units import HOUR_S
from simulator.packing.pairs import Kind, PairTable

ONE_GPU: Mapping[int, float] = {1: 1.0}
GANGS: Mapping[int, float] = {1: 0.6, 2: 0.2, 4: 0.15, 8: 0.05}
"""Share of jobs by GPUs: mostly small, as in Philly and Helios."""


@dataclass(frozen=True)
class PackingJob:
    """duration_s: alone on its GPUs."""

    submit_s: float
    kind: Kind
    duration_s: float
    user: int

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.kind[1]


@dataclass(frozen=True)
class ArrivalOptions:
    """load: GPU-hours that arrive each hour, alone, as a share of the GPUs. shares: of jobs, by number of GPUs."""

    load: float = 1.1
    jobs: int = 1500
    users: int = 30
    gpus: int = 36
    shortest_s: float = 1 * HOUR_S
    longest_s: float = 4 * HOUR_S
    shares: Mapping[int, float] = field(default_factory=lambda: ONE_GPU)


def draw_jobs(table: PairTable, options: ArrivalOptions, seed: int) -> tuple[PackingJob, ...]:
    """Poisson arrivals, by submission; durations are uniform.

    Kinds, durations, users, and gaps have random streams of their own: the number of users changes no job. Raises
    RequestError if the table has no kind of any of the sizes.
    """
    shares = {size: share for size, share in options.shares.items() if table.of_size(size)}
    if not shares:
        raise RequestError("the table has no one-GPU jobs", "add types of jobs such as \"('LM', 1)\" with their null")
    kinds, durations, users, gaps = (np.random.default_rng((seed, stream)) for stream in range(4))
    sizes = np.array(sorted(shares))
    weights = np.array([shares[int(size)] for size in sizes])
    weights = weights / weights.sum()
    mean_gpu_s = float(sizes @ weights) * (options.shortest_s + options.longest_s) / 2
    submit_s = np.cumsum(gaps.exponential(mean_gpu_s / (options.load * options.gpus), options.jobs))
    drawn = kinds.choice(sizes, options.jobs, p=weights)
    picks = kinds.random(options.jobs)
    duration_s = durations.uniform(options.shortest_s, options.longest_s, options.jobs)
    user = users.integers(options.users, size=options.jobs)
    return tuple(
        PackingJob(float(submit_s[number]), _pick(table, int(drawn[number]), float(picks[number])),
                   float(duration_s[number]), int(user[number]))
        for number in range(options.jobs)
    )  # fmt: skip


def _pick(table: PairTable, gpus: int, share: float) -> Kind:
    kinds = table.of_size(gpus)
    return kinds[int(share * len(kinds))]
