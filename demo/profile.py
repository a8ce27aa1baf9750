"""The published and chosen numbers of `profile.toml`, typed. Each has its source beside it in that file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PIPES = ("fp64", "fp32", "fp16", "tensor")


@dataclass(frozen=True)
class Curve:
    """A quantile function, linear between knots: cumulative share -> value."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, knots: list[list[float]]) -> Curve:
        return cls(tuple(k[0] for k in knots), tuple(k[1] for k in knots))

    def __call__(self, share: Floats) -> Floats:
        return np.interp(share, self.shares, self.values)


@dataclass(frozen=True)
class SizeBin:
    """Jobs of low..high GPUs (both included); `util` is their curve of mean GPU_UTIL."""

    low: int
    high: int
    share: float
    util: Curve


@dataclass(frozen=True)
class DurationProfile:
    """The means are those of jobs that last at least mean_from_s."""

    mean_from_s: int
    one_node_mean_s: float
    multi_node_mean_s: float
    longest_s: int
    one_node_log_sigma: float
    multi_node_log_sigma: float
    family_log_sigma: Curve
    limit_factor: Curve
    limits_s: tuple[int, ...]


@dataclass(frozen=True)
class Combo:
    """A set of FP pipes that a job uses; lean > 0 means more utilization than others."""

    pipes: frozenset[str]
    share: float
    lean: float


@dataclass(frozen=True)
class Pipes:
    combos: tuple[Combo, ...]
    used_rate: Curve
    used_least_frac: float
    unused_most_frac: float
    compute_bound_share: float


@dataclass(frozen=True)
class MemoryProfile:
    """HBM peaks: bands_80 (least, most, share) and grow_80 are of 80 GB, other_40 and grow_40 of 40 GB."""

    bands_80: tuple[tuple[float, float, float], ...]
    tier80_request_share: float
    tier40_request_share: float
    other_40: Curve
    unaware_share: float
    family_spread: Curve
    most_frac: float
    grow_80: tuple[float, float]
    grow_40: tuple[float, float]
    growing_share: float
    preallocate: tuple[Preallocation, ...]


@dataclass(frozen=True)
class Preallocation:
    """A framework that takes `frac` of the GPU at once; `users` is the share of users who use it."""

    name: str
    frac: float
    users: float


@dataclass(frozen=True)
class OutcomeProfile:
    failed: float
    cancelled: float
    node_fail: float
    cancelled_waiting: float
    fails_at: Curve


@dataclass(frozen=True)
class People:
    hours: tuple[float, ...]
    weekdays: tuple[float, ...]
    new_share: float
    families_per_user: tuple[int, int]
    session_jobs_mean: float
    array_share: float
    within_session_gap_s: float
    staff_job_share: float
    idle_job_share: float
    debug_share: float
    suffix_share: float


@dataclass(frozen=True)
class Profile:
    """spatial and temporal hold the curves of low, medium and high utilization, in this order."""

    bins: tuple[SizeBin, ...]
    duration: DurationProfile
    one_gpu_share: float
    pipes: Pipes
    spatial: tuple[Curve, Curve, Curve]
    temporal: tuple[Curve, Curve, Curve]
    memory: MemoryProfile
    outcome: OutcomeProfile
    people: People


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, and lists of [share, value] knots that start at share 0 and end at share 1 as curves."""
    return {key: _value(value) for key, value in row.items()}


def _value(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], list):
        if len(value[0]) == 2 and value[0][0] == 0.0 and value[-1][0] == 1.0:
            return Curve.of(value)
        return tuple(tuple(item) for item in value)
    return tuple(value)


def _bands(row: dict[str, list[list[float]]]) -> tuple[Curve, Curve, Curve]:
    return Curve.of(row["low"]), Curve.of(row["medium"]), Curve.of(row["high"])


@cache
def load_profile() -> Profile:
    """The profile that ships with the package."""
    raw = tomllib.loads((resources.files(__package__) / "profile.toml").read_text(encoding="utf-8"))
    utilization = _typed(raw["utilization"])
    memory = raw["memory"]
    preallocate = tuple(Preallocation(**row) for row in memory.pop("preallocate"))
    pipes = raw["pipes"]
    combos = tuple(Combo(frozenset(c["pipes"]), c["share"], c["lean"]) for c in pipes.pop("combos"))
    return Profile(
        bins=tuple(SizeBin(**{**row, "util": utilization[row["util"]]}) for row in raw["size"]["bins"]),
        duration=DurationProfile(**_typed(raw["duration"])),
        one_gpu_share=raw["utilization"]["one_gpu_share"],
        pipes=Pipes(combos=combos, **_typed(pipes)),
        spatial=_bands(raw["spatial"]),
        temporal=_bands(raw["temporal"]),
        memory=MemoryProfile(preallocate=preallocate, **_typed(memory)),
        outcome=OutcomeProfile(**_typed(raw["outcome"])),
        people=People(**_typed(raw["people"])),
    )
