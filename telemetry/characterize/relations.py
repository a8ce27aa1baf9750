"""Figures 4 to 11: intensity, classes, and energy; imbalance; GPUs never used; relations of mean counters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from almanac.config import Config
from almanac.hardware import gpu_models
from telemetry.characterize.table import Bands, StudyTable, columns, histogram, named, share_of, spread, steps
from telemetry.characterize.usage import PIPE_COLUMNS, by_pipes, spread_columns
from telemetry.counters import AVERAGED, PIPES
from telemetry.metrics.roofline import bin_edges

CRITERIA = {"fp64": "class_fp64", "main pipe": "job_class"}
"""Column of the class by which jobs are told apart: the paper's, and that of the pipe that a job really uses."""
GPU_HOURS = Bands("gpu_hours_from", "gpu_hours_below", (0, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4))
INTENSITIES = Bands("intensity_from_flop_per_byte", "intensity_below_flop_per_byte", (0.0, *bin_edges()))
CLASS_COLUMNS = (
    ("class_by", "text", "fp64: the paper's criterion; main pipe: of the pipe used most"),
    ("class", "text", "compute or memory"),
)


def with_classes(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return the jobs with class_by and class, once for each criterion by which they have a class."""
    frames = []
    for name, column in CRITERIA.items():
        frame = jobs[jobs[column].notna()].assign(class_by=name)
        frame["class"] = frame[column]
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def ridge(model: str, pipe: str) -> float:
    """Flop per byte above which a sample is compute-bound; NaN where a peak is not known."""
    found = gpu_models().get(model)
    peak = getattr(found, f"{pipe}_flops", None)
    bandwidth = found.hbm_bytes_per_s if found else None
    return peak / bandwidth if peak and bandwidth else np.nan


def _intensities(histograms: pd.DataFrame, config: Config) -> pd.DataFrame:
    frames = []
    for pipe in PIPES:
        for model, group in histograms[histograms["pipe"] == pipe].groupby("gpu_model"):
            samples = np.sum(group["samples"].tolist(), axis=0)
            frames.append(
                INTENSITIES.frame().assign(
                    pipe=pipe,
                    gpu_model=str(model),
                    hbm_capacity_mib=float(group["hbm_capacity_mib"].max()),
                    jobs=int(group["jobs"].sum()),
                    samples=samples,
                    share=samples / samples.sum() if samples.any() else np.nan,
                    ridge_flop_per_byte=ridge(str(model), pipe),
                )
            )
    return named(frames, _INTENSITY.names)


def _class_shares(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    rows = []
    for pipe in (*PIPES, "main pipe"):
        label = jobs["job_class"] if pipe == "main pipe" else jobs[f"class_{pipe}"]
        known = label.dropna()
        rows.append((pipe, "jobs", len(known), (known == "compute").mean()))
        compute, placed = (_of_pipe(jobs, name, pipe) for name in ("compute_sample_frac", "placed_samples"))
        share = (compute * placed).sum() / placed.sum() if placed.sum() else np.nan
        rows.append((pipe, "samples", int(placed.notna().sum()), share))
    found = pd.DataFrame(rows, columns=["class_by", "counted_in", "jobs", "compute_share"])
    return found[found["jobs"] > 0].assign(memory_share=lambda f: 1 - f["compute_share"])


def _of_pipe(jobs: pd.DataFrame, metric: str, pipe: str) -> pd.Series:
    """A metric of each job by a pipe, or by the pipe that it uses most."""
    if pipe != "main pipe":
        return jobs[f"{metric}_{pipe}"].astype("float64")
    found = pd.Series(np.nan, index=jobs.index)
    for main in PIPES:
        is_main = jobs["main_pipe"] == main
        found[is_main] = jobs.loc[is_main, f"{metric}_{main}"]
    return found


def _energy(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    placed = with_classes(jobs)
    placed["band"] = GPU_HOURS.place(placed["gpu_hours"])
    found = spread(placed, ["class_by", "band", "class"], "energy_j")
    return pd.concat([GPU_HOURS.frame(found["band"]), found], axis=1)


_INTENSITY = columns(("pipe", "text"), ("gpu_model", "text", "of the job's GPU of highest HBM use"),
                     ("hbm_capacity_mib", "real", "MiB, nominal"),
                     ("intensity_from_flop_per_byte", "real", "0: every intensity below the next edge"),
                     ("intensity_below_flop_per_byte", "real", "null: no limit"),
                     ("jobs", "count", "jobs that have samples on the axis"), ("samples", "count"),
                     ("share", "real", "of the samples of this pipe and GPU"),
                     ("ridge_flop_per_byte", "real", "peak flop/s by peak bytes/s; null: no peak known"))  # fmt: skip
ROOFLINE_TABLES = (
    StudyTable("fig04_intensity", "4", "Arithmetic intensity of samples by pipe and GPU", _INTENSITY, _intensities,
               needs=("gpu_model",), needs_any=tuple(f"intensity_bins_{pipe}" for pipe in PIPES), is_profiled=True,
               is_of_histograms=True),
    StudyTable("fig04_class_shares", "4", "Share of compute-bound and memory-bound samples and jobs",
               columns(("class_by", "text", "pipe, or main pipe: the one that each job uses most"),
               ("counted_in", "text", "jobs, or samples: jobs weighted by theirs"), ("jobs", "count"),
               ("compute_share", "real"), ("memory_share", "real")), _class_shares,
               needs_any=tuple(f"class_{pipe}" for pipe in PIPES), reads=("job_class", "main_pipe",
               *(f"{metric}_{pipe}" for pipe in PIPES for metric in ("compute_sample_frac", "placed_samples"))),
               is_profiled=True),
    StudyTable("fig05_energy", "5", "Energy of a job by GPU hours and class", columns(*CLASS_COLUMNS,
               ("gpu_hours_from", "real"), ("gpu_hours_below", "real", "null: no limit"), *spread_columns("energy_j")),
               _energy, needs=("energy_j", "gpu_hours"), needs_any=tuple(CRITERIA.values()), is_profiled=True),
)  # fmt: skip


UTILIZATION = Bands("gpu_util_from_pct", "gpu_util_below_pct", (0, 30, 70), top=100)
LOW, HIGH = 0.3, 0.7
_BAND = (("gpu_util_from_pct", "real"), ("gpu_util_below_pct", "real", "the last band holds 100 too"))


def _banded(jobs: pd.DataFrame) -> pd.DataFrame:
    return jobs.assign(band=UTILIZATION.place(jobs["gpu_util_pct"]))


def _with_band(found: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([UTILIZATION.frame(found["band"]), found], axis=1)


def _distribution(metric: str, jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    bands = Bands(f"{metric}_from", f"{metric}_below", steps(20), top=1.0)
    return _with_band(histogram(_banded(jobs), ["band"], metric, bands))


def _shares(metric: str, jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    banded = _banded(jobs)
    quantiles = spread(banded, ["band"], metric)
    is_low, is_high = banded[metric] < LOW, banded[metric] >= HIGH
    shares = share_of(banded, ["band"], share_below_30pct=is_low, share_at_least_70pct=is_high)
    return _with_band(quantiles.merge(shares.drop(columns="jobs"), on="band"))


def _by_pipes(metric: str, jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    return by_pipes(jobs, config, lambda placed, keys: spread(placed, keys, metric))


def _by_class(metric: str, jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    return spread(with_classes(jobs), ["class_by", "class"], metric)


def _idle_gpus(jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    found = jobs.groupby(["gpu_count", "idle_gpu_count"]).size().rename("jobs").reset_index()
    return found.assign(share=found["jobs"] / found.groupby("gpu_count")["jobs"].transform("sum"))


def _tables(metric: str, word: str, by_util: str, by_kind: str) -> tuple[StudyTable, ...]:
    """The four tables of one metric; by_util and by_kind are the numbers of their figures."""
    title, short = f"{word} imbalance", word.lower()
    made: Callable[..., partial[pd.DataFrame]] = lambda function: partial(function, metric)  # noqa: E731
    spread_of = spread_columns(metric)
    return (
        StudyTable(f"fig0{by_util}_{short}_by_util", by_util, f"{title} by mean GPU_UTIL", columns(*_BAND,
                   (f"{metric}_from", "real"), (f"{metric}_below", "real", "the last bin holds 1 too"),
                   ("jobs", "count"), ("share", "real", "of the band's jobs"), ("cumulative_share", "real")),
                   made(_distribution), needs=(metric, "gpu_util_pct")),
        StudyTable(f"fig0{by_util}_{short}_shares", by_util, f"{title} by mean GPU_UTIL: low and high shares",
                   columns(*_BAND, *spread_of, ("share_below_30pct", "real"), ("share_at_least_70pct", "real")),
                   made(_shares), needs=(metric, "gpu_util_pct")),
        StudyTable(f"fig0{by_kind}_{short}_by_pipes", by_kind, f"{title} by floating-point pipes used",
                   columns(*PIPE_COLUMNS, *spread_of), made(_by_pipes), needs=(metric,),
                   needs_any=tuple(f"mean_{pipe}_active_frac" for pipe in PIPES), is_profiled=True),
        StudyTable(f"fig0{by_kind}_{short}_by_class", by_kind, f"{title} by class", columns(*CLASS_COLUMNS,
                   *spread_of), made(_by_class), needs=(metric,), needs_any=tuple(CRITERIA.values()),
                   is_profiled=True),
    )  # fmt: skip


_SPATIAL = _tables("spatial_imbalance", "Spatial", "6", "8")
_TEMPORAL = _tables("temporal_imbalance", "Temporal", "7", "9")
_IDLE = StudyTable("sec06_idle_gpus", "section VI", "GPUs of the allocation that were never used",
                   columns(("gpu_count", "count", "GPUs of the job"),
                   ("idle_gpu_count", "count", "of these never used"), ("jobs", "count"),
                   ("share", "real", "of the jobs of this size")), _idle_gpus, needs=("idle_gpu_count",),
                   reads=("gpu_count",))  # fmt: skip
IMBALANCE_TABLES = (*_SPATIAL[:2], _IDLE, *_TEMPORAL[:2], *_SPATIAL[2:], *_TEMPORAL[2:])


X, Y, UTIL = "mean_fp64_active_frac", "mean_dram_active_frac", "gpu_util_pct"
COUNTERS = (*(f"mean_{counter.column}" for counter in AVERAGED), "energy_power_w")
"""Job-level means (Cankur et al., eq. 8), and the paper's GPU_POWER: energy by time and GPU."""
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
    StudyTable("fig10_heatmap", "10", "Mean GPU_UTIL by FP64 and DRAM activity and class",
               columns(("class", "text", "by FP64 intensity"), ("fp64_active_from_frac", "real"),
               ("fp64_active_below_frac", "real", "the last bin holds 1 too"), ("dram_active_from_frac", "real"),
               ("dram_active_below_frac", "real", "the last bin holds 1 too"), ("jobs", "count"),
               ("mean_gpu_util_pct", "real")), _heatmap, needs=_HEATMAP_NEEDS, is_profiled=True),
    StudyTable("fig10_correlations", "10", "Correlation of GPU_UTIL with FP64 and DRAM activity by class",
               columns(("class", "text", "by FP64 intensity"), ("counter", "text", "correlated with gpu_util_pct"),
               ("jobs", "count"), ("spearman", "real"), ("pearson", "real")), _correlations, needs=_HEATMAP_NEEDS,
               is_profiled=True),
    StudyTable("fig11_spearman", "11", "Spearman correlation of job-level mean counters",
               columns(("counter_a", "text"), ("counter_b", "text"),
               ("place", "count", "of counter_a by |correlation| with mean_gpu_util_pct"),
               ("jobs", "count", "jobs that know both"),
               ("spearman", "real", "null: fewer than two jobs, or one of the two does not vary")), _matrix,
               needs_any=COUNTERS, is_profiled=True),
)  # fmt: skip
