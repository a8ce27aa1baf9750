"""Figures 10 and 11: how mean counters of jobs go together."""

from __future__ import annotations

import numpy as np
import pandas as pd

from almanac.config import Config
from telemetry.characterize.statistics import Bands, steps
from telemetry.characterize.table import StudyTable, columns
from telemetry.metrics.catalogue import AVERAGED

X, Y, UTIL = "mean_fp64_active_frac", "mean_dram_active_frac", "gpu_util_pct"
COUNTERS = (*(f"mean_{counter.column}" for counter in AVERAGED), "energy_power_w")
"""Job-level means (perlmutter-telemetry, eq. 8), and the paper's GPU_POWER: energy by time and GPU."""
_X = Bands("fp64_active_from_frac", "fp64_active_below_frac", steps(20), top=1.0)
_Y = Bands("dram_active_from_frac", "dram_active_below_frac", steps(20), top=1.0)


def _heatmap(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    placed = jobs.assign(x=_X.place(jobs[X]), y=_Y.place(jobs[Y]), **{"class": jobs["class_fp64"]})
    found = placed.groupby(["class", "x", "y"])[UTIL].agg(jobs="size", mean_gpu_util_pct="mean").reset_index()
    return pd.concat([found, _X.frame(found["x"]), _Y.frame(found["y"])], axis=1)


def _correlations(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    frames = []
    for name, group in jobs.groupby("class_fp64"):
        means = group[[X, Y, UTIL]]
        both = pd.DataFrame({"spearman": spearman(means)[UTIL], "pearson": means.corr(min_periods=2)[UTIL]})
        both = both.loc[[X, Y]].rename_axis("counter").reset_index()
        frames.append(both.assign(jobs=len(group), **{"class": str(name)}))
    return pd.concat(frames, ignore_index=True)


def spearman(means: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rho of every pair of columns, over the rows that know both; ties get their average rank.

    NaN where fewer than two rows know both, or one of the two does not vary among them.
    """
    return means.corr(method="spearman", min_periods=2)


def _matrix(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    means = jobs[list(COUNTERS)]
    rho = spearman(means)
    known = means.notna().to_numpy()
    with_util = rho["mean_gpu_util_pct"].abs()
    order = with_util.sort_values(ascending=False, kind="stable", na_position="last").index
    place = {counter: number for number, counter in enumerate(order, 1)}
    long = pd.DataFrame(
        {
            "counter_a": np.repeat(COUNTERS, len(COUNTERS)),
            "counter_b": np.tile(COUNTERS, len(COUNTERS)),
            "jobs": np.concatenate([(known & known[:, [place]]).sum(axis=0) for place in range(len(COUNTERS))]),
            "spearman": rho.to_numpy().ravel(),
        }
    )
    long["place"] = long["counter_a"].map(place)
    by_place = long.assign(other=long["counter_b"].map(place)).sort_values(["place", "other"])
    return by_place.drop(columns="other")


_HEATMAP_NEEDS = (UTIL, X, Y, "class_fp64")
RELATION_TABLES = (
    StudyTable(
        "fig10_heatmap",
        "10",
        "Mean GPU_UTIL by FP64 and DRAM activity and class",
        columns(
            ("class", "text", "by FP64 intensity"),
            ("fp64_active_from_frac", "real"),
            ("fp64_active_below_frac", "real", "the last bin holds 1 too"),
            ("dram_active_from_frac", "real"),
            ("dram_active_below_frac", "real", "the last bin holds 1 too"),
            ("jobs", "count"),
            ("mean_gpu_util_pct", "real"),
        ),
        _heatmap,
        needs=_HEATMAP_NEEDS,
        is_profiled=True,
    ),
    StudyTable(
        "fig10_correlations",
        "10",
        "Correlation of GPU_UTIL with FP64 and DRAM activity by class",
        columns(
            ("class", "text", "by FP64 intensity"),
            ("counter", "text", "correlated with gpu_util_pct"),
            ("jobs", "count"),
            ("spearman", "real"),
            ("pearson", "real"),
        ),
        _correlations,
        needs=_HEATMAP_NEEDS,
        is_profiled=True,
    ),
    StudyTable(
        "fig11_spearman",
        "11",
        "Spearman correlation of job-level mean counters",
        columns(
            ("counter_a", "text"),
            ("counter_b", "text"),
            ("place", "count", "of counter_a by |correlation| with mean_gpu_util_pct"),
            ("jobs", "count", "jobs that know both"),
            ("spearman", "real", "null: fewer than two jobs, or one of the two does not vary"),
        ),
        _matrix,
        needs_any=COUNTERS,
        is_profiled=True,
    ),
)
