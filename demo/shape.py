"""How large and how long the generated site is, and which faults its telemetry has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from telemetry.counters import COUNTER_COLUMNS

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
    scrape. duplicate_share: rows that come twice. glitch_share: GPU_UTIL values beyond 100%. prof_fault_share: jobs
    whose profiling counters stay 0 while they are busy (as after an Xid 31). energy_reset_per_host_day: chance that
    the energy counters of a host start again from 0.
    """

    missing_share: float = 0.002
    outage_per_host_hour: float = 0.0005
    duplicate_share: float = 0.0
    glitch_share: float = 0.0
    prof_fault_share: float = 0.002
    energy_reset_per_host_day: float = 0.002


@dataclass(frozen=True)
class SiteShape:
    """A site to generate; equal shapes give equal sites. At least four users; one of them is staff.

    days from start_s on (s since 1970, UTC). max_nodes: largest job; 0 is as large as the 40 GB pool. Size bins that
    do not fit give their share to the largest that does. duration_scale stretches every run time and limit.
    shared_nodes: further 40 GB nodes in the partition "shared", whose jobs ask for one or two GPUs and whose rows
    carry job_label; shared_share of all jobs go there. has_idle_rows: rows of GPUs without a job, too.
    is_hostile: some families need memory as hostile.toml has it.
    """

    seed: int = 1
    start_s: int = START_S
    days: float = 14.0
    nodes_40: int = 256
    nodes_80: int = 43
    gpus_per_node: int = 4
    users: int = 150
    jobs_per_day: float = 700.0
    tier80_request_share: float | None = None
    max_nodes: int = 0
    duration_scale: float = 1.0
    interval_s: int = 10
    shared_nodes: int = 0
    shared_share: float = 0.0
    has_idle_rows: bool = False
    is_hostile: bool = False
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
        return self.nodes_40 + self.nodes_80 + self.shared_nodes

    @classmethod
    def demo(cls, seed: int = 1) -> SiteShape:
        """Two weeks of a small site: about 4,500 jobs and 3 million rows, a quarter of the jobs asking for 80 GB."""
        return cls(seed=seed, days=14, nodes_40=14, nodes_80=8, users=40, jobs_per_day=320,
                   tier80_request_share=0.25, max_nodes=4, duration_scale=0.35)  # fmt: skip

    @classmethod
    def perlmutter(cls, seed: int = 1, jobs: int = 20_000) -> SiteShape:
        """The published marginals on a sixth of the machine."""
        return cls(seed=seed, days=jobs / 700.0)

    @classmethod
    def bench(cls, rows: int, seed: int = 1) -> SiteShape:
        """About `rows` rows of telemetry with thirteen counters, as many days as that takes; no very large jobs."""
        days = math.ceil(rows / _BENCH_ROWS_PER_DAY * 24) / 24
        return replace(cls.perlmutter(seed), days=days, jobs_per_day=1500, max_nodes=16, counters=BENCH_COUNTERS)


_BENCH_ROWS_PER_DAY = 4_400_000  # measured, of bench() itself
