"""What a user's past runs say of sharing a GPU: one PackingFamily per job family with ended runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.decisions.packing import NO_BOUND, PackingFamily, PackingRules, decide_packing
from advisor.duration.features import Submission, submissions, submitted_by
from advisor.memory.bound import shared_bounds_mib
from advisor.memory.calibration import Calibration
from advisor.memory.peak_store import NAMELESS, PeakStore, remember_peaks
from advisor.memory.peaks import ENDED_WELL, INFORMATIVE
from advisor.packing.partners import MOST_FAMILIES
from almanac.config import Config
from almanac.mig import profile_name
from telemetry.metrics.data_quality import OK

Floats = npt.NDArray[np.float64]
NEWEST_RUNS = 20
"""Runs of a family that count (almanac's own choice)."""
_FAMILY = ["user", "name_key", "gpu_count"]
_BUSY = 0.01
"""A mean of SM_ACTIVE of 0 on a GPU busier than this is a fault of the counter."""


def rules_of(config: Config) -> PackingRules:
    """The rules that a site has configured; the risk is that of memory bounds."""
    packing, advice = config.packing, config.advice
    return PackingRules(
        risk=advice.risk,
        headroom_mib=advice.headroom_mib,
        context_mib=packing.context_mib,
        min_gain=packing.min_gain,
        min_runs=packing.min_runs,
        min_coverage=packing.min_coverage,
    )


def packing_families(
    history: pd.DataFrame, calibration: Calibration | None, config: Config, now_s: int
) -> list[PackingFamily]:
    """The families of these users at now_s, of each user the newest MOST_FAMILIES. Pure.

    history: all jobs of the users, as load_history(..., running=True) has them. Rows after now_s do not count. Memory
    bounds are laid only for families that nothing else keeps from sharing.
    """
    known = submitted_by(history, now_s, config.advice.history_days)
    runs = _newest_runs(known, now_s - config.advice.history_days * 86_400)
    if runs.empty:
        return []
    slices = {tier.gres for tier in config.tiers if tier.is_slice and tier.gres}
    jobs = submissions(runs)
    rules = rules_of(config)
    found = [
        (_family(runs.iloc[rows], slices), jobs[rows[-1]])
        for rows in runs.groupby(_FAMILY, sort=False).indices.values()
    ]
    bounded = [(family, job) for family, job in found if _lacks_only_bounds(family, rules)]
    peaks = _peaks({family.user for family, _ in bounded}, known, now_s, config) if bounded and calibration else None
    return [
        _with_bounds(family, job, peaks, calibration, config, now_s)
        if peaks is not None and _lacks_only_bounds(family, rules)
        else family
        for family, job in found
    ]


def _newest_runs(known: pd.DataFrame, since_s: int) -> pd.DataFrame:
    """The newest runs of the newest families, oldest end first."""
    is_run = ((known["end_s"] >= since_s) & (known["gpu_count"] >= 1) & ~known["name_key"].isin(NAMELESS)).to_numpy(
        dtype=bool
    )
    runs = known[is_run].sort_values(["end_s", "job_id", "submit_s"], kind="stable")
    ends = runs.groupby(_FAMILY, sort=False)["end_s"].max().sort_values(ascending=False, kind="stable")
    newest = ends[ends.groupby(level="user", sort=False).cumcount() < MOST_FAMILIES]
    keys = pd.MultiIndex.from_frame(runs[_FAMILY])
    chosen = runs[keys.isin(newest.index)]
    return chosen.groupby(_FAMILY, sort=False).tail(NEWEST_RUNS).reset_index(drop=True)


def _family(runs: pd.DataFrame, slices: Collection[str]) -> PackingFamily:
    """runs: of one family, oldest end first."""
    last = runs.iloc[-1]
    models = runs["gpu_model"].astype(object).where(runs["gpu_model"].notna(), "") if "gpu_model" in runs else None
    model = "" if models is None else str(next((name for name in reversed(models.tolist()) if name), ""))
    usable = runs[_is_usable(runs) & (models == model)] if model else runs.iloc[:0]
    capacities = _numbers(runs, "hbm_capacity_mib")
    capacities = capacities[capacities > 0]
    return PackingFamily(
        user=str(last["user"]),
        name_key=str(last["name_key"]),
        gpu_count=int(last["gpu_count"]),
        node_count=_most(_numbers(runs, "node_count")),
        sm=tuple(_sm_active(usable).tolist()),
        dram=tuple(_numbers(usable, "mean_dram_active_frac").tolist()),
        coverage=_coverage(usable),
        is_preallocated=_is_preallocated(runs),
        is_on_mig=_is_on_mig(runs, slices),
        gpu_model=model,
        capacity_mib=float(capacities.min()) if len(capacities) else None,
        newest_s=int(last["end_s"]),
    )


def _is_usable(runs: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Runs that ended well, with counters in order."""
    is_well = runs["state"].fillna("").astype(str).str.startswith(ENDED_WELL) & (runs["verdict"] == OK)
    if "has_profiling_fault" in runs:
        is_well &= ~(runs["has_profiling_fault"] == True)  # noqa: E712 - null is false
    return is_well.to_numpy(dtype=bool)


def _sm_active(runs: pd.DataFrame) -> Floats:
    sm = _numbers(runs, "mean_sm_active_frac")
    busy = _numbers(runs, "mean_gr_engine_active_frac")
    busy = np.where(np.isnan(busy), _numbers(runs, "mean_gpu_util_pct") / 100, busy)
    found: Floats = np.where((sm == 0) & (busy > _BUSY), np.nan, sm)
    return found


def _coverage(runs: pd.DataFrame) -> float:
    """The less covered counter's; a run of unknown coverage counts as not covered. NaN without runs."""
    if runs.empty:
        return math.nan
    names = ("coverage_sm_active_frac", "coverage_dram_active_frac")
    return min(float(np.median(np.nan_to_num(_numbers(runs, name), nan=0.0))) for name in names)


def _is_preallocated(runs: pd.DataFrame) -> bool | None:
    evidence = set(runs["hbm_evidence"].fillna("").astype(str))
    return True if "preallocated" in evidence else False if evidence & set(INFORMATIVE) else None


def _is_on_mig(runs: pd.DataFrame, slices: Collection[str]) -> bool:
    if "mig_profile" in runs and runs["mig_profile"].notna().any():
        return True
    types = set(runs["gpu_type"].fillna("").astype(str))
    return any(name in slices or profile_name(name) is not None for name in types)


def _numbers(runs: pd.DataFrame, name: str) -> Floats:
    """NaN where missing, and all NaN without the column."""
    if name not in runs:
        return np.full(len(runs), np.nan)
    values: Floats = pd.to_numeric(runs[name], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    return values


def _most(counts: Floats) -> int | None:
    return int(counts.max()) if len(counts) and np.isfinite(counts).all() else None


def _lacks_only_bounds(family: PackingFamily, rules: PackingRules) -> bool:
    return decide_packing((family, family), rules).reason == NO_BOUND and family.is_preallocated is False


def _peaks(users: Collection[str], known: pd.DataFrame, now_s: int, config: Config) -> PeakStore:
    return remember_peaks(users, known, now_s, config.advice, config.tiers)


def _with_bounds(
    family: PackingFamily,
    job: Submission,
    peaks: PeakStore,
    calibration: Calibration | None,
    config: Config,
    now_s: int,
) -> PackingFamily:
    evidence = peaks.evidence(dataclasses.replace(job, submit_s=now_s), now_s)
    return dataclasses.replace(family, bounds_mib=shared_bounds_mib(evidence, calibration, config.advice))
