"""Name the GPU type of each recorded run, and read its run time and achieved rates.

A site names its types in GRES (gpu:h100) or by node features (--constraint=h100), so a type is called, in this order:
the GRES type that the job was given; the feature that stands for the GPU model that telemetry saw; the one feature that
the job required. A GRES type that spans several models is told apart by their features. MIG slices are no GPU type.

The specified speed is an estimate before any run on a type, from peaks of the hardware table (HadarE estimates from
peaks alone, Sultana et al., "Initial Throughput Estimation"). A run's time has three parts: the GPU waits for the
host (1 - busy), computes (busy x compute share), or moves memory (the rest). On another type the first part stays, and
the others shrink with the peaks.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.features import is_packed, texts_of
from almanac.hardware import GpuModel, find_gpu_model, gpu_models
from almanac.names import is_family
from almanac.submit_config import Tier
from almanac.tiers import required_features
from slurm.states import ENDED_WELL
from telemetry.counters import PIPES
from telemetry.history import load_history_table
from telemetry.metrics.data_quality import OK
from telemetry.store.store import ClusterStore

_SLICE = re.compile(r"(^|[._:-])\d+g\.\d+gb", re.I)
_MEMORY = re.compile(r"(?<![0-9])([0-9]{2,3})(?:g|gb)?(?![0-9a-z])", re.I)
_SURE = 0.9
"""A feature stands for a GPU model if this share of the jobs that required it ran on the model (own choice)."""
_MIN_JOBS = 3
_SPANS = 0.05
"""A GRES type spans a model if this share of its jobs ran on it (own choice)."""


@dataclass(frozen=True)
class GpuTypes:
    """Names of a site's GPU types.

    models: by type, the row of the hardware table. features: by GPU model, the feature that stands for it. spread: GRES
    types that span several models. capacities_mib: by type, the least memory of one GPU.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()
    capacities_mib: Mapping[str, float] = field(default_factory=dict)

    def name(self, gpu_type: str, constraints: str, gpu_model: str) -> str:
        """The type that a job ran on; "" if unknown, and for a MIG slice."""
        if _SLICE.search(gpu_type):
            return ""
        if gpu_type and gpu_type not in self.spread:
            return gpu_type
        if gpu_model:
            return self.features.get(gpu_model, gpu_model)
        named = sorted(required_features(constraints) & set(self.features.values()))
        return named[0] if len(named) == 1 else ""

    def hardware(self, gpu_type: str) -> GpuModel | None:
        """The row of the hardware table; None for an unknown GPU model."""
        return gpu_models().get(self.models.get(gpu_type, "")) or find_hardware(gpu_type)

    def capacity_mib(self, gpu_type: str) -> float | None:
        if gpu_type in self.capacities_mib:
            return self.capacities_mib[gpu_type]
        model = self.hardware(gpu_type)
        return float(model.hbm_mib) if model else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "spread": sorted(self.spread)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GpuTypes:
        """Rebuild the types from JSON. Raises KeyError, TypeError, or ValueError for other data."""
        return cls(
            {str(name): str(model) for name, model in data["models"].items()},
            {str(model): str(name) for model, name in data["features"].items()},
            frozenset(map(str, data["spread"])),
            {str(name): float(mib) for name, mib in data["capacities_mib"].items()},
        )


def find_hardware(name: str) -> GpuModel | None:
    """Return the row of the hardware table for a GPU type's name, such as "h100", "a100_80g", or "gpu-v100".

    A model with several memory sizes: the size that the name states, else the smallest. None if the name has no model,
    or several.
    """
    text = name.lower()
    if (known := find_gpu_model(name)) is not None:
        return known
    heads = {
        head
        for head in (key.split("-")[0].lower() for key in gpu_models())
        if re.search(rf"(?<![a-z0-9]){re.escape(head)}(?![0-9])", text)
    }
    # "l40s" also reads like "l40".
    heads = {head for head in heads if not any(other != head and other.startswith(head) for other in heads)}
    found = [model for key, model in gpu_models().items() if key.split("-")[0].lower() in heads]
    if len(heads) != 1:
        return None
    sizes = {int(size) for size in _MEMORY.findall(text)}
    stated = [model for model in found if round(model.hbm_mib / 1024) in sizes]
    return min(stated or found, key=lambda model: (model.hbm_mib, -(model.hbm_bytes_per_s or 0)))


def learn_types(jobs: pd.DataFrame, tiers: Sequence[Tier] = ()) -> GpuTypes:
    """The types that jobs of the site were given. jobs: columns gpu_type, constraints, gpu_model, hbm_capacity_mib.

    tiers: a tier's feature is known even before a job ran there.
    """
    columns = [texts_of(jobs[name]) for name in ("gpu_type", "constraints", "gpu_model")]
    counts = Counter(zip(*columns, strict=True))
    by_type: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_feature: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (gpu_type, constraints, model), number in counts.items():
        if _SLICE.search(gpu_type):
            continue
        if model and gpu_type:
            by_type[gpu_type][model] += number
        for feature in required_features(constraints):
            by_feature[feature][model] += number
    spread = frozenset(name for name, models in by_type.items() if _spans_several(models))
    features = _features(by_feature, tiers)
    models = {name: seen.most_common(1)[0][0] for name, seen in by_type.items() if name not in spread}
    models |= {feature: model for model, feature in features.items() if model in gpu_models()}
    named = GpuTypes(models, features, spread)
    return GpuTypes(models, features, spread, _capacities(jobs, columns, named))


