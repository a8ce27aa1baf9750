"""The demand that a layout is planned for: recent jobs of one GPU or slice from the store, and the queue.

A job's shape is the smallest one that holds its measured memory and slows it down by at most MOST_SLOW_DOWN, by the
same rule as the advice (advisor.mig.compute_need). Where its memory or its activity is not known, the shape that it was
given stands for it: unknown is not small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from advisor.decisions.mig_layout import WHOLE, SliceJob
from advisor.memory.peaks import SPIKE_MARGIN
from advisor.mig.compute_need import Activity, activity_of, slow_down
from advisor.mig.states import DEFAULT_SHAPES
from almanac.config import AdviceSection
from almanac.mig import MigModel, Profile
from almanac.slices import SliceShare, slice_share
from almanac.submit_config import Tier
from slurm_hooks.mig.layouts import GresNames
from telemetry.history import load_history_table
from telemetry.slurm.gpu_queue import QueuedGpuJob
from telemetry.store.cluster_store import ClusterStore

COLUMNS = (
    "submit_s", "start_s", "elapsed_s", "gpu_count", "gpu_type", "gpu_type_req", "hbm_peak_mib", "hbm_evidence",
    "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "mean_sm_active_frac", "mean_dram_active_frac", "has_profiling_fault",
)  # fmt: skip
MOST_SLOW_DOWN = 1.5
"""As stated in issue 20: the expected slow-down that a slice may bring."""
UNKNOWN_RUN_S = 3600.0
"""Run time of a waiting job without a time limit, on a site without history."""
SHAPES = tuple(shape for shape in DEFAULT_SHAPES if shape != "7g")
"""What nodes are cut into: a 7g slice is a whole GPU, less what MIG takes."""


@dataclass(frozen=True)
class Demand:
    """jobs: for the decision. types: GPU types that jobs ask for or held lately. past, waiting: numbers of jobs.

    unknown: past jobs whose memory was not measured, so that the shape they had stands for them.
    """

    jobs: tuple[SliceJob, ...]
    types: frozenset[str]
    past: int = 0
    waiting: int = 0
    unknown: int = 0


def read_demand(
    store: ClusterStore,
    queue: Sequence[QueuedGpuJob],
    names: Collection[GresNames],
    advice: AdviceSection,
    days: float,
    now_s: int,
) -> Demand:
    """Raises StoreError."""
    since_s = int(now_s - days * 86_400)
    rows = load_history_table(store, COLUMNS, since_s=since_s).to_pylist()
    return demand_of(rows, queue, names, advice, now_s)


def demand_of(
    rows: Sequence[Mapping[str, Any]], queue: Sequence[QueuedGpuJob], names: Collection[GresNames],
    advice: AdviceSection, now_s: int,
) -> Demand:  # fmt: skip
    """rows: of ended jobs, with COLUMNS. The types count for every job; only jobs of one GPU are planned for."""
    types = {str(row["gpu_type"] or row["gpu_type_req"] or "") for row in rows} | {job.gpu_type for job in queue}
    past = [(row, job) for row in rows if (job := _past(row, names, advice))]
    typical_s = _median([job.run_s for _, job in past])
    live = [each for job in queue if job.gpu_count == 1 for each in _queued(job, names, typical_s, now_s)]
    return Demand(
        jobs=(*(job for _, job in past), *live),
        types=frozenset(types - {""}),
        past=len(past),
        waiting=sum(job.start_s is None for job in live),
        unknown=sum(row["hbm_peak_mib"] is None for row, _ in past),
    )


def _past(row: Mapping[str, Any], names: Collection[GresNames], advice: AdviceSection) -> SliceJob | None:
    """None for a job that no managed node could have run as one slice or GPU."""
    if row["gpu_count"] != 1 or not row["elapsed_s"] or row["start_s"] is None:
        return None
    found = _given(str(row["gpu_type"] or row["gpu_type_req"] or ""), names)
    if found is None:
        return None
    own, ran_on = found
    activity = row_activity(row, own.model, ran_on)
    peak_mib = None if row.get("hbm_evidence") == "unclear" else row["hbm_peak_mib"]
    shape = smallest_shape(own.model, ran_on, peak_mib, activity, advice)
    return SliceJob(
        shape, row["submit_s"], float(row["elapsed_s"]), int(row["start_s"]), ran_on=ran_on,
        compute=busy_slices(own.model, shape, activity), model=own.model.name,
    )  # fmt: skip


def _given(gres_type: str, names: Collection[GresNames]) -> tuple[GresNames, str] | None:
    """The model and the shape of a GRES type; None where it is not of the managed nodes, or not known."""
    for each in names:
        if shape := each.shape_of(gres_type):
            return each, shape
    return None


def row_activity(row: Mapping[str, Any], model: MigModel, ran_on: str) -> Activity | None:
    """What a past job did with its GPU, as shares of a whole one; None where that is not known."""
    sm, dram, engine = (_number(row.get(f"mean_{name}_active_frac")) for name in ("sm", "dram", "gr_engine"))
    busy = _number(row.get("mean_gpu_util_pct")) / 100 if math.isnan(engine) else engine
    profile = None if ran_on == WHOLE else model.profile(ran_on)
    tier = None if profile is None else _tier(model, profile)
    return activity_of(sm, dram, busy, model.name, tier, bool(row.get("has_profiling_fault")))


def busy_slices(model: MigModel, shape: str, activity: Activity | None) -> float | None:
    """Compute slices that a job keeps busy: it runs as much longer on its shape as the work is more than that has."""
    if activity is None:
        return None
    profile = None if shape == WHOLE else model.profile(shape)
    if profile is None:
        return max(activity.sm, activity.dram) * model.compute_slices
    return slow_down(activity, _share(model, profile)) * profile.compute


def smallest_shape(
    model: MigModel, ran_on: str, peak_mib: float | None, activity: Activity | None, advice: AdviceSection
) -> str:
    """The smallest shape that holds a peak and slows the job down by at most MOST_SLOW_DOWN; else the one it had."""
    if peak_mib is None or activity is None or math.isnan(peak_mib):
        return ran_on
    most = model.whole if ran_on == WHOLE else model.profile(ran_on)
    for profile in model.profiles:
        if profile.shape not in SHAPES or profile.memory_gib is None or most is None:
            continue
        holds = peak_mib * (1 + SPIKE_MARGIN) + advice.headroom_mib <= profile.memory_gib[0] * 1024
        if not holds or profile.compute > most.compute:
            continue
        if slow_down(activity, _share(model, profile)) <= MOST_SLOW_DOWN:
            return profile.shape
    return ran_on


def _number(value: object) -> float:
    """NaN for what is missing."""
    return float(value) if isinstance(value, int | float) else math.nan


@cache
def _share(model: MigModel, profile: Profile) -> SliceShare:
    share = slice_share(_tier(model, profile), model.name)
    assert share is not None, "a profile of the model"
    return share


@cache
def _tier(model: MigModel, profile: Profile) -> Tier:
    return Tier(gres=profile.name, gpu_model=model.name)


def _queued(job: QueuedGpuJob, names: Collection[GresNames], typical_s: float, now_s: int) -> list[SliceJob]:
    """A job without a type is a whole GPU's: that is the careful guess."""
    found = _given(job.gpu_type, names) if job.gpu_type else next(((each, WHOLE) for each in names), None)
    if found is None or (job.is_pending and job.is_held and job.reason != "BadConstraints"):
        return []
    run_s = min(typical_s, job.time_limit_s or math.inf)
    if job.start_s is not None:
        run_s = max(run_s, now_s - job.start_s + 60.0)
    node = job.nodes if job.start_s is not None else None
    one = SliceJob(found[1], job.submit_s, run_s, job.start_s, node=node, model=found[0].model.name)
    return [one] * min(job.count, 10_000)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else UNKNOWN_RUN_S
