"""Figures 1 to 3: size, time and use of jobs, floating-point pipes, HBM peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from almanac.config import Config
from telemetry.characterize.table import Bands, StudyTable, columns, histogram, quantile_names, share_of, spread, steps
from telemetry.counters import PIPES
from telemetry.metrics.roofline import PIPE_USED_FRAC

SIZES = Bands("gpus_from", "gpus_below", (1, 3, 5, 9, 17, 33, 65, 129, 257, 513))
"""Size classes of figure 1: 1-2, 3-4, 5-8, ... GPUs."""
PEAKS = Bands("hbm_peak_frac_from", "hbm_peak_frac_below", (*steps(20), 1.0))

_SIZE = (("gpus_from", "count"), ("gpus_below", "count", "null: no limit"))
PAPER, NOTEBOOKS = "paper", "notebooks"


def spread_columns(value: str) -> tuple[tuple[str, str], ...]:
    return ("jobs", "count"), *((name, "real") for name in quantile_names(value))


def _by_size(jobs: pd.DataFrame) -> pd.DataFrame:
    return jobs.assign(size_class=SIZES.place(jobs["gpu_count"]))


def _with_edges(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([SIZES.frame(frame["size_class"]), frame], axis=1)


def _sizes(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    groups = _by_size(jobs).groupby("size_class")
    every = range(len(SIZES.edges))
    found = groups.agg(jobs=("gpu_hours", "size"), gpu_hours=("gpu_hours", "sum")).reindex(every, fill_value=0)
    total_h = found["gpu_hours"].sum()
    return _with_edges(found.reset_index()).assign(
        share=lambda f: f["jobs"] / len(jobs), gpu_hours_share=lambda f: f["gpu_hours"] / total_h if total_h else np.nan
    )


def _durations(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    return _with_edges(spread(_by_size(jobs), ["size_class"], "elapsed_h"))


def _utilization(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    return _with_edges(spread(_by_size(jobs), ["size_class"], "gpu_util_pct"))


def pipe_thresholds(jobs: pd.DataFrame, config: Config) -> dict[str, dict[str, float]]:
    """Return, for either rule, the mean activity above which each pipe counts as used.

    The paper's text (Cankur et al., IV-B) takes the larger of a fixed value and the pipe's 5th percentile over the jobs
    at hand; its notebooks take the fixed value.
    """
    low = {pipe: jobs[f"mean_{pipe}_active_frac"].quantile(0.05) for pipe in PIPES}
    # A pipe whose counter no job has: its 5th percentile is NaN.
    return {
        NOTEBOOKS: dict.fromkeys(PIPES, PIPE_USED_FRAC),
        PAPER: {p: float(np.fmax(low[p], PIPE_USED_FRAC)) for p in PIPES},
    }


def by_pipes(jobs: pd.DataFrame, config: Config, of: Callable[[pd.DataFrame, list[str]], pd.DataFrame]) -> pd.DataFrame:
    """Return the results of `of` for the jobs and the columns to group them by, once by each rule.

    Adds rule, pipes ("fp64+tensor", or "none"), pipes_unknown ("", "fp16"), and the thresholds. `of` counts `jobs`.
    """
    means = {pipe: jobs[f"mean_{pipe}_active_frac"] for pipe in PIPES}
    unknown = _bits([mean.isna() for mean in means.values()])
    frames = []
    for rule, limits in pipe_thresholds(jobs, config).items():
        used = _bits([mean > limits[pipe] for pipe, mean in means.items()])
        found = of(jobs.assign(used=used, unknown=unknown), ["used", "unknown"])
        thresholds = {f"threshold_{pipe}_frac": limit for pipe, limit in limits.items()}
        names = [_pipes(bits) or "none" for bits in found["used"]]
        without = [_pipes(bits) for bits in found["unknown"]]
        frames.append(found.assign(rule=rule, pipes=names, pipes_unknown=without, **thresholds))
    order, ascending = ["rule", "jobs", "pipes", "pipes_unknown"], [True, False, True, True]
    return pd.concat(frames).sort_values(order, ascending=ascending, ignore_index=True)


def _bits(flags: Sequence[pd.Series]) -> np.ndarray:
    """One number per row; bit N is flag N."""
    weights = [1 << place for place in range(len(flags))]
    bits: np.ndarray = np.column_stack(flags) @ np.array(weights, dtype="int8")
    return bits


def _pipes(bits: int) -> str:
    return "+".join(pipe for place, pipe in enumerate(PIPES) if bits >> place & 1)


PIPE_COLUMNS = (
    ("rule", "text", "whose threshold: paper or notebooks"),
    ("pipes", "text", "pipes used, joined by +; none: no known pipe is"),
    ("pipes_unknown", "text", "pipes without a known mean, joined by +"),
)


def _pipe_mixes(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    found = by_pipes(jobs, config, _utilization_of)
    return found.assign(share=found["jobs"] / len(jobs))


def _utilization_of(jobs: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    groups = jobs.groupby(keys)["gpu_util_pct"]
    return groups.agg(jobs="size", gpu_util_jobs="count", mean_gpu_util_pct="mean").reset_index()


def largest_tier_names(config: Config) -> set[str]:
    """Return the names of the tiers of most memory; empty if no tier is configured."""
    most_mib = max((tier.capacity_mib for tier in config.tiers), default=0)
    return {tier.name for tier in config.tiers if tier.capacity_mib == most_mib}


_TIER_KEYS = ["tier", "hbm_capacity_mib"]
_TIER_COLUMNS = (
    ("tier", "text", "memory tier asked for; null: none"),
    ("is_largest_tier", "flag", "of those configured; null: no tier asked for, or none configured"),
    ("hbm_capacity_mib", "real", "MiB, nominal"),
    ("reserved", "text", "preallocated, not preallocated or cannot be told"),
)


def _with_reserved(jobs: pd.DataFrame) -> pd.DataFrame:
    words = {True: "preallocated", False: "not preallocated"}
    return jobs.assign(reserved=[words.get(value, "cannot be told") for value in jobs["is_preallocated"]])


def _with_largest(found: pd.DataFrame, config: Config) -> pd.DataFrame:
    largest = largest_tier_names(config)
    flags = [tier in largest if largest and isinstance(tier, str) else None for tier in found["tier"]]
    return found.assign(is_largest_tier=np.array(flags, dtype=object))


def _peaks(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    found = histogram(_with_reserved(jobs), [*_TIER_KEYS, "reserved"], "hbm_peak_frac", PEAKS)
    return _with_largest(found, config)


def _peak_shares(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    parts = [jobs.assign(reserved="all"), _with_reserved(jobs)]
    both = pd.concat(parts, ignore_index=True)
    peak = both["hbm_peak_frac"]
    found = share_of(
        both,
        [*_TIER_KEYS, "reserved"],
        share_below_20pct=peak < 0.2,
        share_at_most_50pct=peak <= 0.5,
        share_at_least_80pct=peak >= 0.8,
        share_at_least_90pct=peak >= 0.9,
    )
    return _with_largest(found, config)


_PEAK_NEEDS = ("hbm_peak_mib", "hbm_peak_frac")
_PEAK_READS = (*_TIER_KEYS, "is_preallocated")
USAGE = (
    StudyTable("fig01_job_size", "1", "Jobs and GPU hours by size class", columns(*_SIZE, ("jobs", "count"),
               ("share", "real"), ("gpu_hours", "real"), ("gpu_hours_share", "real")), _sizes,
               reads=("gpu_count", "gpu_hours")),
    StudyTable("fig01_duration", "1", "Duration by size class", columns(*_SIZE, *spread_columns("elapsed_h")),
               _durations, needs=("elapsed_h",), reads=("gpu_count",)),
    StudyTable("fig01_gpu_util", "1", "Mean GPU_UTIL by size class", columns(*_SIZE, *spread_columns("gpu_util_pct")),
               _utilization, needs=("gpu_util_pct",), reads=("gpu_count",)),
    StudyTable("fig02_pipe_mix", "2", "Floating-point pipes used together, and mean GPU_UTIL", columns(*PIPE_COLUMNS,
               *((f"threshold_{pipe}_frac", "real") for pipe in PIPES), ("jobs", "count"),
               ("share", "real", "of the jobs of the table"),
               ("gpu_util_jobs", "count", "jobs whose mean GPU_UTIL is known"), ("mean_gpu_util_pct", "real")),
               _pipe_mixes, needs_any=tuple(f"mean_{pipe}_active_frac" for pipe in PIPES), reads=("gpu_util_pct",),
               is_profiled=True),
    StudyTable("fig03_hbm_peak", "3", "HBM peak by tier asked for and capacity", columns(*_TIER_COLUMNS,
               ("hbm_peak_frac_from", "real"), ("hbm_peak_frac_below", "real", "null: no limit"), ("jobs", "count"),
               ("share", "real"), ("cumulative_share", "real")), _peaks, needs=_PEAK_NEEDS, reads=_PEAK_READS),
    StudyTable("fig03_hbm_peak_shares", "3", "HBM peaks below and above round shares of the capacity",
               columns(*_TIER_COLUMNS[:3], ("reserved", "text", "all, or one of those of fig03_hbm_peak"),
               ("jobs", "count"), ("share_below_20pct", "real"), ("share_at_most_50pct", "real"),
               ("share_at_least_80pct", "real"), ("share_at_least_90pct", "real")), _peak_shares, needs=_PEAK_NEEDS,
               reads=_PEAK_READS),
)  # fmt: skip
