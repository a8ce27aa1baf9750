"""Read the memory that each past run needed, or the reason that it shows nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from advisor.duration.features import is_packed, texts_of
from advisor.memory.reservations import EARLY, LEAST_SHARE, OWN, RESERVED, UNCLEAR, HeldShares
from advisor.mig.compute_need import Activity, activity_of
from almanac.config import AdviceSection, Tier
from almanac.hardware import NEAR, shares_host_memory
from slurm.states import ENDED_WELL, NODE_FAILED
from telemetry.metrics.data_quality import CONTEXT_MIB, FLAT_SHARE, NO_TELEMETRY, OK, SHORT, is_reserved_share

INFORMATIVE = ("telemetry", "jobstats", "sacct")
_COUNTERS = ("mean_sm_active_frac", "mean_dram_active_frac")
_ACTIVITY = (
    *_COUNTERS,
    "mean_gr_engine_active_frac",
    "mean_gpu_util_pct",
    "has_profiling_fault",
    "gpu_model",
    "gpu_type",
)
PREALLOCATED = "preallocated memory"
MAYBE_PREALLOCATED, OF_NODE = "possibly preallocated memory", "failed by its node"
SHARED = "memory shared with the host"
"""Such a peak may be the host's, so it is no more than a least need."""
SIZELESS = "GPU memory size unknown"
"""Such a peak may have been cut off, so it is no more than a least need."""
FAILED_EARLY = "failed before its end"
PACKED = "packed"
"""Its figures are those of several tasks on each GPU (almanac-pack)."""
ENDED_EARLY = "ended early"
"""Before its framework had reserved the memory that the family's other runs reserve."""
SPIKE_MARGIN = 0.02
"""Share by which the true peak may exceed the highest sample: allocators grow in small steps."""
CENSORED_SHARE = 0.97
"""Share of the capacity above which a peak may be cut off: the driver and contexts hold the rest."""
FAILED_SHARE = 0.9
"""The same for a failed job: the request that did not fit was never sampled."""
CLEARLY_LOWER = 0.05
"""Of the capacity, by which a peak must be below a reservation to show that a run reserved nothing."""
_SET = {UNCLEAR: MAYBE_PREALLOCATED, RESERVED: PREALLOCATED, EARLY: ENDED_EARLY}
VARIED_RUNS = 3
"""Flat runs in a row at one share that make a reservation, where the family showed use or another share before."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One ended run of a job.

    peak_mib: as measured; NaN if that tells nothing. need_mib: the least HBM that the run can have needed, with the
    margin for spikes; NaN likewise. is_censored: it may have needed more. is_oom: it seems to have died of that.
    is_failed: it failed, so that its peak is no more than a least need. is_known: it says what the family needs, if
    only "at least the capacity". capacity_mib: of the GPUs it ran on; infinite if unknown. submit_s, end_s: s since
    1970. why_not: in a word, the reason that the run is no evidence, else "". is_flat: the peak could be a reservation.
    activity: of the GPU of a run on one GPU that ended well; None if unknown.
    """

    peak_mib: float
    need_mib: float
    is_censored: bool
    is_oom: bool
    is_failed: bool
    capacity_mib: float
    submit_s: int
    end_s: int
    why_not: str = ""
    is_known: bool = False
    is_flat: bool = False
    activity: Activity | None = None


