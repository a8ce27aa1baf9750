"""From merged partials to one row per GPU and one per job. docs/formulas.md explains each column."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import pyarrow as pa

from almanac.config import Config
from telemetry.metrics import energy_chain, histogram, metric_tables_sql
from telemetry.metrics.catalogue import GPU_METRICS, JOB_METRICS
from telemetry.metrics.columns import Rows
from telemetry.metrics.hours import rows, run
from telemetry.metrics.partials import ALLOCATION, ENERGY, HISTOGRAM, WINDOWS, Partials


@dataclass(frozen=True)
class Results:
    """Rows of the tables gpu_metrics and job_metrics."""

    gpus: pa.Table
    jobs: pa.Table


def finish(
    db: duckdb.DuckDBPyConnection,
    partials: Partials,
    allocations: pa.Table,
    models: pa.Table,
    jobs: pa.Table,
    config: Config,
) -> Results:
    """Metrics of every job of `jobs`, also of those without any sample.

    allocations, models, jobs: as `frames.ALLOCATION_FRAME`, `frames.MODEL_FRAME`, `frames.JOB_FRAME`. partials: merged.
    """
    given = {
        "spatial": _table(partials[WINDOWS]),
        "energies": energy_chain.energies(partials[ENERGY], allocations),
        "intensity": histogram.by_job(partials[HISTOGRAM]),
        "allocations": allocations,
        "models": models,
        "jobs": jobs,
    }
    for name, table in given.items():
        db.register(name, table)
    db.register("parts", _table(partials[ALLOCATION]))
    run(db, f"CREATE OR REPLACE TEMP TABLE per_gpu AS {metric_tables_sql.per_gpu(config)}")
    db.unregister("parts")
    gpus = rows(db, f"SELECT {', '.join(GPU_METRICS.names)} FROM per_gpu ORDER BY job, host, gpu, mig")
    found = rows(db, metric_tables_sql.per_job(config)).select(JOB_METRICS.names)
    for name in given:
        db.unregister(name)
    run(db, "DROP TABLE per_gpu")
    return Results(gpus.cast(GPU_METRICS), found.cast(JOB_METRICS))


def _table(rows: Rows) -> pa.Table:
    """NaN becomes null."""
    return pa.table({name: pa.array(rows[name], from_pandas=True) for name in rows.kinds})
