"""An upper bound of the HBM peak of one GPU, with a stated risk of being exceeded.

The bound is exp(centre + margin x scale): centre is the logarithm of the highest need on record, grown since where the
record rises; scale the spread of the newest needs times sqrt(1 + 1/n), as in the normal prediction interval; margin
what the site's own past has calibrated for evidence of this class (advisor.memory.calibration). Where the site has
not calibrated such evidence, nothing is said: fourteen runs of one family alone can never support 1%.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from advisor.memory.calibration import Calibration, Calibrator, class_name
from advisor.memory.evidence import Evidence
from advisor.memory.peak_store import Case, replay_peaks
from almanac.config import AdviceSection, Tier
from almanac.records import MemoryBound

MAX_FACTOR = 4.0
"""A bound further above the highest need than this is not stated; where a tier must hold more, none is advised."""
TOO_FEW, RAN_OUT, PAUSED = "too few runs", "ran out", "paused"
NOT_CALIBRATED, TOO_WIDE = "not calibrated", "too wide"
MOST_SHARING = 4
"""Jobs on one GPU that bounds are stated for."""
RETRAIN_S = 86_400
"""How often a replay trains again, as the timer of `almanac train` does."""


@dataclass(frozen=True)
class BoundOutcome:
    """A bound, or why there is none: one of this module's constants."""

    bound: MemoryBound | None
    why_not: str = ""


def bound_of(evidence: Evidence, calibration: Calibration | None, config: AdviceSection) -> BoundOutcome:
    """The bound that this evidence supports."""
    if evidence.is_paused():
        return BoundOutcome(None, PAUSED)
    if evidence.censored_mib is not None:
        return BoundOutcome(None, RAN_OUT)
    if not evidence.supports_bound(config.min_runs):
        return BoundOutcome(None, TOO_FEW)
    margins = calibration.of(evidence) if calibration and calibration.risk == config.risk else None
    if margins is None or margins.tier is None:
        return BoundOutcome(None, NOT_CALIBRATED)
    centre, scale = evidence.centre_and_scale()
    if margins.tier * scale > math.log(MAX_FACTOR):
        return BoundOutcome(None, TOO_WIDE)
    above = math.inf if margins.bound is None else margins.bound * scale
    return BoundOutcome(
        MemoryBound(
            bound_mib=math.exp(centre + above) if above <= math.log(MAX_FACTOR) else None,
            tier_mib=math.exp(centre + margins.tier * scale),
            risk=config.risk,
            highest_mib=evidence.highest_mib,
            runs=evidence.runs,
            scope=evidence.told_scope,
            evidence_class=class_name(evidence),
        )
    )


def shared_bounds_mib(evidence: Evidence, calibration: Calibration | None, config: AdviceSection) -> dict[int, float]:
    """By number of jobs on one GPU, the bound of one of them at the risk divided by it; where there is one."""
    if calibration is None or bound_of(evidence, calibration, config).bound is None:
        return {}
    centre, scale = evidence.centre_and_scale()
    margins = {jobs: calibration.shared_margin(evidence, jobs) for jobs in range(2, MOST_SHARING + 1)}
    return {
        jobs: math.exp(centre + margin * scale)
        for jobs, margin in margins.items()
        if margin is not None and margin * scale <= math.log(MAX_FACTOR)
    }


@dataclass(frozen=True)
class BoundedCase:
    """A submission of the past and what it would have been told."""

    case: Case
    bounded: BoundOutcome


class BoundReplay:
    """Replays a site's past: every submission with the bound it would have had, trained again every RETRAIN_S.

    calibration: what the past teaches, after the last step of the iteration, bounds for jobs that share a GPU included.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        config: AdviceSection,
        tiers: Sequence[Tier] = (),
        with_shared: bool = False,
    ) -> None:
        """cases: in order of submission, as replay_peaks gives them. with_shared: also before the last."""
        self._with_shared = with_shared
        self._cases = cases
        self._config = config
        self._calibrator = Calibrator(config, tiers)
        self._running: list[tuple[int, int, Case, MemoryBound | None]] = []
        self.calibration = Calibration(config.risk)

    def __iter__(self) -> Iterator[BoundedCase]:
        trained_s = 0
        for number, case in enumerate(self._cases):
            today_s = case.submission.submit_s // RETRAIN_S * RETRAIN_S
            if today_s > trained_s:
                self._train(today_s, (today_s - trained_s) / 86_400 if trained_s else 0.0)
                trained_s = today_s
            bounded = bound_of(case.evidence, self.calibration, self._config)
            if case.run is not None:
                heapq.heappush(self._running, (case.run.end_s, number, case, bounded.bound))
            yield BoundedCase(case, bounded)
        self._train(None, 0.0)

    def _train(self, now_s: int | None, days: float) -> None:
        """Learn from what has ended before now_s (None: from all)."""
        while self._running and (now_s is None or self._running[0][0] < now_s):
            _, _, case, bound = heapq.heappop(self._running)
            self._calibrator.absorb(case, bound)
        self.calibration = self._calibrator.calibration(days)
        if now_s is None or self._with_shared:
            self.calibration = replace(self.calibration, shared=self._calibrator.shared(MOST_SHARING))


def calibrate(history: pd.DataFrame, config: AdviceSection, tiers: Sequence[Tier] = ()) -> Calibration:
    """What the site's past teaches, the errors of the bounds that it would have given included."""
    replay = BoundReplay(replay_peaks(history, config, tiers), config, tiers)
    for _ in replay:
        pass
    return replay.calibration
