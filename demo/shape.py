"""Size, length, and faults of the generated site, the numbers that it follows, and the sharing out of traits.

Traits are dealt so that job-weighted shares come out as published although whole families carry them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from telemetry.counters import COUNTER_COLUMNS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GPUS_PER_NODE = 4
START_S = 1_740_960_000  # 2025-03-03 00:00 UTC, a Monday of the month that Cankur et al. look at
BENCH_COUNTERS = (
    "gpu_util_pct", "hbm_used_mib", "sm_active_frac", "fp64_active_frac", "fp32_active_frac", "fp16_active_frac",
    "tensor_active_frac", "dram_active_frac", "energy_mj", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s",
    "pcie_tx_bytes_s", "pcie_rx_bytes_s",
)  # fmt: skip
"""Thirteen of the fourteen counters of table I of Cankur et al. (the temperature is left out)."""


@dataclass(frozen=True)
class Faults:
    """Faults of the telemetry.

    missing_share: scrapes of a host that failed (no rows). outage_per_host_hour: chance of ten minutes without a
    scrape. prof_fault_share: jobs whose profiling counters stay 0 while they are busy (as after an Xid 31).
    energy_reset_per_host_day: chance that the energy counters of a host start again from 0.
    """

    missing_share: float = 0.002
    outage_per_host_hour: float = 0.0005
    prof_fault_share: float = 0.002
    energy_reset_per_host_day: float = 0.002


@dataclass(frozen=True)
class SiteShape:
    """A site to generate; equal shapes give equal sites. At least four users; one of them is staff.

    days from start_s on (s since 1970, UTC). max_nodes: largest job; 0 is as large as the 40 GB pool. Size bins that
    do not fit give their share to the largest that does. duration_scale stretches every run time and limit.
    """

    seed: int = 1
    start_s: int = START_S
    days: float = 14.0
    nodes_40: int = 256
    nodes_80: int = 43
    users: int = 150
    jobs_per_day: float = 700.0
    tier80_request_share: float | None = None
    max_nodes: int = 0
    duration_scale: float = 1.0
    interval_s: int = 10
    counters: tuple[str, ...] = COUNTER_COLUMNS
    faults: Faults = Faults()

    @property
    def end_s(self) -> int:
        return self.start_s + round(self.days * 86400)

    @property
    def job_count(self) -> int:
        return max(1, round(self.days * self.jobs_per_day))

    @property
    def node_count(self) -> int:
        return self.nodes_40 + self.nodes_80

    @classmethod
    def demo(cls, seed: int = 1) -> SiteShape:
        """Two weeks of a small site: about 4,500 jobs and 3 million rows, a quarter of the jobs asking for 80 GB."""
        return cls(seed=seed, days=14, nodes_40=14, nodes_80=8, users=40, jobs_per_day=320,
                   tier80_request_share=0.25, max_nodes=4, duration_scale=0.35)  # fmt: skip


class Arrays(SimpleNamespace):
    """Parallel numpy arrays by name, such as the columns of all jobs."""

    def take(self, index: Ints | slice) -> Arrays:
        return Arrays(**{name: values[index] for name, values in vars(self).items()})

    def replaced(self, **changed: npt.NDArray[np.generic]) -> Arrays:
        return Arrays(**{**vars(self), **changed})


@dataclass(frozen=True)
class Curve:
    """A quantile function, linear between knots: cumulative share -> value."""

    knots: list[list[float]]

    def __call__(self, share: Floats) -> Floats:
        shares, values = zip(*self.knots, strict=True)
        found: Floats = np.interp(share, shares, values)
        return found


@cache
def load_profile() -> Any:
    """The published and chosen numbers of profile.toml, which names the source of each.

    Tables are namespaces, and lists of [share, value] knots from share 0 to 1 are curves.
    """
    return _typed(tomllib.loads((resources.files(__package__) / "profile.toml").read_text(encoding="utf-8")))


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _typed(each) for name, each in value.items()})
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], list):
        is_curve = len(value[0]) == 2 and value[0][0] == 0.0 and value[-1][0] == 1.0
        return Curve(value) if is_curve else value
    return [_typed(each) for each in value]


def fill(counts: Ints, order: Ints, wanted: float) -> Bools:
    """Families taken in `order` until they hold about `wanted` jobs; one that would pass it by far is skipped.

    counts: jobs per family. Returns a mask over families.
    """
    taken = np.zeros(len(counts), dtype=bool)
    missing = float(wanted)
    for family in order:
        size = counts[family]
        if size and size <= missing * 1.02 + 0.5:
            taken[family] = True
            missing -= size
    return taken


def deal(counts: Ints, shares: Sequence[float], already: Floats | None = None, allowed: Bools | None = None) -> Ints:
    """A category for each family, largest families first, each to the category that lacks most jobs.

    shares: of the jobs, per category. already: jobs per category that are dealt before. allowed: (families,
    categories). A family without any allowed category gets category 0.
    """
    held = np.zeros(len(shares)) if already is None else already.astype(float)
    weights = np.asarray(shares, dtype=float)
    lacking = weights / weights.sum() * (counts.sum() + held.sum()) - held
    category = np.zeros(len(counts), dtype=np.int64)
    for family in np.argsort(-counts, kind="stable"):
        choice = lacking if allowed is None else np.where(allowed[family], lacking, -np.inf)
        category[family] = int(np.argmax(choice))
        lacking[category[family]] -= counts[family]
    return category


def pack(counts: Ints, score: Floats) -> tuple[Floats, Floats]:
    """Families side by side on [0, 1] in order of `score`, each as wide as its share of the jobs: (low, width)."""
    order = np.argsort(score, kind="stable")
    width = counts / max(1, counts.sum())
    low = np.empty(len(counts))
    low[order] = np.cumsum(width[order]) - width[order]
    return low, width


def rank_within(group: Ints) -> tuple[Ints, Ints]:
    """Each element's position among those of its group, in order, and the size of its group."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - starts[group[order]]
    return rank, sizes[group]


def reflect(share: Floats) -> Floats:
    """Shares that left [0, 1] by less than 1, folded back: a uniform sample stays uniform."""
    folded = np.abs(share)
    return np.where(folded > 1, 2 - folded, folded)
