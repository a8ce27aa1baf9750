"""What a user's past runs say of sharing a GPU: one PackingFamily per job family with ended runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.decisions.packing import NO_BOUND, PackingFamily, PackingRules, decide_packing
from advisor.duration.features import Submission, is_packed, submissions, submitted_by, texts_of
from advisor.memory.bound import shared_bounds_mib
from advisor.memory.calibration import Calibration
from advisor.memory.peak_store import PeakStore, remember_peaks
from advisor.memory.peaks import ENDED_WELL, INFORMATIVE
from advisor.packing.partners import MOST_FAMILIES
from almanac.config import Config
from almanac.mig import profile_name
from almanac.names import SCRIPT_PREFIX, is_family
from telemetry.metrics.data_quality import OK

Floats = npt.NDArray[np.float64]
PACKED = "almanac-pack"
"""How the name of a job begins that is almanac-pack itself: its GPUs are shared already, marked as such or not."""
NEWEST_RUNS = 20
"""Runs of a family that count (almanac's own choice)."""
_FAMILY = ["user", "name_key", "gpu_count"]
_BUSY = 0.01
"""A mean of 0 is a fault of the counter where the GPU is busier than this, or not known to be idle."""


def rules_of(config: Config) -> PackingRules:
    """The rules that a site has configured; the risk is that of memory bounds."""
    return PackingRules(risk=config.advice.risk, headroom_mib=config.advice.headroom_mib)


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
    jobs = submissions(runs)
    rules = rules_of(config)
    columns = _columns_of(runs, {tier.gres for tier in config.tiers if tier.is_slice and tier.gres})
    groups = runs.groupby(_FAMILY, sort=False).indices.values()
    found = [(_family(columns, np.asarray(rows), rules), jobs[int(rows[-1])]) for rows in groups]
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
    names = known["name_key"]
    is_named = (
        names.map(is_family).astype(bool)
        & ~names.str.startswith((PACKED, SCRIPT_PREFIX))
        & known["user"].fillna("").ne("")
    )
    is_run = ((known["end_s"] >= since_s) & (known["gpu_count"] >= 1) & is_named).to_numpy(dtype=bool)
    runs = known[is_run & ~is_packed(known)].sort_values(["end_s", "job_id", "submit_s"], kind="stable")
    ends = runs.groupby(_FAMILY, sort=False)["end_s"].max().sort_values(ascending=False, kind="stable")
    newest = ends[ends.groupby(level="user", sort=False).cumcount() < MOST_FAMILIES]
    keys = pd.MultiIndex.from_frame(runs[_FAMILY])
    chosen = runs[keys.isin(newest.index)]
    return chosen.groupby(_FAMILY, sort=False).tail(NEWEST_RUNS).reset_index(drop=True)


@dataclass(frozen=True)
class _Columns:
    """The runs column by column: a family picks its rows, which pandas would take milliseconds for."""

    user: list[str]
    name_key: list[str]
    gpu_model: list[str]
    gpu_type: list[str]
    evidence: list[str]
    gpu_count: Floats
    node_count: Floats
    end_s: Floats
    sm: Floats
    dram: Floats
    coverage: Floats
    capacity_mib: Floats
    is_usable: npt.NDArray[np.bool_]
    is_on_mig: npt.NDArray[np.bool_]


def _columns_of(runs: pd.DataFrame, slices: Collection[str]) -> _Columns:
    sm, dram = _means(runs)
    coverage = np.minimum(_numbers(runs, "coverage_sm_active_frac"), _numbers(runs, "coverage_dram_active_frac"))
    return _Columns(
        user=_texts(runs, "user"),
        name_key=_texts(runs, "name_key"),
        gpu_model=_texts(runs, "gpu_model"),
        gpu_type=_texts(runs, "gpu_type"),
        evidence=_texts(runs, "hbm_evidence"),
        gpu_count=_numbers(runs, "gpu_count"),
        node_count=_numbers(runs, "node_count"),
        end_s=_numbers(runs, "end_s"),
        sm=sm,
        dram=dram,
        coverage=np.nan_to_num(coverage, nan=0.0),  # a run of unknown coverage counts as not covered
        capacity_mib=_numbers(runs, "hbm_capacity_mib"),
        is_usable=_is_usable(runs),
        is_on_mig=_is_on_mig(runs, slices),
    )


def _family(columns: _Columns, rows: npt.NDArray[np.intp], rules: PackingRules) -> PackingFamily:
    """rows: of one family, oldest end first."""
    last = int(rows[-1])
    models = [columns.gpu_model[row] for row in rows.tolist()]
    model = next((name for name in reversed(models) if name), "")
    usable = rows[columns.is_usable[rows] & np.array([name == model != "" for name in models], dtype=bool)]
    capacities = columns.capacity_mib[rows]
    capacities = capacities[np.isfinite(capacities) & (capacities > 0)]
    nodes = columns.node_count[rows]
    evidence = {columns.evidence[row] for row in rows.tolist()}
    covered = usable[columns.coverage[usable] >= rules.min_coverage]
    return PackingFamily(
        user=columns.user[last],
        name_key=columns.name_key[last],
        gpu_count=int(columns.gpu_count[last]),
        node_count=int(nodes.max()) if np.isfinite(nodes).all() else None,
        sm=tuple(columns.sm[covered].tolist()),
        dram=tuple(columns.dram[covered].tolist()),
        coverage=float(np.median(columns.coverage[covered if len(covered) else usable])) if len(usable) else math.nan,
        is_preallocated=_is_preallocated(evidence, {columns.evidence[row] for row in usable.tolist()}),
        is_on_mig=bool(columns.is_on_mig[rows].any()),
        gpu_model=model,
        gpu_type=next((name for row in usable[::-1].tolist() if (name := columns.gpu_type[row])), ""),
        capacity_mib=float(capacities.min()) if len(capacities) else None,
        newest_s=int(columns.end_s[last]),
    )


def _is_preallocated(of_all: Collection[str], of_usable: Collection[str]) -> bool | None:
    """Return True if a run reserved its peak, False if every usable run shows its need, and None otherwise."""
    if "preallocated" in of_all:
        return True
    is_told = "unclear" not in of_all and bool(of_usable) and set(of_usable) <= set(INFORMATIVE)
    return False if is_told else None


def _is_usable(runs: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Runs that ended well, with counters in order."""
    is_well = runs["state"].fillna("").astype(str).str.startswith(ENDED_WELL) & (runs["verdict"] == OK)
    if "has_profiling_fault" in runs:
        is_well &= ~(runs["has_profiling_fault"] == True)  # noqa: E712 - null is false
    return is_well.to_numpy(dtype=bool)


def _means(runs: pd.DataFrame) -> tuple[Floats, Floats]:
    """Of SM_ACTIVE and DRAM_ACTIVE; NaN for a zero that no other counter bears out."""
    sm, dram = _numbers(runs, "mean_sm_active_frac"), _numbers(runs, "mean_dram_active_frac")
    busy = _numbers(runs, "mean_gr_engine_active_frac")
    busy = np.where(np.isnan(busy), _numbers(runs, "mean_gpu_util_pct") / 100, busy)
    return (
        np.where((sm == 0) & ~(busy <= _BUSY), np.nan, sm),
        np.where((dram == 0) & ~(sm <= _BUSY), np.nan, dram),
    )


def _is_on_mig(runs: pd.DataFrame, slices: Collection[str]) -> npt.NDArray[np.bool_]:
    """By what telemetry saw, or by the GRES type that the job was given."""
    types = _texts(runs, "gpu_type")
    is_type = {name: name in slices or profile_name(name) is not None for name in set(types)}
    profiles = _texts(runs, "mig_profile")
    return np.array([bool(profile) or is_type[name] for profile, name in zip(profiles, types, strict=True)], dtype=bool)


def _texts(runs: pd.DataFrame, name: str) -> list[str]:
    """ "" where missing, and without the column."""
    return texts_of(runs[name]) if name in runs else [""] * len(runs)


def _numbers(runs: pd.DataFrame, name: str) -> Floats:
    """NaN where missing, and all NaN without the column."""
    if name not in runs:
        return np.full(len(runs), np.nan)
    values: Floats = pd.to_numeric(runs[name], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    return values


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
