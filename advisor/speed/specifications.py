"""How fast a GPU type should be by its specifications: peaks of the hardware table, by roofline and busy share.

A run's time has three parts: the GPU waits for the host (1 - busy), computes (busy x compute share), or moves memory
(the rest). On another type the first part stays, and the others shrink with the peaks. This is the estimate before any
run on that type (HadarE estimates from peaks alone, hadar-heterogeneity, "Initial Throughput Estimation").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from almanac.hardware import GpuModel
from telemetry.metrics.catalogue import PIPES

Floats = npt.NDArray[np.float64]
DEFAULT_COMPUTE = {"compute": 0.8, "memory": 0.2, "": 0.5}
"""Share of the busy time right of the ridge, where only the roofline class is known, or nothing (own choice)."""
DEFAULT_PIPE = "fp32"
_FALLBACKS = {"tensor": "fp16", "fp16": "fp32", "fp64": "fp32"}
"""A pipe that a GPU lacks: its work runs on this one."""
_LEAST_BUSY = 0.02


@dataclass(frozen=True)
class RunProfile:
    """What telemetry says of a run on gpu_type. compute, busy: shares in 0..1, NaN where unknown; pipe: "" likewise."""

    gpu_type: str
    roofline: str = ""
    pipe: str = ""
    compute: float = math.nan
    busy: float = math.nan


def log_speeds(profile: RunProfile, types: Sequence[str], hardware: Sequence[GpuModel | None]) -> Floats:
    """(types,) natural logarithm of the speed on each type, relative to their mean; NaN for unknown hardware.

    If the profile's own type has no known hardware, its shares are taken to be those of the slowest known type.
    """
    pipe = profile.pipe or DEFAULT_PIPE
    peaks = np.array([_peaks(model, pipe) for model in hardware]).reshape(len(types), 2)
    logs = np.full(len(types), math.nan)
    known = np.flatnonzero(np.isfinite(peaks).all(axis=1))
    if not len(known):
        return logs
    own = types.index(profile.gpu_type) if profile.gpu_type in types else -1
    base = own if own in known else known[np.argmin(peaks[known, 1])]
    compute = (
        profile.compute
        if profile.compute == profile.compute
        else DEFAULT_COMPUTE.get(profile.roofline, DEFAULT_COMPUTE[""])
    )
    compute = min(max(compute, 0.0), 1.0)
    busy = min(max(profile.busy, _LEAST_BUSY), 1.0) if profile.busy == profile.busy else 1.0
    shrunk = peaks[base] / peaks[known]
    logs[known] = -np.log(1 - busy + busy * (compute * shrunk[:, 0] + (1 - compute) * shrunk[:, 1]))
    return logs - float(np.mean(logs[known]))


def _peaks(model: GpuModel | None, pipe: str) -> tuple[float, float]:
    """flop/s and bytes/s; NaN where unknown."""
    if model is None:
        return math.nan, math.nan
    name: str | None = pipe if pipe in PIPES else DEFAULT_PIPE
    while name is not None:
        peak = getattr(model, f"{name}_flops")
        if peak:
            return float(peak), model.hbm_bytes_per_s
        name = _FALLBACKS.get(name)
    return math.nan, model.hbm_bytes_per_s
