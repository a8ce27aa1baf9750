"""A seeded generator of a whole GPU site, shaped like the Perlmutter paper (perlmutter-telemetry)."""

from demo.plan import SitePlan, jobs_table, plan_site, truth_table
from demo.shape import BENCH_COUNTERS, Faults, SiteShape
from demo.source import GeneratedSource, generate_jobs, generate_telemetry, generate_truth

__all__ = [
    "BENCH_COUNTERS",
    "Faults",
    "GeneratedSource",
    "SitePlan",
    "SiteShape",
    "generate_jobs",
    "generate_telemetry",
    "generate_truth",
    "jobs_table",
    "plan_site",
    "truth_table",
]
