"""The jobs that the tables are made of, and why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from telemetry.characterize.table import StudyTable
from telemetry.metrics.catalogue import AVERAGED, JOB_METRICS, PIPES
from telemetry.metrics.data_quality import NOT_SUMMARISED, OK
from telemetry.store.cluster_store import ClusterStore

PART_OF_A_JOB = "part of a job that was requeued or resized"
PROFILING_FAULT = "profiling counters read 0 while GPU_UTIL was high"

_USED = (
    "verdict", "reasons", "gpus_seen", "gpu_model", "hbm_capacity_mib", "hbm_peak_mib", "hbm_peak_frac",
    "is_preallocated", *(f"mean_{counter.column}" for counter in AVERAGED), "spatial_imbalance", "temporal_imbalance",
    "energy_j", "energy_power_w", "has_profiling_fault", "idle_gpus", "main_pipe", "job_class",
    *(f"{metric}_{pipe}" for pipe in PIPES
      for metric in ("class", "compute_sample_frac", "placed_samples", "intensity_bins")),
)  # fmt: skip
"""The metrics that tables are made of. For a million jobs, each further column would take 8 MB in every copy."""

POPULATION = pa.schema(
    [
        *(JOB_METRICS.field(name) for name in ("job_id", "submit_s")),
        pa.field("state", pa.string()),
        pa.field("tier", pa.string()),
        pa.field("gpu_count", pa.int64()),
        pa.field("elapsed_s", pa.int64()),
        *(JOB_METRICS.field(name).with_nullable(True) for name in _USED),
    ]
)
"""Columns that `characterize` looks at: a job's size, time, tier and metrics."""

_SIZES = ("job_id", "submit_s", "state", "tier", "gpu_count", "gpu_count_req", "start_s", "end_s", "elapsed_s")
_METRICS = tuple(name for name in POPULATION.names if name in JOB_METRICS.names)
RUNS_SQL = """
FROM (
  SELECT *, coalesce(nullif(gpu_count, 0), gpu_count_req) AS gpus, coalesce(elapsed_s, end_s - start_s) AS ran_s
  FROM jobs WHERE start_s IS NOT NULL AND end_s IS NOT NULL) j
LEFT JOIN job_metrics m USING (job_id, submit_s)
WHERE j.gpus > 0"""
"""GPU jobs that have started and ended, with GPUs (gpus), run time (ran_s) and metrics (m), of two views."""
_JOIN = f"""
SELECT job_id, submit_s, j.state, j.tier, j.gpus AS gpu_count, j.ran_s AS elapsed_s,
       {", ".join(f"m.{name}" for name in _METRICS if name not in ("job_id", "submit_s"))}
{RUNS_SQL} AND hash(job_id, submit_s) % {10**6} < $per_million ORDER BY job_id, submit_s
"""


def load_population(
    store: ClusterStore, since_s: int | None = None, until_s: int | None = None, at_most: int | None = None
) -> pa.Table:
    """GPU jobs submitted in [since_s, until_s) that have started and ended, with their metrics.

    Columns of POPULATION; the metrics of a job without a summary are null. Names no user. at_most: where there
    are more jobs an even sample of about so many, drawn by their ids; so large a span is not to be held in memory.
    Raises StoreError.
    """
    with store.connect() as db:
        store.view(db, "jobs", _SIZES, since_s, until_s)
        store.view(db, "job_metrics", _METRICS, since_s, until_s)
        per_million = _per_million(db, at_most)
        rows: pa.Table = db.sql(_JOIN, params={"per_million": per_million}).to_arrow_table()
    return rows.cast(POPULATION)


def _per_million(db: duckdb.DuckDBPyConnection, at_most: int | None) -> int:
    """Of a million jobs, how many are taken."""
    if at_most is None:
        return 10**6
    [(jobs,)] = db.sql(f"SELECT count(*) {RUNS_SQL}").fetchall()
    return 10**6 if jobs <= at_most else 10**6 * at_most // jobs


def prepare(jobs: pa.Table | pd.DataFrame) -> pd.DataFrame:
    """The columns of POPULATION, null where not given, in the order of the key, and columns derived from them.

    gpu_util_pct: mean GPU_UTIL, or without it (MIG) mean GR_ENGINE_ACTIVE as percent, as for the verdict.
    idle_gpu_count: GPUs never used; null unless every GPU of the job was seen, and its activity is known.
    excluded: the reason why a job is in no table; empty if it can be in one.
    """
    frame = jobs.to_pandas() if isinstance(jobs, pa.Table) else jobs
    frame = frame.reindex(columns=POPULATION.names).sort_values(["job_id", "submit_s"], ignore_index=True)
    real = [field.name for field in POPULATION if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)]
    frame = frame.astype(dict.fromkeys(real, "float64")).copy()  # astype leaves a block per column, and pandas warns
    is_whole = (frame["gpus_seen"] == frame["gpu_count"]) & frame["temporal_imbalance"].notna()
    return frame.assign(
        gpu_util_pct=frame["mean_gpu_util_pct"].fillna(100 * frame["mean_gr_engine_active_frac"]),
        elapsed_h=frame["elapsed_s"] / 3600,
        gpu_hours=frame["gpu_count"] * frame["elapsed_s"] / 3600,
        idle_gpu_count=frame["idle_gpus"].map(_length).where(is_whole).astype("float64"),
        excluded=[*map(_exclusion, frame["verdict"], frame["state"])],
    )


def _length(items: object) -> float:
    return float(len(items)) if isinstance(items, Sized) else np.nan


def _exclusion(verdict: object, state: object) -> str:
    if state in ("REQUEUED", "RESIZING"):
        return PART_OF_A_JOB
    if not isinstance(verdict, str):
        return NOT_SUMMARISED
    return "" if verdict == OK else f"verdict: {verdict}"


@dataclass(frozen=True)
class JobSelection:
    """The jobs that a table is made of, and the number of the others by reason; together they are all jobs."""

    jobs: pd.DataFrame
    left_out: dict[str, int]


def select(jobs: pd.DataFrame, table: StudyTable) -> JobSelection:
    """The jobs of `prepare` that have what a table needs. Each other one counts once, by its first reason."""
    why = jobs["excluded"].to_numpy(dtype=object, copy=True)
    if table.is_profiled:
        why[(why == "") & jobs["has_profiling_fault"].isin([True]).to_numpy()] = PROFILING_FAULT
    for metric in table.needs:
        for number in np.flatnonzero((why == "") & jobs[metric].isna().to_numpy()).tolist():
            why[number] = _why_null(metric, jobs["reasons"].iat[number])
    if table.needs_any:
        is_missing = jobs[list(table.needs_any)].isna().all(axis=1).to_numpy()
        why[(why == "") & is_missing] = f"not known: {', '.join(table.needs_any)}"
    counted = Counter(reason for reason in why.tolist() if reason)
    kept = jobs.columns.drop(["reasons", "excluded", "idle_gpus"])
    return JobSelection(jobs.loc[why == "", kept].reset_index(drop=True), dict(sorted(counted.items())))


def _why_null(metric: str, reasons: object) -> str:
    """The job's own reason for a metric that is null, such as "spatial_imbalance: one GPU"."""
    given = reasons if isinstance(reasons, (list, tuple, np.ndarray)) else ()
    return next((str(reason) for reason in given if str(reason).startswith(f"{metric}: ")), f"{metric}: not known")
