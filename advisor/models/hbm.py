"""An upper bound of the HBM peak of one GPU, with a stated risk of being exceeded.

The bound is exp(centre + multiplier x scale). centre is the logarithm of the highest of the newest peaks, scale
their spread times sqrt(1 + 1/n), as in the normal prediction interval. The multiplier is the split-conformal quantile
of the normalised scores (log next peak - centre) / scale that the whole site's past runs came to, each replayed
with the evidence that it had when it was submitted: index ceil((n + 1)(1 - risk)) of n sorted scores (Vovk,
Gammerman and Shafer 2005; Lei et al. 2018, Distribution-free predictive inference, section 2). The guarantee holds
for the class of jobs with as much evidence, not for one family: fourteen runs alone cannot support 1%.

Before a site has enough scores the multiplier is Student's t quantile with n - 1 degrees of freedom. It is laid on
the highest peak and not on the mean, of which the normal theory speaks: peaks of one family are often skewed or
growing, and the highest is the more cautious of the two.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from advisor.models.peaks import FAMILY, Case, Evidence, replay_peaks
from almanac.config import AdviceSection, Config
from almanac.records import MemoryBound

BUCKET_EDGES = (8, 13)
"""Evidence of fewer than 8 runs, of 8 to 12, and of more is calibrated apart."""
SPREAD_EDGES = (0.1, 0.3)
"""So is evidence whose runs agree (scale up to 10%), differ (up to 30%) or differ much.

