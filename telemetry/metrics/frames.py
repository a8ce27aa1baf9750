"""The small tables beside the samples: jobs, GPU models and claims."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from almanac.config import Filters
from almanac.hardware import find_gpu_model
from telemetry.attribution import Attribution, Job
from telemetry.metrics.filters import host_filter, set_aside
from telemetry.metrics.inventory import Survey
from telemetry.metrics.preallocation import steady_span_ms
from telemetry.schema import schema_of, table_of

UNIT_MODELS = schema_of(
    {
        "host": pa.string(),
        "gpu": pa.int16(),
        "mig": pa.string(),
        "gpu_model": pa.string(),
        "capacity_mib": pa.float64(),
    }
)
JOB_FRAME = schema_of(
    {
        "job": pa.int32(),
        "job_id": pa.int64(),
        "submit_s": pa.int64(),
        "start_s": pa.int64(),
        "gpu_count": pa.int64(),
        "expected": pa.float64(),
        "set_aside": pa.string(),
        "attributed_by": pa.string(),
    }
)


def with_steady_spans(claims: pa.Table, jobs: Sequence[Job]) -> pa.Table:
    """Claims with the span of each job in which a reservation of memory would be flat."""
    spans = [steady_span_ms(job.start_s, job.end_s) for job in jobs]
    numbers = claims["job"].to_numpy()
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)[numbers]
    return claims.append_column("steady_from_ms", pa.array(bounds[:, 0])).append_column(
        "steady_until_ms", pa.array(bounds[:, 1])
    )


def unit_models(seen: Survey) -> pa.Table:
    """Model and nominal capacity of each unit; null where the label is not known, and of MIG instances."""
    labels: dict[tuple[str, int, str], tuple[str, float | None]] = {}
    names = ("host", "gpu", "mig", "model", "total_mib")
    for host, gpu, mig, label, total in zip(*(seen.units[name].to_pylist() for name in names), strict=True):
        if label is not None:
            labels[host, gpu, mig] = (label, total)
    find = functools.cache(find_gpu_model)
    found = {unit: find(*label) for unit, label in labels.items()}
    rows = [
        (*unit, model and model.name, None if model is None or unit[2] else float(model.hbm_mib))
        for unit, model in found.items()
    ]
    return table_of(UNIT_MODELS, rows)


def job_frame(jobs: Sequence[Job], attribution: Attribution, seen: Survey, filters: Filters) -> pa.Table:
    """What `merge` wants to know of each job."""
    login_nodes = host_filter(filters.login_nodes)
    rows = [
        (
            number,
            job.job_id,
            job.submit_s,
            job.start_s,
            job.gpu_count,
            seen.intervals.expected(job.start_s, job.end_s),
            set_aside(job, filters, login_nodes) or attribution.failed.get(number),
            attribution.origin.get(number),
        )
        for number, job in enumerate(jobs)
    ]
    return table_of(JOB_FRAME, rows)
