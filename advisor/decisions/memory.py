"""Memory bound and tier of one submission: one pure function for live requests and for the back-test."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from advisor.decisions.tier import NO_EVIDENCE, PAUSED, decide_tier
from advisor.memory import bound as memory_bound
from advisor.memory.bound import bound_of
from advisor.memory.calibration import Calibration
from advisor.memory.evidence import PAUSE_S, Evidence
from advisor.memory.peaks import SPIKE_MARGIN
from advisor.mig.compute_need import slow_downs
from almanac.config import Config
from almanac.records import MemoryBound, MemoryEvidence, Request, TierAdvice, TierReason

NEWEST_SHOWN = 5


@dataclass(frozen=True)
class MemoryAdvice:
    """The tier to ask for and the bound behind it. bound: None where there is none; tier.note then says why."""

    tier: TierAdvice
    bound: MemoryBound | None
    evidence: MemoryEvidence


def decide_memory(
    request: Request, evidence: Evidence, calibration: Calibration | None, config: Config
) -> MemoryAdvice:
    bounded = bound_of(evidence, calibration, config.advice)
    ran_out_mib = evidence.censored_mib if bounded.why_not == memory_bound.RAN_OUT else None
    slower = slow_downs(evidence.activities, config.tiers, config.advice.min_runs) if request.is_one_gpu else {}
    tier = decide_tier(
        request,
        bounded.bound,
        config.tiers,
        config.advice.headroom_mib,
        ran_out_mib,
        slower,
    )
    if tier.reason == NO_EVIDENCE and not tier.note:
        reason: TierReason = PAUSED if bounded.why_not == memory_bound.PAUSED else NO_EVIDENCE
        tier = dataclasses.replace(tier, reason=reason, note=_why_none(bounded.why_not, evidence, calibration, config))
    bound = bounded.bound if request.gpu_count > 0 else None
    if bound is not None:
        tier = dataclasses.replace(
            tier, holds_bound=bound.bound_mib is not None and _usable_mib(tier, config) >= bound.bound_mib
        )
    return MemoryAdvice(tier, bound, _summary(evidence, _changes_above_mib(tier, bound, config), config))


def _changes_above_mib(tier: TierAdvice, bound: MemoryBound | None, config: Config) -> float | None:
    """The highest peak at which what a tier must hold, as far above it as now, is still held by the tier advised."""
    if bound is None or tier.tier is None:
        return None
    return _usable_mib(tier, config) * bound.highest_mib / bound.tier_mib


def _usable_mib(tier: TierAdvice, config: Config) -> float:
    """Of the tier advised; infinite where none is."""
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
    match why_not:
        case memory_bound.TOO_FEW:
            return f"{number} of the {config.advice.min_runs} measured runs needed"
        case memory_bound.TOO_WIDE:
            return f"the memory of your last {runs} differs too much"
        case memory_bound.RAN_OUT:
            return "a run seems to have run out of GPU memory, so its need is unknown"
        case memory_bound.PAUSED:
            return "one on a smaller tier than before seems to have run out of GPU memory"
        case memory_bound.NOT_CALIBRATED:
            return _why_not_calibrated(runs, evidence, calibration, config)
    return ""


def _why_not_calibrated(runs: str, evidence: Evidence, calibration: Calibration | None, config: Config) -> str:
    """What the site's past cannot judge: the number of open jobs, the growth, or any evidence like this."""
    if calibration is None or calibration.risk != config.advice.risk:
        return "the site's predictors are not trained for its accepted risk yet"
    most_open = calibration.most_open(evidence)
    if most_open is not None:
        return f"{evidence.open_jobs} such jobs are waiting or running; ask again when fewer than {most_open} are"
    if calibration.lacks_growing(evidence):
        return f"the memory of your last {runs} keeps growing, and the site's history is too short to judge that"
    return f"the site's history is too short to judge {runs}"
