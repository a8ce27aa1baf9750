"""The columns of job_metrics and gpu_metrics, as data. docs/formulas.md explains each."""

from __future__ import annotations

import pyarrow as pa

from telemetry.counters import COUNTERS

PIPES = ("fp64", "fp32", "fp16", "tensor")
"""Floating-point pipes; each has a counter <pipe>_active_frac."""

AVERAGED = tuple(counter for counter in COUNTERS if counter.column not in ("energy_mj", "hbm_total_mib"))
"""Counters with a useful mean: not the cumulative one, and not the capacity."""


def _column(name: str, kind: pa.DataType, about: str = "", nullable: bool = True) -> pa.Field[pa.DataType]:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": about} if about else None)


_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_HBM = (
    _column("gpu_model", _TEXT, "row of almanac/hardware.toml, or the exporter's own name; null: unknown"),
    _column("mig_profile", _TEXT, "profile of the MIG instance, such as 1g.10gb; null: a whole GPU, or not named"),
    _column(
        "hbm_capacity_mib",
        _REAL,
        "MiB: used + free, or nominal of a known model where that is not measured; null: unknown",
    ),
    _column(
        "hbm_peak_mib", _REAL, "MiB, peak GPU memory; for a job the highest GPU, and null unless data quality is ok"
    ),
    _column("hbm_peak_frac", _REAL, "share of the capacity"),
    _column("hbm_peak_ms", _INT, "ms since 1970, UTC: when the peak was first seen"),
    _column("hbm_growth_mib_h", _REAL, "MiB per hour, by least squares"),
    _column("is_preallocated", _FLAG, "whether the peak is what a framework reserved; null: unknown"),
)
_MEANS = tuple(_column(f"mean_{counter.column}", _REAL, counter.unit) for counter in AVERAGED)
_USE = (
    _column("temporal_imbalance", _REAL, "0 (steady) to 1; for a job the highest GPU"),
    _column("energy_j", _REAL, "J; null also for a MIG instance, which shares its GPU's counter"),
    _column("energy_power_w", _REAL, "W per GPU: energy / run time"),
    _column("energy_measured_frac", _REAL, "share of the GPUs' time that the energy counter covers; null: no energy"),
    _column("energy_resets", _INT, "number of times that the energy counter restarted"),
    _column("energy_rejected", _INT, "readings of the energy counter that are physically impossible, or frozen"),
    _column("max_temp_c", _REAL, "degC"),
    _column("has_profiling_fault", _FLAG, "profiling counters read 0 while GPU_UTIL was high"),
)


def _roofline(pipe: str) -> tuple[pa.Field[pa.DataType], ...]:
    return (
        _column(f"class_{pipe}", _TEXT, "compute or memory, by the larger share of the time"),
        _column(f"compute_frac_{pipe}", _REAL, "share of time on the roofline that is right of the ridge"),
        _column(f"compute_sample_frac_{pipe}", _REAL, "share of samples on the roofline that are right of the ridge"),
        _column(f"placed_samples_{pipe}", _INT, "samples on the roofline of this pipe; null: none"),
        _column(f"flops_{pipe}", _REAL, "flop/s achieved, sum of all GPUs"),
        _column(f"intensity_{pipe}", _REAL, "flop per byte of device memory"),
        _column(f"intensity_bins_{pipe}", pa.list_(_INT), "samples below 1e-3, in 30 bins up to 1e3, and above"),
    )


JOB_METRICS = pa.schema(
    [
        _column("job_id", _INT, nullable=False),
        _column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        _column("verdict", _TEXT, "data quality: ok, or why the job is excluded", nullable=False),
        _column("reasons", pa.list_(_TEXT), 'reasons of null metrics: "metric: reason"'),
        _column("attributed_by", _TEXT, "whole node, label, prolog, or squeue; null: no samples attributed"),
        _column("gpus_seen", _INT, "GPUs with samples"),
        _column("samples", _INT, "samples attributed"),
        _column("expected_samples", _REAL, "GPUs * run time / scrape interval; null: unknown interval"),
        _column("coverage_frac", _REAL, "mean over the GPUs of samples / expected samples, each at most 1"),
        *_HBM,
        _column("hbm_max_mib", _REAL, "MiB, highest sample of any GPU, for any data quality"),
        *_MEANS,
        *(
            _column(
                f"coverage_{counter.column}", _REAL, "mean over the GPUs of known / expected samples, each at most 1"
            )
            for counter in AVERAGED
        ),
        _column("coverage_energy", _REAL, "mean over the GPUs of known / expected samples, each at most 1"),
        _column("spatial_imbalance", _REAL, "0 (even) to 1"),
        _column("spatial_windows", _INT, "windows compared: those with samples of most GPUs"),
        *_USE,
        _column("idle_gpus", pa.list_(_TEXT), "GPUs without activity, as host:gpu or host:gpu:mig"),
        _column("pipes_used", pa.list_(_TEXT), "floating-point pipes that the job uses"),
        _column("main_pipe", _TEXT, "pipe with the highest mean activity"),
        _column("job_class", _TEXT, "roofline class of the main pipe"),
        *(field for pipe in PIPES for field in _roofline(pipe)),
        _column("hbm_bytes_s", _REAL, "bytes/s of device memory achieved, sum of all GPUs"),
        _column("nvlink_bytes", _REAL, "bytes over NVLink, both directions, all GPUs"),
        _column("pcie_bytes", _REAL, "bytes over PCIe, both directions, all GPUs"),
    ]
)

_STEP_KEY = ("job_id", "submit_s")


def _is_of_step(name: str) -> bool:
    return name == "coverage_frac" or not name.startswith(("coverage_", "intensity_bins_"))


STEP_METRICS = pa.schema(
    [
        *(JOB_METRICS.field(name) for name in _STEP_KEY),
        _column("step", _TEXT, "0, 1, ..., or 1+0 of a heterogeneous step", nullable=False),
        *(field for field in JOB_METRICS if field.name not in _STEP_KEY and _is_of_step(field.name)),
    ]
)
"""The columns of a job, for one of its steps, without the coverage of each counter and the histograms."""

GPU_METRICS = pa.schema(
    [
        _column("job_id", _INT, nullable=False),
        _column("submit_s", _INT, "s since 1970, UTC", nullable=False),
        _column("host", _TEXT, nullable=False),
        _column("gpu", pa.int16(), "GPU index on its host", nullable=False),
        _column("mig", _TEXT, "MIG instance id; empty: the whole GPU", nullable=False),
        _column("samples", _INT, "samples attributed"),
        _column("expected_samples", _REAL, "run time / scrape interval; null: unknown interval"),
        _column("coverage_frac", _REAL, "samples / expected samples, at most 1"),
        *_HBM,
        *_MEANS,
        *_USE,
        _column("is_idle", _FLAG, "no activity in any sample; null: unknown"),
    ]
)
