"""Read the memory that each past run needed, and describe a family's runs as numbers to compute a bound from."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pandas as pd

from advisor.duration.features import is_packed, texts_of
from advisor.memory.trend import straight_line
from advisor.mig.compute_need import Activity, activity_of
from almanac.config import AdviceSection, Tier
from almanac.hardware import NEAR, shares_host_memory
from almanac.records import MemoryScope
from slurm.states import ENDED_WELL, NODE_FAILED
from telemetry.metrics.data_quality import CONTEXT_MIB, FLAT_SHARE, NO_TELEMETRY, OK, SHORT, is_reserved_share

if TYPE_CHECKING:
    from advisor.mig.compute_need import Activity


FAMILY: Final = "family"
SIMILAR: Final = "similar"
"""Scopes: enough runs of this name itself, or only of names like it or of its script. All of one user, with as many
GPUs.

A user's other jobs were tried as a third: the bounds that they led to were exceeded 26 times as often as stated.
"""
SCRIPT: Final = "script"
"""Scope that people read where SIMILAR evidence comes from runs of the same script."""
OPEN_EDGES = (5, 20)
"""Evidence is calibrated apart by how many submissions of the family are open: no outcome of these is known."""
SPREAD_RUNS = 20
MIN_SPREAD = 0.02
"""Smallest relative spread of needs: equal peaks of a few runs do not show that the next one is equal."""
PAUSE_S = 30 * 86_400
"""Time without advice for a family that ran out of memory on a smaller tier: until then its users have adapted."""
TREND_SHARE = 0.6
"""Share of the variance of log needs that a rising line over time must explain to count as growth."""
MAX_GROWTH = math.log(2)


@dataclass(frozen=True)
class Oom:
    """The newest suspected death of memory. is_after_move: on a smaller tier than the family had asked for before."""

    capacity_mib: float
    end_s: int
    is_after_move: bool


@dataclass(frozen=True)
class Evidence:
    """The runs of one scope that had ended at now_s (s since 1970).

    runs: number of runs with a known need. newest: logarithms of the newest needs, MiB, oldest first; newest_s: their
    submit times. highest_mib: highest measured peak of all. least_mib: highest known need, failed runs included.
    censored_mib: the largest capacity at which a run was cut off; None without such a run, or if a run on more memory
    needed more. since_s, until_s: range of the ends. oom: of the family, for every scope. excluded: number of excluded
    runs by reason. open_jobs: submissions of these names that had not ended; an array counts once. live_mib: needs that
    those which run have shown so far.
    is_of_script: of the job's script, under names as generic. activities: of the newest runs whose use of the
    GPU is known, oldest first.
    """

    scope: MemoryScope
    now_s: int
    runs: int = 0
    newest: tuple[float, ...] = ()
    newest_s: tuple[int, ...] = ()
    highest_mib: float = math.nan
    least_mib: float = math.nan
    censored_mib: float | None = None
    since_s: int | None = None
    until_s: int | None = None
    oom: Oom | None = None
    excluded: Mapping[str, int] = field(default_factory=dict)
    open_jobs: int = 0
    live_mib: tuple[float, ...] = ()
    is_of_script: bool = False
    activities: tuple[Activity, ...] = ()

    @property
    def told_scope(self) -> MemoryScope:
        return SCRIPT if self.is_of_script else self.scope

    def supports_bound(self, min_runs: int) -> bool:
        """Return True if there are enough runs for a bound, and none of unknown height."""
        return self.runs >= min_runs and self.censored_mib is None

    def is_paused(self) -> bool:
        """Return True if the family ran out of memory on a smaller tier than before, not long ago."""
        oom = self.oom
        return oom is not None and oom.is_after_move and self.now_s < oom.end_s + PAUSE_S

    @cached_property
    def growth(self) -> float:
        """By how much, as a logarithm, need has grown since the newest of these runs was submitted; 0 without a trend.

        The straight line through the logarithms over the submissions, if it explains TREND_SHARE of their variance
        and rises. Runs submitted since then have not ended and are not seen.
        """
        line = straight_line(self.newest_s, self.newest)
        if line is None or line.slope <= 0 or line.correlation**2 < TREND_SHARE:
            return 0.0
        return min(line.slope * max(self.now_s - max(self.newest_s), 0), MAX_GROWTH)

    @cached_property
    def trend(self) -> float:
        """t value of the straight line through the logarithms in their order: above 2 to 3 they surely grow."""
        line = straight_line(range(len(self.newest)), self.newest)
        if line is None:
            return 0.0
        return line.correlation * math.sqrt((len(self.newest) - 2) / max(1 - line.correlation**2, 1e-9))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithms of the newest SPREAD_RUNS needs; 0 for fewer than two."""
        newest = self.newest[-SPREAD_RUNS:]
        number = len(newest)
        if number < 2:
            return 0.0
        mean = math.fsum(newest) / number
        return math.sqrt(math.fsum([(value - mean) ** 2 for value in newest]) / (number - 1))

    def centre_and_scale(self) -> tuple[float, float]:
        """Logarithm of the highest need, grown since, and the spread of a next one around it: sd sqrt(1 + 1/n)."""
        number = max(min(self.runs, SPREAD_RUNS), 1)
        scale = max(self.spread, MIN_SPREAD) * math.sqrt(1 + 1 / number)
        return math.log(self.least_mib) + self.growth, scale


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
    columns: list[list[Any]] = [*numbers, *texts, verdicts, *times]
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


@dataclass
class _Use:
    """Track whether the flat peaks of a family are reservations or its own use.

    flat_frac: share of the capacity that the newest flat run which ended well held; None before the first one.
    flat_runs: number of newest flat runs at this share. needed: flat runs at one share that make a reservation.
    shows_use: a run that completed has since peaked clearly lower, so that the program does not reserve memory.
    """

    flat_frac: float | None = None
    flat_runs: int = 0
    needed: int = 1
    shows_use: bool = False

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
        return _measured(peak_mib, capacity_mib, is_failed, is_flat, times, config)

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
