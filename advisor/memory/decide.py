"""Bound the peak GPU memory of a submission, and advise its tier: for live requests and for the back-test.

The bound is exp(centre + margin x scale): centre is the logarithm of the highest need on record, grown since if the
record rises; scale the spread of the newest needs times sqrt(1 + 1/n), as in the normal prediction interval; margin
what the site's own past has calibrated for evidence of this class (advisor.memory.calibration). Without a calibration
of such evidence no bound is stated: fourteen runs of one family alone can never support 1%.

The tier is the smallest whose usable memory holds the bound, and whose compute is enough.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from advisor.memory.calibration import Calibration, Calibrator, class_name
from advisor.memory.evidence import BOUND_RUNS, PAUSE_S, Evidence
from advisor.memory.peak_store import Case, replay_peaks
from advisor.memory.runs import SPIKE_MARGIN
from advisor.memory.tier import NO_EVIDENCE, PAUSED, PILOT_JOBS, RAN_OUT, ROOMY, decide_tier
from advisor.mig.compute_need import slow_downs
from almanac.config import AdviceSection, Config, Tier
from almanac.records import JobRequest, MemoryBound, MemoryEvidence, TierAdvice, TierReason

MAX_FACTOR = 4.0
"""A bound further above the highest need than this is not stated; where a tier must hold more, none is advised."""
TOO_FEW, NOT_CALIBRATED, TOO_WIDE = "too few runs", "not calibrated", "too wide"
MOST_SHARING = 4
"""Jobs on one GPU that bounds are stated for."""
RETRAIN_S = 86_400
"""Time between two trainings of a replay: that of the timer of `almanac train`."""


@dataclass(frozen=True)
class BoundOutcome:
    """A bound, or the reason for none: one of this module's constants, RAN_OUT, or PAUSED."""

    bound: MemoryBound | None
    why_not: str = ""


def bound_of(evidence: Evidence, calibration: Calibration | None, config: AdviceSection) -> BoundOutcome:
    """The bound that this evidence supports."""
    if evidence.is_paused():
        return BoundOutcome(None, PAUSED)
    if evidence.censored_mib is not None:
        return BoundOutcome(None, RAN_OUT)
    if not evidence.supports_tier(config.min_runs):
        return BoundOutcome(None, TOO_FEW)
    margins = calibration.of(evidence) if calibration and calibration.risk == config.risk else None
    if margins is None or margins.tier is None:
        return BoundOutcome(None, NOT_CALIBRATED)
    centre, scale = evidence.centre_and_scale()
    if margins.tier * scale > math.log(MAX_FACTOR):
        return BoundOutcome(None, TOO_WIDE)
    above = math.inf if margins.bound is None or not evidence.supports_bound else margins.bound * scale
    return BoundOutcome(
        MemoryBound(
            bound_mib=max(math.exp(centre + above), evidence.seen_mib) if above <= math.log(MAX_FACTOR) else None,
            tier_mib=math.exp(centre + margins.tier * scale),
            risk=config.risk,
            highest_mib=evidence.highest_mib,
            runs=evidence.runs,
            scope=evidence.told_scope,
            evidence_class=class_name(evidence),
        )
    )


def shared_bounds_mib(evidence: Evidence, calibration: Calibration | None, config: AdviceSection) -> dict[int, float]:
    """Map jobs per GPU to the memory bound of one job, at risk / jobs. Omits counts without a bound."""
    bound = bound_of(evidence, calibration, config).bound
    if calibration is None or bound is None or bound.bound_mib is None:
        return {}
    centre, scale = evidence.centre_and_scale()
    margins = {jobs: calibration.shared_margin(evidence, jobs) for jobs in range(2, MOST_SHARING + 1)}
    return {
        jobs: max(math.exp(centre + margin * scale), evidence.seen_mib)
        for jobs, margin in margins.items()
        if margin is not None and margin * scale <= math.log(MAX_FACTOR)
    }


class BoundReplay:
    """Replay a site's past, submission by submission, and train again every RETRAIN_S.

    calibration: learned from what ended before the submission at hand; after the last one from all, bounds for jobs
    that share a GPU included.
    """

    def __init__(
        self, cases: Iterable[Case], config: AdviceSection, tiers: Sequence[Tier] = (), with_shared: bool = False
    ) -> None:
        """cases: in order of submission, as replay_peaks gives them. with_shared: also before the last."""
        self._with_shared = with_shared
        self._cases = cases
        self._config = config
        self._calibrator = Calibrator(config, tiers)
        self._running: list[tuple[int, int, Case, MemoryBound | None]] = []
        self.calibration = Calibration(config.risk)

    def __iter__(self) -> Iterator[Case]:
        trained_s = 0
        for number, case in enumerate(self._cases):
            today_s = case.submission.submit_s // RETRAIN_S * RETRAIN_S
            if today_s > trained_s:
                self._train(today_s, (today_s - trained_s) / 86_400 if trained_s else 0.0)
                trained_s = today_s
            if case.run is not None:
                bound = bound_of(case.evidence, self.calibration, self._config).bound
                heapq.heappush(self._running, (case.run.end_s, number, case, bound))
            yield case
        self._train(None, 0.0)

    def _train(self, now_s: int | None, days: float) -> None:
        """Learn from what has ended before now_s (None: from all)."""
        while self._running and (now_s is None or self._running[0][0] < now_s):
            _, _, case, bound = heapq.heappop(self._running)
            self._calibrator.absorb(case, bound)
        self.calibration = self._calibrator.calibration(days)
        if now_s is None:
            self.calibration = replace(self.calibration, measured=self._calibrator.measured())
        if now_s is None or self._with_shared:
            self.calibration = replace(self.calibration, shared=self._calibrator.shared(MOST_SHARING))


