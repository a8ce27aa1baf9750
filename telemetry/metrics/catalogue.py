"""The columns of job_metrics and gpu_metrics, as data. docs/formulas.md says how each is computed."""

from __future__ import annotations

import pyarrow as pa

from telemetry.counters import COUNTERS


def _column(name: str, kind: pa.DataType, about: str = "", nullable: bool = True) -> pa.Field[pa.DataType]:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": about} if about else None)


_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_HBM = (
    _column("gpu_model", _TEXT, "row of almanac/hardware.toml; null: not known"),
    _column("hbm_capacity_mib", _REAL, "MiB, nominal; null: model not known"),
    _column("hbm_peak_mib", _REAL, "MiB; of a job the highest GPU, null without the verdict ok"),
    _column("hbm_peak_frac", _REAL, "share of the nominal capacity"),
    _column("hbm_peak_ms", _INT, "ms since 1970, UTC: when the peak was first seen"),
    _column("is_preallocated", _FLAG, "the peak is what a framework reserved; null: cannot be told"),
)
_MEANS = tuple(_column(f"mean_{counter.column}", _REAL, counter.unit) for counter in COUNTERS)

JOB_METRICS = pa.schema(
    [
        _column("job_id", _INT, nullable=False),
        _column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        _column("verdict", _TEXT, "ok, or why the job is set aside", nullable=False),
        _column("attributed_by", _TEXT, "whole node, label, prolog or squeue; null: nothing attributed"),
        _column("gpus_seen", _INT, "GPUs with samples"),
        _column("samples", _INT, "samples attributed"),
        _column("expected_samples", _REAL, "GPUs * run time / scrape interval; null: interval not known"),
        _column("coverage_frac", _REAL, "samples / expected samples, at most 1"),
        *_HBM,
        _column("hbm_max_mib", _REAL, "MiB, highest sample of any GPU, whatever the verdict"),
        *_MEANS,
    ]
)

GPU_METRICS = pa.schema(
    [
        _column("job_id", _INT, nullable=False),
        _column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        _column("host", _TEXT, nullable=False),
        _column("gpu", pa.int16(), "GPU index on its host", nullable=False),
        _column("mig", _TEXT, "MIG instance id; empty: the whole GPU", nullable=False),
        _column("samples", _INT, "samples attributed"),
        _column("expected_samples", _REAL, "run time / scrape interval; null: interval not known"),
        _column("coverage_frac", _REAL, "samples / expected samples, at most 1"),
        *_HBM,
        *_MEANS,
    ]
)
