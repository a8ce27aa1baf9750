"""Figures 6 to 9: spatial and temporal imbalance by utilization, pipes used and class; GPUs never used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd

from almanac.config import Config
from telemetry.characterize.roofline import CLASS_COLUMNS, CRITERIA, with_classes
from telemetry.characterize.statistics import Bands, histogram, share_of, spread, steps
from telemetry.characterize.table import StudyTable, columns
from telemetry.characterize.usage import PIPE_COLUMNS, by_pipes, spread_columns
from telemetry.metrics.catalogue import PIPES

UTILIZATION = Bands("gpu_util_from_pct", "gpu_util_below_pct", (0, 30, 70), top=100)
LOW, HIGH = 0.3, 0.7
_BAND = (("gpu_util_from_pct", "real"), ("gpu_util_below_pct", "real", "the last band holds 100 too"))


def _bands(metric: str) -> Bands:
    return Bands(f"{metric}_from", f"{metric}_below", steps(20), top=1.0)


def _banded(jobs: pd.DataFrame) -> pd.DataFrame:
    return jobs.assign(band=UTILIZATION.place(jobs["gpu_util_pct"]))


def _with_band(found: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([UTILIZATION.frame(found["band"]), found], axis=1)


def _distribution(metric: str, jobs: pd.DataFrame, config: Config) -> pd.DataFrame:
    return _with_band(histogram(_banded(jobs), ["band"], metric, _bands(metric)))


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
        StudyTable(
            f"fig0{by_util}_{short}_by_util",
            by_util,
            f"{title} by mean GPU_UTIL",
            columns(
                *_BAND,
                (f"{metric}_from", "real"),
                (f"{metric}_below", "real", "the last bin holds 1 too"),
                ("jobs", "count"),
                ("share", "real", "of the band's jobs"),
                ("cumulative_share", "real"),
            ),
            made(_distribution),
            needs=(metric, "gpu_util_pct"),
        ),
        StudyTable(
            f"fig0{by_util}_{short}_shares",
            by_util,
            f"{title} by mean GPU_UTIL: low and high shares",
            columns(*_BAND, *spread_of, ("share_below_30pct", "real"), ("share_at_least_70pct", "real")),
            made(_shares),
            needs=(metric, "gpu_util_pct"),
        ),
        StudyTable(
            f"fig0{by_kind}_{short}_by_pipes",
            by_kind,
            f"{title} by floating-point pipes used",
            columns(*PIPE_COLUMNS, *spread_of),
            made(_by_pipes),
            needs=(metric,),
            needs_any=tuple(f"mean_{pipe}_active_frac" for pipe in PIPES),
            is_profiled=True,
        ),
        StudyTable(
            f"fig0{by_kind}_{short}_by_class",
            by_kind,
            f"{title} by class",
            columns(*CLASS_COLUMNS, *spread_of),
            made(_by_class),
            needs=(metric,),
            needs_any=tuple(CRITERIA.values()),
            is_profiled=True,
        ),
    )


_SPATIAL = _tables("spatial_imbalance", "Spatial", "6", "8")
_TEMPORAL = _tables("temporal_imbalance", "Temporal", "7", "9")
_IDLE = StudyTable(
    "sec06_idle_gpus",
    "section VI",
    "GPUs of the allocation that were never used",
    columns(
        ("gpu_count", "count", "GPUs of the job"),
        ("idle_gpu_count", "count", "of these never used"),
        ("jobs", "count"),
        ("share", "real", "of the jobs of this size"),
    ),
    _idle_gpus,
    needs=("idle_gpu_count",),
    reads=("gpu_count",),
)
IMBALANCE_TABLES = (*_SPATIAL[:2], _IDLE, *_TEMPORAL[:2], *_SPATIAL[2:], *_TEMPORAL[2:])
