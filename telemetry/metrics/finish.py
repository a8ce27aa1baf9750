"""From merged partials to one row per GPU and one per job. docs/formulas.md explains each column."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import pyarrow as pa

from almanac.config import Config
from telemetry.metrics import finish_sql
from telemetry.metrics.base import BASE
from telemetry.metrics.catalogue import GPU_METRICS, JOB_METRICS
from telemetry.metrics.energy import ENERGY
from telemetry.metrics.histogram import HISTOGRAM
from telemetry.metrics.partials import Partials
from telemetry.metrics.roofline import ROOFLINE
from telemetry.metrics.samples import rows, run
from telemetry.metrics.spatial import FOLD, OPEN_WINDOWS, SPATIAL


@dataclass(frozen=True)
class Results:
    """Rows of the tables gpu_metrics and job_metrics."""

    gpus: pa.Table
    jobs: pa.Table


def finish(
    db: duckdb.DuckDBPyConnection,
    partials: Partials,
    claims: pa.Table,
    models: pa.Table,
    jobs: pa.Table,
    config: Config,
) -> Results:
    """Metrics of every job of `jobs`, also of those without any sample.

    claims, models, jobs: `frames.CLAIM_FRAME`, `frames.MODEL_FRAME`, `frames.JOB_FRAME`. The partials are merged ones.
    """
    given = {
        "base": partials[BASE],
        "energy": partials[ENERGY],
        "closed_windows": partials[SPATIAL],
        "open_windows": partials[OPEN_WINDOWS],
        "roofline": partials[ROOFLINE],
        "histogram": partials[HISTOGRAM],
        "claims": claims,
        "models": models,
        "jobs": jobs,
    }
    for name, table in given.items():
        db.register(name, table)
    run(db, f"CREATE OR REPLACE TEMP TABLE spatial AS {_all_windows()}")
    run(db, f"CREATE OR REPLACE TEMP TABLE intensity AS {finish_sql.intensity()}")
    run(db, f"CREATE OR REPLACE TEMP TABLE per_gpu AS {finish_sql.per_gpu(config)}")
    gpus = rows(db, f"SELECT {', '.join(GPU_METRICS.names)} FROM per_gpu ORDER BY job, host, gpu, mig")
    found = rows(db, finish_sql.per_job(config)).select(JOB_METRICS.names)
    for name in given:
        db.unregister(name)
    for name in ("spatial", "intensity", "per_gpu"):
        run(db, f"DROP TABLE {name}")
    return Results(gpus.cast(GPU_METRICS), found.cast(JOB_METRICS))


def _all_windows() -> str:
    folded = FOLD.format(totals="open_windows")
    return f"""
SELECT job, sum(windows) AS windows, sum(active_windows) AS active_windows, sum(ratio_sum) AS ratio_sum
FROM (SELECT * FROM closed_windows UNION ALL BY NAME {folded}) GROUP BY job"""