def runs_of(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> list[MeasuredRun | None]:
    """One per row of the history frame, in its order; None for a job that has not ended.

    Whether a flat peak is a reservation depends on the family's runs that had ended before.
    """
    capacities = {tier.name: float(tier.capacity_mib) for tier in tiers}
    verdicts = texts_of(history["verdict"]) if "verdict" in history else [""] * len(history)
    asked = [capacities.get(tier, math.inf) if isinstance(tier, str) else math.inf for tier in history["tier"]]
    numbers = [history[name].astype("float64").tolist() for name in ("hbm_peak_mib", "hbm_capacity_mib", "hbm_max_mib")]
    texts = [texts_of(history[name]) for name in ("hbm_evidence", "state")]
    times = [history[name].astype("float64").tolist() for name in ("submit_s", "end_s")]
    flat = history["is_flat"].tolist() if "is_flat" in history else [None] * len(history)
    columns: list[list[Any]] = [*numbers, *texts, verdicts, *times, flat]
    users, keys = (texts_of(history[name]) for name in ("user", "name_key"))
    sizes = sorted(set(capacities.values()))
    families: defaultdict[tuple[str, str], _Use] = defaultdict(_Use)
    runs: list[MeasuredRun | None] = [None] * len(history)
    activities = _activities(history, tiers)
    packed = is_packed(history).tolist()
    models = texts_of(history["gpu_model"]) if "gpu_model" in history else [""] * len(history)
    for row in np.lexsort((history["submit_s"].to_numpy(), history["job_id"].to_numpy(), np.array(times[1]))).tolist():
        record = _FamilyRecord(*[column[row] for column in columns])
        if record.evidence != "none" and shares_host_memory(models[row]):
            record = record._replace(evidence=SHARED)
        if not math.isnan(record.end_s):
            capacity_mib = record.capacity_mib if record.capacity_mib > 0 else asked[row]
            if packed[row]:
                runs[row] = _packed(record, capacity_mib)
                continue
            run = families[users[row], keys[row]].read(record, capacity_mib, config)
            run = dataclasses.replace(run, capacity_mib=_tier_size(run.capacity_mib, sizes))
            activity = activities.get(row) if not run.is_failed else None
            runs[row] = run if activity is None else dataclasses.replace(run, activity=activity)
    return runs


def _tier_size(capacity_mib: float, sizes: Sequence[float]) -> float:
    """The memory of the tier that a measured capacity is of: two GPUs of one size never measure quite the same."""
    nearest = min(sizes, key=lambda size: abs(capacity_mib - size), default=math.inf)
    return nearest if abs(capacity_mib - nearest) <= NEAR * nearest < math.inf else capacity_mib


def _packed(record: _FamilyRecord, capacity_mib: float) -> MeasuredRun:
    times = int(record.submit_s), int(record.end_s)
    return MeasuredRun(math.nan, math.nan, False, False, False, capacity_mib, *times, PACKED)


def _activities(history: pd.DataFrame, tiers: Sequence[Tier]) -> dict[int, Activity]:
    """By place in the frame, of jobs on one GPU whose data are in order. Without the counters there are none."""
    if not set(_ACTIVITY) <= set(history.columns):
        return {}
    rows = history["mean_sm_active_frac"].notna() & (history["gpu_count"] == 1)
    if "verdict" in history:
        rows &= history["verdict"] == OK
    places = np.flatnonzero(rows.to_numpy(dtype=bool))
    chosen = history.iloc[places]
    by_name, by_type = {tier.name: tier for tier in tiers}, {tier.gres: tier for tier in tiers if tier.gres}
    means = [chosen[name].astype("float64").tolist() for name in _COUNTERS]
    busy = chosen["mean_gr_engine_active_frac"].fillna(chosen["mean_gpu_util_pct"] / 100).astype("float64").tolist()
    faults = (chosen["has_profiling_fault"] == True).tolist()  # noqa: E712 - null is false
    texts = [texts_of(chosen[name]) for name in ("gpu_model", "gpu_type", "tier")]
    found = {}
    for place, sm, dram, used, fault, model, gpu_type, asked in zip(
        places.tolist(), *means, busy, faults, *texts, strict=True
    ):
        tier = by_type.get(gpu_type) or (Tier(gres=gpu_type) if gpu_type else by_name.get(asked))
        name = model or (tier.gpu_model if tier else "")
        activity = activity_of(sm, dram, used, name, tier if tier and tier.is_slice else None, fault)
        if activity is not None:
            found[place] = activity
    return found


class _FamilyRecord(NamedTuple):
    """The columns of the history frame that a run is read from."""

    peak_mib: float
    capacity_mib: float
    highest_mib: float
    evidence: str
    state: str
    verdict: str
    submit_s: float
    end_s: float
    is_flat: bool | None


@dataclass
class _Use:
    """Track whether the flat peaks of a family are reservations or its own use.

    flat_frac: share of the capacity that the newest flat run which ended well held; None before the first one.
    flat_runs: number of newest flat runs at this share. needed: flat runs at one share that make a reservation.
    shows_use: a run that completed has since peaked clearly lower, so that the program does not reserve memory.
    held: for the shares that no framework reserves by itself.
    """

    flat_frac: float | None = None
    flat_runs: int = 0
    needed: int = 1
    shows_use: bool = False
    held: HeldShares = field(default_factory=HeldShares)

    def read(self, record: _FamilyRecord, capacity_mib: float, config: AdviceSection) -> MeasuredRun:
        is_failed = not record.state.startswith(ENDED_WELL)
        peak_mib, is_flat = record.peak_mib, record.evidence == "preallocated"
        if record.evidence == "sacct":  # the sum of processes, without what the driver and servers hold
            peak_mib += CONTEXT_MIB
        is_measured = record.evidence in INFORMATIVE and 0 < peak_mib < math.inf
        times = int(record.submit_s), int(record.end_s)
        if record.state in NODE_FAILED:
            return MeasuredRun(math.nan, math.nan, False, False, False, capacity_mib, *times, OF_NODE)
        why_not = ""
        if not is_measured and self._is_need(record, capacity_mib, is_failed, config):
            peak_mib, is_measured = record.highest_mib, True
        elif is_measured and not is_failed and self._is_lower(peak_mib, capacity_mib):
            why_not = self._see_lower(record.state)
        elif is_flat and not is_failed:
            self.shows_use = False
        if is_flat and not is_failed:
            self._see_flat(record.highest_mib / capacity_mib, is_measured)
        if not is_measured or why_not:
            verdict = record.verdict if record.verdict != OK else ""
            why_not = why_not or (PREALLOCATED if is_flat else verdict or NO_TELEMETRY)
            if not is_measured and not is_flat and record.evidence != "none" and peak_mib != 0:
                least_mib = float(np.fmax(peak_mib, record.highest_mib)) * (1 + SPIKE_MARGIN)
                why_not = SHARED if record.evidence == SHARED else MAYBE_PREALLOCATED
                return MeasuredRun(math.nan, least_mib, False, False, is_failed, capacity_mib, *times, why_not)
            return MeasuredRun(math.nan, math.nan, False, False, is_failed, capacity_mib, *times, why_not)
        found, is_known_size = self._set_by_user(record, capacity_mib, is_failed), math.isfinite(capacity_mib)
        if found in _SET:
            least_mib = peak_mib * (1 + SPIKE_MARGIN) if found == UNCLEAR else math.nan
            why_not = _SET[found]
            return MeasuredRun(
                math.nan, least_mib, False, False, is_failed, capacity_mib, *times, why_not, is_flat=found == UNCLEAR
            )
        may_be_set = is_known_size and record.is_flat is not False and peak_mib >= LEAST_SHARE * capacity_mib
        return _measured(peak_mib, capacity_mib, is_failed, is_flat or may_be_set, times, config)

    def _set_by_user(self, record: _FamilyRecord, capacity_mib: float, is_failed: bool) -> str:
        """Return what the peak of a measured run is (reservations.py), if it can be a share that the user set."""
        if record.evidence not in INFORMATIVE or record.evidence == "sacct" or not math.isfinite(capacity_mib):
            return OWN
        if is_reserved_share(record.peak_mib / capacity_mib, capacity_mib):
            return OWN  # a flat one is marked already
        if is_failed:
            return RESERVED if self.held.holds(record.peak_mib, capacity_mib) else OWN
        is_flat = None if record.is_flat is None or record.is_flat != record.is_flat else bool(record.is_flat)
        return self.held.observe(record.peak_mib, capacity_mib, is_flat, record.state.startswith("COMPLETED"))

    def _see_flat(self, share: float, is_use: bool) -> None:
        is_same = self._is_same(share)
        if not is_same and (is_use or self.flat_frac is not None):
            self.needed = VARIED_RUNS
        self.flat_runs = self.flat_runs + 1 if is_same else 1
        self.flat_frac = share

    def _is_same(self, share: float) -> bool:
        return self.flat_frac is not None and abs(share - self.flat_frac) <= FLAT_SHARE

    def _is_lower(self, peak_mib: float, capacity_mib: float) -> bool:
        """Return True if a peak lies clearly below what the family reserves. An unknown capacity shows nothing."""
        share = peak_mib / capacity_mib
        if not math.isfinite(capacity_mib) or is_reserved_share(share, capacity_mib):
            return False
        return self.flat_frac is None or not share > self.flat_frac - CLEARLY_LOWER

    def _see_lower(self, state: str) -> str:
        """Note a clearly lower peak. Return why the run is no evidence, "" if it is.

        A run of a family that reserves memory shows its use only if it completed: an earlier end can precede the
        reservation.
        """
        self.shows_use |= state.startswith("COMPLETED") or (self.flat_frac is None and state.startswith("TIMEOUT"))
        return ENDED_EARLY if self.flat_frac is not None and not self.shows_use else ""

    def _is_need(self, record: _FamilyRecord, capacity_mib: float, is_failed: bool, config: AdviceSection) -> bool:
        """Return True if the highest sample is the job's own use, although its verdict or its flat peak hide that.

        A flat peak is own use if the family shows use, unless it ended well as one of `needed` runs at one share: then
        the family reserves memory again. So is that of a run that failed near the capacity, flat or short, unless the
        family reserves: such a run has died of memory.
        """
        if not 0 < record.highest_mib < math.inf:
            return False
        is_flat, is_short = record.evidence in ("preallocated", "unclear"), record.verdict == SHORT
        if is_flat and self.shows_use and (is_failed or not self._is_again(record.highest_mib / capacity_mib)):
            return True
        is_near = record.highest_mib >= FAILED_SHARE * capacity_mib
        return (is_flat or is_short) and is_failed and is_near and (self.shows_use or self.flat_frac is None)

    def _is_again(self, share: float) -> bool:
        return self._is_same(share) and self.flat_runs + 1 >= self.needed


def _measured(
    peak_mib: float, capacity_mib: float, is_failed: bool, is_flat: bool, times: tuple[int, int], config: AdviceSection
) -> MeasuredRun:
    share = FAILED_SHARE if is_failed else CENSORED_SHARE
    is_censored = peak_mib >= share * capacity_mib
    need_mib = peak_mib * (1 + SPIKE_MARGIN)
    if is_censored:
        need_mib = max(need_mib, capacity_mib)
    why_not = SIZELESS if capacity_mib == math.inf else FAILED_EARLY if is_failed and not is_censored else ""
    is_oom = is_censored and is_failed
    return MeasuredRun(
        peak_mib, need_mib, is_censored, is_oom, is_failed, capacity_mib, *times, why_not, not why_not, is_flat
    )


class RunHeights(NamedTuple):
    """The highest known need of some runs (NaN without one), and the capacity at which one was cut off above it."""

    least_mib: float
    censored_mib: float | None


def heights_of(runs: Iterable[MeasuredRun]) -> RunHeights:
    cut_off_mib = max((run.capacity_mib for run in runs if run.is_known and run.is_censored), default=0.0)
    shown_mib = max((run.need_mib for run in runs if run.is_known and not run.is_censored), default=0.0)
    least_mib = max((run.need_mib for run in runs if run.need_mib > 0), default=math.nan)
    return RunHeights(least_mib, cut_off_mib if cut_off_mib > shown_mib else None)