def _spans_several(models: Counter[str]) -> bool:
    enough = [number for number in models.values() if number >= max(_MIN_JOBS, _SPANS * models.total())]
    return len(enough) > 1


def _features(by_feature: Mapping[str, Counter[str]], tiers: Sequence[Tier]) -> dict[str, str]:
    """By GPU model the feature that stands for it: one that reads like it, else the one most jobs required.

    Without telemetry a feature that reads like a model stands for that.
    """
    found: defaultdict[str, list[tuple[bool, int, str]]] = defaultdict(list)
    for feature in {*by_feature, *(tier.constraint for tier in tiers if tier.constraint)}:
        seen = Counter({model: number for model, number in by_feature.get(feature, Counter()).items() if model})
        meant = find_hardware(feature)
        if seen.total() >= _MIN_JOBS:
            model, number = seen.most_common(1)[0]
            if number >= _SURE * seen.total():
                found[model].append((meant is not None and _alike(meant.name, model), number, feature))
        elif meant is not None:
            found[meant.name].append((True, by_feature.get(feature, Counter()).total(), feature))
    return {model: max(names, key=lambda each: (*each[:2], each[2]))[2] for model, names in found.items()}


def _alike(one: str, other: str) -> bool:
    return one.split("-")[0] == other.split("-")[0]


def _capacities(jobs: pd.DataFrame, columns: Sequence[Sequence[str]], types: GpuTypes) -> dict[str, float]:
    names = [types.name(*row) for row in zip(*columns, strict=True)]
    known = pd.Series(jobs["hbm_capacity_mib"].astype("float64").to_numpy()).groupby(names).min()
    return {str(name): float(mib) for name, mib in known.items() if name and mib > 0}


Floats = npt.NDArray[np.float64]
DEFAULT_COMPUTE = {"compute": 0.8, "memory": 0.2, "": 0.5}
"""Share of the busy time right of the ridge, where only the roofline class is known, or nothing (own choice)."""
DEFAULT_PIPE = "fp32"
_FALLBACKS = {"tensor": "fp16", "fp16": "fp32", "fp64": "fp32"}
"""A pipe that a GPU lacks: its work runs on this one."""
_LEAST_BUSY = 0.02


@dataclass(frozen=True)
class RunProfile:
    """Telemetry of a run on gpu_type. compute, busy: shares in 0..1, NaN if unknown; pipe: "" likewise."""

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
    bandwidth = model.hbm_bytes_per_s or math.nan
    name: str | None = pipe if pipe in PIPES else DEFAULT_PIPE
    while name is not None:
        peak = getattr(model, f"{name}_flops")
        if peak:
            return float(peak), bandwidth
        name = _FALLBACKS.get(name)
    return math.nan, bandwidth


COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "name_key", "gpu_count", "gpu_type", "constraints", "state",
    "elapsed_s", "time_limit_s", "gpu_model", "hbm_capacity_mib", "verdict", "has_profiling_fault", "main_pipe",
    "job_class", "hbm_bytes_s", "mean_gr_engine_active_frac", "mean_gpu_util_pct", *(f"flops_{pipe}" for pipe in PIPES),
    *(f"compute_frac_{pipe}" for pipe in PIPES), "is_packed",
)  # fmt: skip
_TEXTS = ("user", "name_key", "gpu_type", "constraints", "gpu_model", "state", "verdict", "main_pipe", "job_class")
_NUMBERS = (
    "gpu_count", "end_s", "elapsed_s", "hbm_bytes_s", "mean_gr_engine_active_frac", "mean_gpu_util_pct",
    *(f"flops_{pipe}" for pipe in PIPES), *(f"compute_frac_{pipe}" for pipe in PIPES),
)  # fmt: skip
NEWEST = 20
"""Runs of a family on one type that count (own choice)."""


