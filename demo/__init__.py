"""A seeded generator of a whole GPU site, shaped like Perlmutter (Cankur et al.)."""

from demo.shape import BENCH_COUNTERS, GPUS_PER_NODE, Faults, SiteShape
from demo.site import SitePlan, host_names, jobs_table, plan_site, truth_table
from demo.source import GeneratedSource, generate_jobs

__all__ = [
    "BENCH_COUNTERS", "GPUS_PER_NODE", "Faults", "GeneratedSource", "SitePlan", "SiteShape", "generate_jobs",
    "host_names", "jobs_table", "plan_site", "truth_table",
]  # fmt: skip
