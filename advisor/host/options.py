"""Advise --mem and --cpus-per-task by a job family's past runs, as advisor/memory advises a tier of GPU memory.

Host memory and CPUs are two more columns for that engine: `Resource.frame` puts a column where the engine reads GPU
memory, and the sizes that can be asked for take the place of tiers. Two months of Mason's jobs exceeded the advised
memory in 1.2% of the runs at a stated risk of 1%, and 1.5 times the last run's peak in 11%. The same engine on run
times exceeded its bound in 4% to 20% of the runs at a stated 1%, so --time gets no such advice.

Only jobs on one node count: accounting does not say how tasks share several nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.duration.features import submissions, submitted_by
from advisor.memory.calibration import Calibration
from advisor.memory.decide import bound_of, calibrate
from advisor.memory.peak_store import remember_peaks
from almanac.config import AdviceSection, Tier
from almanac.records import HostOption, MemoryBound

Run = tuple[int, int]
"""A run of a job: job id and submit time."""
MARGIN = 1.5
"""An advised size is at least this many times the highest need on record: a wider bound costs little here."""
WORTH = 0.75
"""Advised sizes are at most this share of what a job has; a smaller change is not worth one."""
MIN_ELAPSED_S = 180
"""A shorter run says little: Slurm samples memory every 30 s by default."""
ONE_TASK = 0.9
"""Share of a job's memory that its largest task has if the rest is the batch script's shell."""
MAX_JOBS = 100_000
"""Newest jobs that a calibration learns from: about 20 s for each resource."""
_GIB = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CPUS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)


@dataclass(frozen=True)
class Resource:
    """A resource of a node. sizes: those to ask for. given, need: columns from a history frame; NaN if not known."""

    name: str
    sizes: tuple[int, ...]
    option: Callable[[int], str]
    given: Callable[[pd.DataFrame], pd.Series[float]]
    need: Callable[[pd.DataFrame], pd.Series[float]]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(Tier(str(size), size, "", constraint=str(size)) for size in self.sizes)

    def frame(self, history: pd.DataFrame) -> pd.DataFrame:
        """The history frame with this resource where the engine reads GPU memory.

        A run that ended well was not cut off, however near its peak came to what it was given. One that ran out of
        memory needed at least that much, whatever the last sample showed.
        """
        need, given = self.need(history), self.given(history)
        is_known = (history["node_count"] == 1) & (need > 0) & (history["elapsed_s"] >= MIN_ELAPSED_S)
        is_cut = history["state"].isin(["OUT_OF_MEMORY"]) & (history["node_count"] == 1) & (given > 0)
        need = need.where(~is_cut, pd.concat([need, given], axis=1).max(axis=1))
        is_known |= is_cut
        capacity = given.where(
            history["state"].isin(["FAILED", "OUT_OF_MEMORY"]), pd.concat([given, MARGIN * need], axis=1).max(axis=1)
        )
        return history.assign(
            hbm_peak_mib=need.where(is_known),
            hbm_max_mib=need.where(is_known),
            hbm_capacity_mib=capacity,
            hbm_evidence=np.where(is_known, "telemetry", "none"),
            verdict="ok",
            tier=None,
        )

    def size_for(self, bound: MemoryBound) -> int | None:
        """The smallest size that holds the bound, and the highest need with MARGIN."""
        least = max(bound.tier_mib, MARGIN * bound.highest_mib)
        return next((size for size in self.sizes if size >= least), None)


def _column(name: str) -> Callable[[pd.DataFrame], pd.Series[float]]:
    return lambda history: history[name].astype("float64")


def _busy_cpus(history: pd.DataFrame) -> pd.Series[float]:
    """CPUs that a job of one task kept busy on average; NaN for several tasks, which have --cpus-per-task each."""
    is_one_task = history["host_mem_task_peak_mib"] >= ONE_TASK * history["host_mem_peak_mib"]
    busy = history["cpu_time_s"].astype("float64") / history["elapsed_s"].astype("float64")
    return busy.where(is_one_task & (history["elapsed_s"] > 0))


RESOURCES = (
    Resource(
        "memory",
        tuple(gib * 1024 for gib in _GIB),
        lambda mib: f"--mem={mib // 1024}G",
        _column("host_mem_alloc_mib"),
        _column("host_mem_peak_mib"),
    ),
    Resource("cpus", _CPUS, lambda cpus: f"--cpus-per-task={cpus}", _column("cpu_count"), _busy_cpus),
)


def learn_host(history: pd.DataFrame, config: AdviceSection, now_s: int) -> dict[str, Calibration]:
    """The calibration of each resource, by its name, from load_host_history as it was at now_s."""
    known = submitted_by(history, now_s, config.history_days).iloc[-MAX_JOBS:].reset_index(drop=True)
    advice = _without_headroom(config)
    return {each.name: calibrate(each.frame(known), advice, each.tiers) for each in RESOURCES}


def _without_headroom(config: AdviceSection) -> AdviceSection:
    return dataclasses.replace(config, headroom_mib=0)


def advise_host(
    history: pd.DataFrame,
    runs: Collection[Run],
    calibrations: Mapping[str, Calibration],
    config: AdviceSection,
    now_s: int,
) -> dict[Run, tuple[HostOption, ...]]:
    """Options for the next submission like each of these runs; none where the evidence supports none. Pure.

    history: load_host_history of their users.
    """
    advice = _without_headroom(config)
    keys = list(zip(history["job_id"].tolist(), history["submit_s"].tolist(), strict=True))
    chosen = [place for place, key in enumerate(keys) if key in runs]
    wanted = history.iloc[chosen]
    known = submitted_by(history, now_s, config.history_days)
    jobs = [dataclasses.replace(job, submit_s=now_s, is_array=False) for job in submissions(wanted.assign(tier=None))]
    found: dict[Run, tuple[HostOption, ...]] = {keys[place]: () for place in chosen}
    for resource in RESOURCES:
        peaks = remember_peaks({job.user for job in jobs}, resource.frame(known), now_s, advice)
        given = resource.given(wanted).tolist()
        for place, job, has in zip(chosen, jobs, given, strict=True):
            bound = bound_of(peaks.evidence(job, now_s), calibrations.get(resource.name), advice).bound
            option = _option(resource, bound, has) if bound is not None and job.node_count == 1 else None
            found[keys[place]] += () if option is None else (option,)
    return found


def _option(resource: Resource, bound: MemoryBound, given: float) -> HostOption | None:
    """The option to change; None if what the job has fits, or is not known."""
    size = resource.size_for(bound)
    if size is None or math.isnan(given) or given <= 0:
        return None
    is_larger = bound.highest_mib > given
    if not is_larger and size > WORTH * given:
        return None
    return HostOption(
        resource.name, resource.option(size), float(size), given, bound.highest_mib, bound.runs, bound.risk
    )
