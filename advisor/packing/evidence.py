"""The evidence of a user's past runs for sharing a GPU, one PackingFamily per job family, and the advice from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.artefacts import load
from advisor.duration.features import SubmittedJob, is_packed, submissions, submitted_by, texts_of
from advisor.memory.calibration import Calibration
from advisor.memory.decide import shared_bounds_mib
from advisor.memory.peak_store import PeakStore, remember_peaks
from advisor.memory.runs import INFORMATIVE
from advisor.packing.decide import (
    MOST_FAMILIES,
    NO_BOUND,
    PackingAdvice,
    PackingFamily,
    PackingRules,
    decide_packing,
    packing_alone,
)
from almanac.config import Config, Tier
from almanac.hardware import profile_name
from almanac.names import SCRIPT_PREFIX, is_family
from almanac.records import Advice, JobRequest
from almanac.tiers import names_any_tier, requested_tier
from almanac.units import DAY_S
from slurm.states import ENDED_WELL
from telemetry.history import load_history
from telemetry.metrics.data_quality import OK
from telemetry.site import Site

if TYPE_CHECKING:
    from advisor.service import Trained

Floats = npt.NDArray[np.float64]
Run = tuple[int, int]
"""job_id and submit_s."""
PACKED = "almanac-pack"
"""Begin of the names of jobs that are almanac-pack itself: their GPUs are shared already, marked as such or not."""
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
    """The texts of a column, "" for missing ones and without the column."""
    return texts_of(runs[name]) if name in runs else [""] * len(runs)


def _numbers(runs: pd.DataFrame, name: str) -> Floats:
    """The numbers of a column, NaN for missing ones and without the column."""
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
    job: SubmittedJob,
    peaks: PeakStore,
    calibration: Calibration | None,
    config: Config,
    now_s: int,
) -> PackingFamily:
    evidence = peaks.evidence(dataclasses.replace(job, submit_s=now_s), now_s)
    return dataclasses.replace(family, bounds_mib=shared_bounds_mib(evidence, calibration, config.advice))


RECENT_S = 14 * DAY_S
"""A partner's newest run ended at most so long ago: an older family may never be submitted again."""


@dataclass(frozen=True)
class PackingFinding:
    """Advice for a submission. alone: runs of its own family; best: what to show, `alone` or with another family."""

    alone: PackingAdvice
    best: PackingAdvice


def packing_of_request(
    request: JobRequest,
    families: Sequence[PackingFamily],
    rules: PackingRules,
    tiers: Sequence[Tier],
    now_s: int,
    advised_tier: str | None = None,
) -> PackingFinding | None:
    """Packing advice for a submission; None without an ended run of this user, name, and GPU count. Pure.

    An array shares with itself if it can; any other submission with the partner that promises the most work.
    advised_tier: name of the memory tier that the same submission is advised to ask for; the jobs must fit there, too.
    """
    key = request.user, request.name_key, request.gpu_count
    own = next((family for family in families if family.key == key), None)
    if own is None:
        return None
    own = asked_family(own, request, tiers, advised_tier)
    alone = packing_alone(own, rules)
    if alone.is_advised and request.is_array:
        return PackingFinding(alone, alone)
    others = [
        decide_packing((own, each), rules)
        for each in families
        if each.key != key and each.user == request.user and now_s - each.newest_s <= RECENT_S
    ]
    found = [advice for advice in (alone, *others) if advice.is_advised and advice.gain is not None]
    best = max(found, key=lambda advice: advice.gain.low if advice.gain else 0.0, default=alone)
    return PackingFinding(alone, best)


def asked_family(
    family: PackingFamily, request: JobRequest, tiers: Sequence[Tier], advised_tier: str | None = None
) -> PackingFamily:
    """The family with what this submission asks for: its nodes, and the least memory of the GPUs that it may get.

    A submission that names a choice of tiers may get each one, and so may one that names none and is advised none. The
    memory is unknown where a GPU may be of another model than in the family's runs.
    """
    own = requested_tier(request, tiers)
    is_same_type = request.gpu_type != "" and request.gpu_type == family.gpu_type
    whole = [tier for tier in tiers if not tier.is_slice and (not is_same_type or _is_like(tier, family))]
    asked = [tier for tier in tiers if tier is own or tier.name == advised_tier]
    if own is None and (not asked or names_any_tier(request, tiers)):
        asked += whole
    is_other = bool(request.gpu_type) and own is None and not is_same_type
    is_known = family.capacity_mib is not None and not is_other and all(_is_like(tier, family) for tier in asked)
    capacities = [family.capacity_mib or 0.0, *(float(tier.capacity_mib) for tier in asked)]
    is_slice = profile_name(request.gpu_type) is not None or any(tier.is_slice for tier in asked)
    nodes = None if request.may_use_more or family.node_count is None else max(request.node_count, family.node_count)
    return replace(
        family,
        node_count=nodes,
        capacity_mib=min(capacities) if is_known else None,
        is_on_mig=family.is_on_mig or is_slice,
    )


def _is_like(tier: Tier, family: PackingFamily) -> bool:
    """Return True if the tier's GPUs are those of the family's runs, or with other memory: A100-40 and A100-80.

    A tier without a GPU model is taken at its GRES type; one that names neither passes.
    """
    if tier.gpu_model and family.gpu_model:
        return tier.gpu_model.partition("-")[0] == family.gpu_model.partition("-")[0]
    return not tier.gres or not family.gpu_type or tier.gres == family.gpu_type


def stored_packing(site: Site, advice: Advice) -> PackingFinding | None:
    """Return `packing_of_request` from the user's jobs in the store; None without a model. Raises StoreError."""
    trained, request, config, now_s = load(site.store.models_dir), advice.request, site.config, site.now_s()
    if trained is None:
        return None
    history = load_history(site.store, user=request.user, running=True)
    families = packing_families(history, trained.calibration, config, now_s)
    return packing_of_request(request, families, rules_of(config), config.tiers, now_s, advice.tier.tier)


def packing_by_run(
    advices: Mapping[Run, Advice], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> dict[Run, PackingAdvice]:
    """Map jobs of one GPU that can share it to their advice. A task of almanac-pack has one GPU.

    history: all jobs of the users, as load_history(..., running=True) has them.
    """
    asked = {run: advice for run, advice in advices.items() if advice.request.gpu_count == 1}
    if trained is None or not asked or not config.packing.advise:
        return {}
    rules, known = rules_of(config), dict[tuple[JobRequest, str | None], PackingAdvice | None]()
    families = packing_families(history[history["gpu_count"] == 1], trained.calibration, config, now_s)
    found = {}
    for run, advice in asked.items():
        # The tasks of an array ask for the same.
        request = replace(advice.request, job_name=advice.request.name_key, submit_s=0, script_key="", rule="")
        key = replace(request, time_limit_s=None), advice.tier.tier
        if key not in known:
            each = packing_of_request(key[0], families, rules, config.tiers, now_s, key[1])
            known[key] = each.best if each and each.best.is_advised else None
        best = known[key]
        if best is not None:
            found[run] = best
    return found