Without this the runs that agree would be judged by scores of those that do not: the bound is withheld where it is wide
(MAX_FACTOR), so what is left to advise is no random sample of what was calibrated together.
"""
MAX_CASES_PER_GROUP = 200
MAX_SCORES = 20_000
ABOVE_CAPACITY_MIB = 1.0
MAX_FACTOR = 4.0
"""Where the bound would be further above the highest peak than this, the runs differ too much to say anything."""
CALIBRATED, STUDENT_T = "calibrated", "student-t"


@dataclass(frozen=True)
class Calibration:
    """Sorted scores per class of evidence ("family/0/2": scope, spread, runs); empty before anything is known."""

    scores: Mapping[str, tuple[float, ...]]

    def multiplier(self, evidence: Evidence, config: AdviceSection) -> float | None:
        """Of the class itself, else of all with this scope and spread; None where neither has enough scores."""
        runs, spread = _class_of(evidence, config)
        pooled = sorted(itertools.chain(*(values for name, values in self.scores.items() if name.startswith(spread))))
        for scores in (self.scores.get(f"{spread}/{runs}", ()), pooled):
            quantile = conformal_quantile(scores, config.risk)
            if quantile is not None:
                return max(quantile, 0.0)
        return None


def conformal_quantile(ascending: Sequence[float], risk: float) -> float | None:
    """The value that a next score exceeds with probability at most `risk`, if exchangeable; None with too few."""
    index = math.ceil((len(ascending) + 1) * (1 - risk) - 1e-9)
    return ascending[index - 1] if 0 < index <= len(ascending) else None


def bound_of(evidence: Evidence, calibration: Calibration | None, config: AdviceSection) -> MemoryBound | None:
    """The bound that this evidence supports; None where it supports none.

    Runs of the same GPU count but other names support a bound only where the site's own record has calibrated
    such evidence: the normal theory says nothing of another program's memory.
    """
    number = len(evidence.peaks)
    if number < config.min_runs:
        return None
    multiplier = calibration.multiplier(evidence, config) if calibration else None
    method = CALIBRATED
    if multiplier is None:
        if evidence.scope != FAMILY:
            return None
        multiplier, method = student_t_quantile(1 - config.risk, number - 1), STUDENT_T
    centre, scale = evidence.centre_and_scale(config.min_relative_spread)
    if multiplier * scale > math.log(MAX_FACTOR):
        return None
    bound_mib = max(math.exp(centre + multiplier * scale), evidence.highest_mib)
    if evidence.censored_mib is not None:
        bound_mib = max(bound_mib, evidence.censored_mib + ABOVE_CAPACITY_MIB)
    return MemoryBound(bound_mib, config.risk, evidence.highest_mib, number, evidence.scope, method)


def student_t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit  # 0.1 s to import; only where a bound is not calibrated

    return max(float(stdtrit(degrees, probability)), 0.0)


def calibrate(cases: Iterable[Case], config: AdviceSection) -> Calibration:
    """Scores of past runs with enough evidence and a known peak.

    An array counts once (its first task, so that a thousand tasks are not a thousand proofs) and a family at most
    with its newest MAX_CASES_PER_GROUP runs. A peak that was cut off is scored at the capacity. That is exact for every
    tier up to the one it ran on: whether such a tier held it is known; only moves to a still larger one are not
    covered. Evidence that holds such a run is left out: it never leads to a tier that small.
    """
    scores: dict[str, list[float]] = {}
    for case in _counted(cases):
        if case.peak is None or len(case.evidence.peaks) < config.min_runs or case.evidence.censored_mib is not None:
            continue
        centre, scale = case.evidence.centre_and_scale(config.min_relative_spread)
        runs, spread = _class_of(case.evidence, config)
        scores.setdefault(f"{spread}/{runs}", []).append((math.log(case.peak.need_mib) - centre) / scale)
    return Calibration({name: tuple(sorted(values[-MAX_SCORES:])) for name, values in sorted(scores.items())})


def _counted(cases: Iterable[Case]) -> Iterator[Case]:
    """In order of time, an array once, of each family only the newest."""
    per_group: Counter[tuple[str, str]] = Counter()
    kept: list[Case] = []
    seen: set[tuple[str, str, int]] = set()
    for case in reversed(list(_first_of_arrays(cases, seen))):
        group = (case.submission.user, case.submission.name_key)
        per_group[group] += 1
        if per_group[group] <= MAX_CASES_PER_GROUP:
            kept.append(case)
    return reversed(kept)


def _first_of_arrays(cases: Iterable[Case], seen: set[tuple[str, str, int]]) -> Iterator[Case]:
    for case in cases:
        job = case.submission
        identity = (job.user, job.name_key, job.submit_s)
        if job.is_array and identity in seen:
            continue
        seen.add(identity)
        yield case


def _class_of(evidence: Evidence, config: AdviceSection) -> tuple[int, str]:
    """The bucket of the number of runs, and scope and bucket of their spread, such as (2, "family/0")."""
    _, scale = evidence.centre_and_scale(config.min_relative_spread)
    spread = bisect_left(SPREAD_EDGES, scale)
    return bisect_right(BUCKET_EDGES, len(evidence.peaks)), f"{evidence.scope}/{spread}"


@dataclass(frozen=True)
class BoundScores:
    """jobs: with a known peak; advised: given a bound; slack: bound over peak, geometric mean (NaN: none advised)."""

    jobs: int
    advised: int
    exceeded: int
    mean_slack: float

    @property
    def exceed_share(self) -> float:
        return self.exceeded / self.advised if self.advised else math.nan


def backtest_bound(history: pd.DataFrame, config: Config, share: float = 0.4, folds: int = 4) -> BoundScores:
    """Bounds of the newest `share` of jobs, each from what had ended before; recalibrated `folds` times on the way.

    A peak that was cut off at the capacity exceeds every bound that is not above that capacity.
    """
    cases = list(replay_peaks(history, config.advice, config.tiers))
    ends = history["end_s"].tolist()
    submits = np.array([case.submission.submit_s for case in cases])
    edges = [*np.quantile(submits, np.linspace(1 - share, 1, folds + 1)[:-1]), math.inf] if cases else []
    results = []
    for since_s, until_s in itertools.pairwise(edges):
        calibration = calibrate((case for case in cases if ends[case.row] < since_s), config.advice)
        tested = [case for case in cases if since_s <= case.submission.submit_s < until_s and case.peak]
        results += [(case, bound_of(case.evidence, calibration, config.advice)) for case in tested]
    ratios = [bound.bound_mib / case.peak.need_mib for case, bound in results if bound and case.peak]
    return BoundScores(
        jobs=len(results),
        advised=len(ratios),
        exceeded=sum(ratio < 1 for ratio in ratios),
        mean_slack=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan,
    )