def calibrate(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> Calibration:
    """Learn the margins from the site's past, from the errors of the bounds too that it would have given."""
    replay = BoundReplay(replay_peaks(history, config, tiers), config, tiers)
    for _ in replay:
        pass
    return replay.calibration


NEWEST_SHOWN = 5


@dataclass(frozen=True)
class MemoryAdvice:
    """The tier to ask for and the bound behind it. Without a bound, tier.note tells the reason."""

    tier: TierAdvice
    bound: MemoryBound | None
    evidence: MemoryEvidence


def decide_memory(
    request: JobRequest, evidence: Evidence, calibration: Calibration | None, config: Config
) -> MemoryAdvice:
    """Advise the tier of a submission by its evidence. Pure."""
    bounded = bound_of(evidence, calibration, config.advice)
    ran_out_mib = evidence.censored_mib if bounded.why_not == RAN_OUT else None
    slower = slow_downs(evidence.activities, config.tiers, BOUND_RUNS) if request.is_one_gpu else {}
    tier = decide_tier(request, bounded.bound, config.tiers, config.advice.headroom_mib, ran_out_mib, slower)
    if tier.reason == NO_EVIDENCE and not tier.note:
        reason: TierReason = PAUSED if bounded.why_not == PAUSED else NO_EVIDENCE
        tier = dataclasses.replace(tier, reason=reason, note=_why_none(bounded.why_not, evidence, calibration, config))
    bound = bounded.bound if request.gpu_count > 0 else None
    if bound is not None:
        holds_bound = bound.bound_mib is not None and _usable_mib(tier, config) >= bound.bound_mib
        tier = dataclasses.replace(tier, holds_bound=holds_bound, pilot=_pilot(tier, evidence, config))
    return MemoryAdvice(tier, bound, _summary(evidence, _changes_above_mib(tier, bound, config), config))


def _pilot(tier: TierAdvice, evidence: Evidence, config: Config) -> int | None:
    """Jobs that may still follow the advice before one of those open has shown its memory; None: any number.

    Each job that ends admits another one. So at most PILOT_JOBS can be lost to a new need.
    """
    usable_mib, largest_mib = _usable_mib(tier, config), max((each.capacity_mib for each in config.tiers), default=0)
    if usable_mib >= min(ROOMY * evidence.least_mib, largest_mib - config.advice.headroom_mib):
        return None
    return PILOT_JOBS - evidence.open_jobs


def _changes_above_mib(tier: TierAdvice, bound: MemoryBound | None, config: Config) -> float | None:
    """The highest peak at which what a tier must hold, as far above it as now, is still held by the tier advised."""
    if bound is None or tier.tier is None:
        return None
    return _usable_mib(tier, config) * bound.highest_mib / bound.tier_mib


def _usable_mib(tier: TierAdvice, config: Config) -> float:
    """Usable memory of the tier advised; infinite without one."""
    return min(
        [each.capacity_mib - config.advice.headroom_mib for each in config.tiers if each.name == tier.tier],
        default=math.inf,
    )


def _summary(evidence: Evidence, changes_above_mib: float | None, config: Config) -> MemoryEvidence:
    oom = evidence.oom
    newest = [math.exp(need) / (1 + SPIKE_MARGIN) for need in evidence.newest[-NEWEST_SHOWN:]]
    return MemoryEvidence(
        scope=evidence.told_scope,
        runs=evidence.runs,
        since_s=evidence.since_s,
        until_s=evidence.until_s,
        newest_peaks_mib=tuple(newest),
        ran_out_mib=oom.capacity_mib if oom else evidence.censored_mib,
        ran_out_s=oom.end_s if oom else None,
        paused_until_s=oom.end_s + PAUSE_S if oom and evidence.is_paused() else None,
        changes_above_mib=changes_above_mib,
    )


def _why_none(why_not: str, evidence: Evidence, calibration: Calibration | None, config: Config) -> str:
    number = evidence.runs
    runs = f"{number} measured run{'' if number == 1 else 's'}"
    if why_not == NOT_CALIBRATED:
        return _why_not_calibrated(runs, evidence, calibration, config)
    return {
        TOO_FEW: f"{number} of the {config.advice.min_runs} measured runs needed",
        TOO_WIDE: f"the memory of your last {runs} differs too much",
        RAN_OUT: "a run seems to have run out of GPU memory, so its need is unknown",
        PAUSED: "one on a smaller tier than before seems to have run out of GPU memory",
    }.get(why_not, "")


def _why_not_calibrated(runs: str, evidence: Evidence, calibration: Calibration | None, config: Config) -> str:
    """Name what the site's past cannot judge: the number of open jobs, the growth, or any evidence like this."""
    if calibration is None or calibration.risk != config.advice.risk:
        return "the site's predictors are not trained for its accepted risk yet"
    most_open = calibration.most_open(evidence)
    if most_open is not None:
        return f"{evidence.open_jobs} such jobs are waiting or running; ask again when fewer than {most_open} are"
    if calibration.lacks_growing(evidence):
        return f"the memory of your last {runs} keeps growing, and the site's history is too short to judge that"
    return f"the site's history is too short to judge {runs}"
