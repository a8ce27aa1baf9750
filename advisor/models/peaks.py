"""HBM peaks as evidence: which runs say something about the memory that a job needs, and at least how much."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from advisor.features import Submission, submissions, sweep
from almanac.config import AdviceSection, Tier

CENSORED_SHARE = 0.97
"""A peak above this share of the capacity may have been cut off: the need was at least the capacity."""
FAILED_SHARE = 0.90
"""The same for a job that failed: CUDA's out-of-memory is a plain FAILED, at the last peak before the fatal request."""
INFORMATIVE = ("telemetry", "jobstats")
MIN_TREND_RUNS = 5
TREND_SHARE = 0.6
"""Share of the variance of log peaks that a rising line over time must explain to count as growth."""
MAX_GROWTH = math.log(2)
_ENDED_WELL = ("COMPLETED", "TIMEOUT", "CANCELLED", "PREEMPTED")

FAMILY, SHAPE = "family", "shape"
NAMELESS = ("", "-")
"""Keys of jobs whose name is unknown or empty: they are no family."""


@dataclass(frozen=True)
class Peak:
    """One informative run. need_mib: the least HBM that the run can have needed; is_censored: it may be more.

    submit_s and end_s: s since 1970.
    """

    need_mib: float
    is_censored: bool
    capacity_mib: float
    submit_s: int
    end_s: int


@dataclass(frozen=True)
class Evidence:
    """Peaks of the newest runs of one scope, oldest first, as known at now_s (s since 1970).

    set_aside: how many runs say nothing, by reason.
    """

    peaks: tuple[Peak, ...]
    scope: str
    now_s: int
    set_aside: Mapping[str, int] = field(default_factory=dict)

    @property
    def highest_mib(self) -> float:
        return max(peak.need_mib for peak in self.peaks)

    @property
    def censored_mib(self) -> float | None:
        """The largest capacity at which a run was cut off; None where none was."""
        return max((peak.capacity_mib for peak in self.peaks if peak.is_censored), default=None)

    @property
    def growth(self) -> float:
        """By how much, as a logarithm, need has grown since the newest of these runs was submitted; 0 without a trend.

        The straight line through the logarithms of the peaks over their submissions, where it explains
        TREND_SHARE of their variance and rises. Runs submitted since then have not ended and are not seen.
        """
        times = np.array([peak.submit_s for peak in self.peaks], dtype="float64")
        logs = np.log([peak.need_mib for peak in self.peaks])
        if len(logs) < MIN_TREND_RUNS or np.ptp(times) <= 0 or np.ptp(logs) <= 0:
            return 0.0
        deviation = times - times.mean()
        slope = float(deviation @ (logs - logs.mean()) / (deviation @ deviation))
        explained = slope**2 * float(deviation @ deviation) / float(((logs - logs.mean()) ** 2).sum())
        if slope <= 0 or explained < TREND_SHARE:
            return 0.0
        return min(slope * max(self.now_s - float(times.max()), 0.0), MAX_GROWTH)

    def centre_and_scale(self, min_relative_spread: float) -> tuple[float, float]:
        """Logarithm of the highest peak, grown since, and the spread of a next one around it: sd sqrt(1 + 1/n)."""
        logs = [math.log(peak.need_mib) for peak in self.peaks]
        number = len(logs)
        mean = sum(logs) / number
        sd = math.sqrt(sum((value - mean) ** 2 for value in logs) / (number - 1)) if number > 1 else 0.0
        return max(logs) + self.growth, max(sd, min_relative_spread, 1e-6) * math.sqrt(1 + 1 / number)


def peaks_of(history: pd.DataFrame, tiers: Sequence[Tier] = ()) -> list[Peak | None]:
    """One per row of the history frame, in its order; None where the run says nothing about its need."""
    capacities = {tier.name: float(tier.capacity_mib) for tier in tiers}
    peaks, nominal, ends, submits = (
        history[name].astype("float64").tolist() for name in ("hbm_peak_mib", "hbm_capacity_mib", "end_s", "submit_s")
    )
    asked = [capacities.get(tier, math.inf) if isinstance(tier, str) else math.inf for tier in history["tier"]]
    evidence, states = (history[name].astype(str).tolist() for name in ("hbm_evidence", "state"))
    return [
        _peak(peak, known if known > 0 else tier, state, int(submit), int(end))
        if kind in INFORMATIVE and not math.isnan(end)
        else None
        for peak, known, tier, submit, end, kind, state in zip(
            peaks, nominal, asked, submits, ends, evidence, states, strict=True
        )
    ]


