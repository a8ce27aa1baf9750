"""What past runs say of speed: run times of completed runs, and achieved rates, also of runs that timed out."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd

from advisor.duration.features import is_packed, texts_of
from advisor.speed.gpu_types import GpuTypes
from advisor.speed.specifications import RunProfile
from almanac.names import is_family
from telemetry.history import load_history_table
from telemetry.metrics.catalogue import PIPES
from telemetry.metrics.data_quality import OK
from telemetry.store.cluster_store import ClusterStore

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
RATED = ("COMPLETED", "TIMEOUT", "PREEMPTED", "CANCELLED")
"""States of runs whose rates count. Only COMPLETED runs have a run time."""


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
    if text["verdict"] != OK or text["state"] not in RATED or has_fault:
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
        """When the newest run ended."""
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
        """Of completed runs, by type; a type without any is not there."""
        found = {name: [run.log_s for run in runs if run.log_s == run.log_s] for name, runs in self.by_type.items()}
        return {name: values for name, values in found.items() if values}

    def log_rates(self) -> dict[str, list[float]]:
        """Of the runs of one measure, by type: flop/s if they compute on one and the same pipe, else bytes/s.

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
