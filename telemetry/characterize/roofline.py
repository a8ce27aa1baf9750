"""Figures 4 and 5: arithmetic intensity, classes, and energy by class."""

from __future__ import annotations

import numpy as np
import pandas as pd

from almanac.config import Config
from almanac.hardware import gpu_models
from telemetry.characterize.statistics import Bands, spread
from telemetry.characterize.table import StudyTable, columns, named
from telemetry.characterize.usage import spread_columns
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.histogram import bin_edges

CRITERIA = {"fp64": "class_fp64", "main pipe": "job_class"}
"""By which class jobs are told apart: the paper's, and that of the pipe that a job really uses."""
GPU_HOURS = Bands("gpu_hours_from", "gpu_hours_below", (0, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4))
INTENSITIES = Bands("intensity_from_flop_per_byte", "intensity_below_flop_per_byte", (0.0, *bin_edges()))
CLASS_COLUMNS = (
    ("class_by", "text", "fp64: the paper's criterion; main pipe: of the pipe used most"),
    ("class", "text", "compute or memory"),
)


def with_classes(jobs: pd.DataFrame) -> pd.DataFrame:
    """Jobs once by each criterion by which they have a class, with class_by and class."""
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
    return peak / found.hbm_bytes_per_s if found and peak else np.nan


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


_INTENSITY = columns(
    ("pipe", "text"),
    ("gpu_model", "text", "of the job's GPU of highest HBM use"),
    ("hbm_capacity_mib", "real", "MiB, nominal"),
    ("intensity_from_flop_per_byte", "real", "0: every intensity below the next edge"),
    ("intensity_below_flop_per_byte", "real", "null: no limit"),
    ("jobs", "count", "jobs that have samples on the axis"),
    ("samples", "count"),
    ("share", "real", "of the samples of this pipe and GPU"),
    ("ridge_flop_per_byte", "real", "peak flop/s by peak bytes/s; null: no peak known"),
)
ROOFLINE_TABLES = (
    StudyTable(
        "fig04_intensity",
        "4",
        "Arithmetic intensity of samples by pipe and GPU",
        _INTENSITY,
        _intensities,
        needs=("gpu_model",),
        needs_any=tuple(f"intensity_bins_{pipe}" for pipe in PIPES),
        is_profiled=True,
        is_of_histograms=True,
    ),
    StudyTable(
        "fig04_class_shares",
        "4",
        "Share of compute-bound and memory-bound samples and jobs",
        columns(
            ("class_by", "text", "pipe, or main pipe: the one that each job uses most"),
            ("counted_in", "text", "jobs, or samples: jobs weighted by theirs"),
            ("jobs", "count"),
            ("compute_share", "real"),
            ("memory_share", "real"),
        ),
        _class_shares,
        needs_any=tuple(f"class_{pipe}" for pipe in PIPES),
        reads=(
            "job_class",
            "main_pipe",
            *(f"{metric}_{pipe}" for pipe in PIPES for metric in ("compute_sample_frac", "placed_samples")),
        ),
        is_profiled=True,
    ),
    StudyTable(
        "fig05_energy",
        "5",
        "Energy of a job by GPU hours and class",
        columns(
            *CLASS_COLUMNS,
            ("gpu_hours_from", "real"),
            ("gpu_hours_below", "real", "null: no limit"),
            *spread_columns("energy_j"),
        ),
        _energy,
        needs=("energy_j", "gpu_hours"),
        needs_any=tuple(CRITERIA.values()),
        is_profiled=True,
    ),
)