class FamilyKey(NamedTuple):
    """A job family: past jobs of one user under one masked name and GPU count."""

    user: str
    name_key: str
    gpu_count: int


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One ended run. log_s: logarithm of its run time; NaN unless it completed.

    log_flops, log_bytes: logarithms of the rates that all its GPUs achieved together; NaN where unknown.
    """

    family: FamilyKey
    gpu_type: str
    end_s: int
    log_s: float = math.nan
    log_flops: float = math.nan
    log_bytes: float = math.nan
    profile: RunProfile = field(default_factory=lambda: RunProfile(""))


def load_speed_runs(
    store: ClusterStore, user: str | Collection[str] | None = None, since_s: int | None = None
) -> pd.DataFrame:
    """Ended GPU jobs, oldest end first, with COLUMNS; of some users, or of all. Raises StoreError."""
    frame: pd.DataFrame = load_history_table(store, COLUMNS, since_s=since_s, user=user).to_pandas()
    return frame


def runs_of(jobs: pd.DataFrame, types: GpuTypes) -> list[SpeedRun | None]:
    """One per row of `load_speed_runs`, in its order; None where a row says nothing of a known type, or is packed."""
    columns = {name: texts_of(jobs[name]) for name in _TEXTS}
    numbers = {name: pd.to_numeric(jobs[name], errors="coerce").astype("float64").tolist() for name in _NUMBERS}
    faults = (jobs["has_profiling_fault"] == True).tolist()  # noqa: E712 - null is false
    names = [
        types.name(*row) for row in zip(columns["gpu_type"], columns["constraints"], columns["gpu_model"], strict=True)
    ]
    packed = is_packed(jobs).tolist()
    return [
        _run(
            names[row],
            {name: values[row] for name, values in columns.items()},
            {name: values[row] for name, values in numbers.items()},
            faults[row],
        )
        if names[row] and not packed[row]
        else None
        for row in range(len(jobs))
    ]


def _run(gpu_type: str, text: Mapping[str, str], number: Mapping[str, float], has_fault: bool) -> SpeedRun | None:
    if math.isnan(number["end_s"]) or not number["gpu_count"] >= 1 or not is_family(text["name_key"]):
        return None
    family = FamilyKey(text["user"], text["name_key"], int(number["gpu_count"]))
    log_s = _log(number["elapsed_s"]) if text["state"] == "COMPLETED" else math.nan
    end_s = int(number["end_s"])
    if text["verdict"] != OK or text["state"] not in ENDED_WELL or has_fault:
        return SpeedRun(family, gpu_type, end_s, log_s, profile=RunProfile(gpu_type)) if log_s == log_s else None
    pipe = text["main_pipe"] if text["main_pipe"] in PIPES else ""
    flops, compute = (number[f"{kind}_{pipe}"] if pipe else math.nan for kind in ("flops", "compute_frac"))
    busy = number["mean_gr_engine_active_frac"]
    if math.isnan(busy):
        busy = number["mean_gpu_util_pct"] / 100
    profile = RunProfile(gpu_type, text["job_class"], pipe, compute, busy)
    return SpeedRun(family, gpu_type, end_s, log_s, _log(flops), _log(number["hbm_bytes_s"]), profile)


def _log(value: float) -> float:
    """NaN for what is missing, and for what no run can have: zero, negative, or not finite."""
    return math.log(value) if 0 < value < math.inf else math.nan


@dataclass
class FamilyRuns:
    """The newest runs of one family, by GPU type."""

    by_type: defaultdict[str, deque[SpeedRun]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=NEWEST))
    )

    def add(self, run: SpeedRun) -> None:
        self.by_type[run.gpu_type].append(run)

    @property
    def types(self) -> frozenset[str]:
        return frozenset(self.by_type)

    @property
    def newest_s(self) -> int:
        """End of the newest run."""
        return max(runs[-1].end_s for runs in self.by_type.values())

    @property
    def roofline(self) -> str:
        """compute, memory, or "" if no run tells."""
        known = [run.profile.roofline for runs in self.by_type.values() for run in runs if run.profile.roofline]
        return max(sorted(set(known)), key=known.count) if known else ""

    def profiles(self) -> list[RunProfile]:
        """One per type with runs: the newest that tells the most."""
        return [
            max(runs, key=lambda run: (bool(run.profile.pipe), run.profile.busy == run.profile.busy, run.end_s)).profile
            for _, runs in sorted(self.by_type.items())
        ]

    def log_times(self) -> dict[str, list[float]]:
        """Return the log run times of completed runs, by type; types without any are left out."""
        found = {name: [run.log_s for run in runs if run.log_s == run.log_s] for name, runs in self.by_type.items()}
        return {name: values for name, values in found.items() if values}

    def log_rates(self) -> dict[str, list[float]]:
        """Return the log rates of the runs by type: flop/s if all compute on the same pipe, else bytes/s.

        A pipe's flop/s do not compare with another's: TF32 counts in full where FP32 counted before.
        """
        runs = [run for each in self.by_type.values() for run in each]
        pipes = {run.profile.pipe for run in runs if run.profile.pipe}
        is_flops = self.roofline == "compute" and len(pipes) == 1
        found: defaultdict[str, list[float]] = defaultdict(list)
        for run in runs:
            value = run.log_flops if is_flops else run.log_bytes
            if value == value:
                found[run.gpu_type].append(value)
        return dict(found)


def families_of(runs: Collection[SpeedRun | None]) -> dict[FamilyKey, FamilyRuns]:
    """The runs by family; runs in order of their ends."""
    found: defaultdict[FamilyKey, FamilyRuns] = defaultdict(FamilyRuns)
    for run in runs:
        if run is not None:
            found[run.family].add(run)
    return dict(found)
