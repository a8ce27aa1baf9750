"""How large and how long the generated site is, which faults its telemetry has, and the numbers it is made after."""

from __future__ import annotations

import tomllib
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
START_S = 1_740_960_000  # 2025-03-03 00:00 UTC, a Monday of the month that perlmutter-telemetry looks at
BENCH_COUNTERS = (
    "gpu_util_pct", "hbm_used_mib", "sm_active_frac", "fp64_active_frac", "fp32_active_frac", "fp16_active_frac",
    "tensor_active_frac", "dram_active_frac", "energy_mj", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s",
    "pcie_tx_bytes_s", "pcie_rx_bytes_s",
)  # fmt: skip
"""Thirteen of the fourteen counters of table I of perlmutter-telemetry (the temperature is left out)."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong in the telemetry.

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

    @classmethod
    def perlmutter(cls, seed: int = 1, jobs: int = 20_000) -> SiteShape:
        """The published marginals on a sixth of the machine."""
        return cls(seed=seed, days=jobs / 700.0)


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
    """The published and chosen numbers of profile.toml, each with its source beside it there.

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
