"""Headline figures of perlmutter-telemetry by partition, account, and GPU type, over all jobs."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from almanac.config import Config
from telemetry.characterize.usage import largest_tier_names
from telemetry.metrics.data_quality import OK


@dataclass(frozen=True)
class PartFinding:
    """A share of jobs: those that meet `of` among those that meet `among`, both SQL conditions on the view `runs`.

    words: the finding's name in telemetry.characterize.headline. short: its column header.
    """

    words: str
    short: str
    among: str
    of: str


_LOW = "util_pct < 30"
PART_FINDINGS = (
    PartFinding(
        "jobs memory-bound by FP64 intensity",
        "Memory-bound",
        "class_fp64 IS NOT NULL AND has_profiling_fault IS DISTINCT FROM true",
        "class_fp64 = 'memory'",
    ),
    PartFinding(
        "largest tier: HBM peak at or below 50%",
        "Largest tier, peak at most 50%",
        "hbm_peak_mib IS NOT NULL AND hbm_peak_frac IS NOT NULL AND list_contains($names, tier)",
        "hbm_peak_frac <= 0.5",
    ),
    PartFinding(
        "4-GPU jobs that never used three GPUs",
        "4-GPU jobs, three never used",
        "gpus = 4 AND idle_gpu_count IS NOT NULL",
        "idle_gpu_count = 3",
    ),
    PartFinding(
        "GPU_UTIL below 30%: spatial imbalance at least 0.7",
        "GPU_UTIL below 30%: uneven",
        f"{_LOW} AND spatial_imbalance IS NOT NULL",
        "spatial_imbalance >= 0.7",
    ),
    PartFinding(
        "GPU_UTIL below 30%: temporal imbalance at least 0.7",
        "GPU_UTIL below 30%: unsteady",
        f"{_LOW} AND temporal_imbalance IS NOT NULL",
        "temporal_imbalance >= 0.7",
    ),
)


@dataclass(frozen=True)
class PartValue:
    """share: a fraction of `jobs`; None without jobs."""

    share: float | None
    jobs: int


Headline = tuple[PartValue, ...]
"""One value for each of PART_FINDINGS, in the same order."""


def load_headlines(db: duckdb.DuckDBPyConnection, dimension: str, config: Config) -> dict[str, Headline]:
    """The figures by value of a dimension, over jobs with data quality ok. Values without such jobs are left out."""
    sums = [f"avg((({each.of}))::INT) FILTER ({each.among}), count(*) FILTER ({each.among})" for each in PART_FINDINGS]
    sql = f"SELECT \"{dimension}\", {', '.join(sums)} FROM runs WHERE standing = '{OK}' GROUP BY 1"
    rows = db.execute(sql, {"names": sorted(largest_tier_names(config))}).fetchall()
    return {
        name: tuple(PartValue(share, jobs) for share, jobs in zip(values[::2], values[1::2], strict=True))
        for name, *values in rows
    }