def _peak(peak_mib: float, capacity_mib: float, state: str, submit_s: int, end_s: int) -> Peak | None:
    if not peak_mib > 0 or not math.isfinite(peak_mib):
        return None
    share = CENSORED_SHARE if state.startswith(_ENDED_WELL) else FAILED_SHARE
    is_censored = peak_mib >= share * capacity_mib
    return Peak(max(peak_mib, capacity_mib) if is_censored else peak_mib, is_censored, capacity_mib, submit_s, end_s)


class PeakStore:
    """Absorbs ended runs in the order of their ends; gives the evidence for a next one."""

    def __init__(self, config: AdviceSection) -> None:
        self._config = config
        self._groups: dict[tuple[object, ...], deque[tuple[int, Peak | None, str]]] = {}

    def absorb(self, job: Submission, end_s: int, peak: Peak | None, why_not: str) -> None:
        """why_not: in a word, why the run is no evidence; counted where peak is None."""
        for group in (self._family(job), self._shape(job)):
            runs = self._groups.setdefault(group, deque(maxlen=4 * self._config.max_runs))
            runs.append((end_s, peak, why_not))

    def evidence(self, job: Submission, now_s: int) -> Evidence:
        """Of the user's family; where that has fewer than min_runs peaks, of the user's jobs of the same GPU count."""
        if job.name_key in NAMELESS:
            return Evidence((), FAMILY, now_s)
        family = self._newest(self._family(job), now_s, FAMILY)
        if len(family.peaks) >= self._config.min_runs:
            return family
        shape = self._newest(self._shape(job), now_s, SHAPE)
        return shape if len(shape.peaks) >= self._config.min_runs else family

    def _family(self, job: Submission) -> tuple[object, ...]:
        return (job.user, job.name_key, job.gpu_count)

    def _shape(self, job: Submission) -> tuple[object, ...]:
        return (job.user, job.gpu_count)

    def _newest(self, group: tuple[object, ...], now_s: int, scope: str) -> Evidence:
        since_s = now_s - self._config.history_days * 86_400
        peaks: list[Peak] = []
        set_aside: Counter[str] = Counter()
        for end_s, peak, why_not in reversed(self._groups.get(group, ())):
            if end_s < since_s or len(peaks) == self._config.max_runs:
                break
            if peak is None:
                set_aside[why_not] += 1
            else:
                peaks.append(peak)
        return Evidence(tuple(reversed(peaks)), scope, now_s, dict(set_aside))


def evidence_now(job: Submission, history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> Evidence:
    """Evidence for a live submission, from its user's jobs that ended before it."""
    own = history[history["user"] == job.user]
    jobs, peaks, reasons = submissions(own), peaks_of(own, tiers), why_set_aside(own)
    ends = own["end_s"].tolist()
    store = PeakStore(config)
    for row, is_end in sweep(own):
        if is_end and ends[row] < job.submit_s:
            store.absorb(jobs[row], int(ends[row]), peaks[row], reasons[row])
    return store.evidence(job, job.submit_s)


@dataclass(frozen=True)
class Case:
    """A submission of the past with the evidence it had then, and the peak that it came to (None: unknown)."""

    row: int
    submission: Submission
    evidence: Evidence
    peak: Peak | None


def replay_peaks(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> Iterator[Case]:
    """Every submission in order of time, each with the evidence of runs that had ended before it."""
    jobs, peaks, reasons = submissions(history), peaks_of(history, tiers), why_set_aside(history)
    ends = history["end_s"].tolist()
    store = PeakStore(config)
    for row, is_end in sweep(history):
        if is_end:
            store.absorb(jobs[row], int(ends[row]), peaks[row], reasons[row])
        else:
            yield Case(row, jobs[row], store.evidence(jobs[row], jobs[row].submit_s), peaks[row])


def why_set_aside(history: pd.DataFrame) -> list[str]:
    """In a word, per row, why a run without an informative peak has none."""
    verdicts = history["verdict"].fillna("").astype(str) if "verdict" in history else pd.Series("", history.index)
    return [
        "preallocated memory" if evidence == "preallocated" else (verdict if verdict != "ok" else "") or "no telemetry"
        for evidence, verdict in zip(history["hbm_evidence"].tolist(), verdicts.tolist(), strict=True)
    ]
