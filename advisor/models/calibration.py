"""How far above the highest need a bound must lie: learned from what the site's own past came to, class by class.

Each past run is scored with the evidence that it had when it was submitted: (log need - centre) / scale. The margin of
a class of evidence is the split-conformal quantile of its scores (Vovk, Gammerman and Shafer 2005; Lei et al. 2018,
Distribution-free predictive inference, section 2): the guarantee is for the class, never for one family. The
scores of one family resemble each other, so that a part of the standard error of the share above, over families as
clusters, is kept free.

The world drifts, and the bounds that are spoken are no random sample of all. So the risk that the quantile is taken
at follows the errors of the bounds that were given (adaptive conformal inference, Gibbs and Candes 2021,
eq. 2): after each outcome, risk_t += step * (risk - 1[the need was above the bound]), one track per scope.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from advisor.models.evidence import FAMILY, SIMILAR, Evidence
from advisor.models.peak_store import Case
from almanac.config import AdviceSection

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RUN_EDGES = (8, 13, 25, 50, 100)
SPREAD_EDGES = (0.06, 0.12, 0.3)
TREND_EDGES = (1.5, 4.0)
"""Evidence is calibrated apart by its number of runs, how much they differ, and how surely they grow (a t value)."""
ANY = "names"
STANDARD_ERRORS = 0.5
STEP = 0.1
"""Of adaptive conformal inference, as a share of the risk."""
MOST_RISK = 1.5
"""The tracked risk is at most so many times the accepted one: credit of quiet times is not spent on a bad day."""
RECOVERY_DAYS = 90
"""A scope that fell silent regains the accepted risk in so many days."""
MAX_SCORES = 20_000

Class = tuple[str, int, int, int]
"""Scope, trend, spread and number of runs, as places in the edges above."""


def class_of(evidence: Evidence) -> Class:
    return (
        evidence.scope,
        bisect_right(TREND_EDGES, evidence.trend),
        bisect_left(SPREAD_EDGES, evidence.spread),
        bisect_right(RUN_EDGES, evidence.runs),
    )


def class_name(evidence: Evidence) -> str:
    """The class in words, such as "family, steady, spread to 6%, 25-49 runs"."""
    _, trend, spread, runs = class_of(evidence)
    if runs == 0:
        many = f"fewer than {RUN_EDGES[0]} runs"
    elif runs == len(RUN_EDGES):
        many = f"{RUN_EDGES[-1]} runs or more"
    else:
        many = f"{RUN_EDGES[runs - 1]}-{RUN_EDGES[runs] - 1} runs"
    wide = (
        f"spread to {SPREAD_EDGES[spread]:.0%}"
        if spread < len(SPREAD_EDGES)
        else f"spread above {SPREAD_EDGES[-1]:.0%}"
    )
    return f"{evidence.scope}, {('steady', 'perhaps growing', 'growing')[trend]}, {wide}, {many}"


def pools_of(kind: Class) -> tuple[str, ...]:
    """Where the margin of a class is looked up: the class, then wider ones, none of which holds better evidence."""
    scope, trend, spread, runs = kind
    return (
        f"{scope}/{trend}/{spread}/{runs}",
        f"{scope}/{trend}/*/{runs}",
        f"{scope}/{trend}/*/..{runs}",
        f"{ANY}/{trend}/*/..{runs}",
    )


def _pools_fed_by(kind: Class) -> Iterator[str]:
    scope, trend, spread, runs = kind
    yield f"{scope}/{trend}/{spread}/{runs}"
    yield f"{scope}/{trend}/*/{runs}"
    for most in range(runs, len(RUN_EDGES) + 1):
        yield f"{scope}/{trend}/*/..{most}"
        yield f"{ANY}/{trend}/*/..{most}"


@dataclass(frozen=True)
class Calibration:
    """Margins per pool, at the accepted risk they were taken for; a pool with too few scores is not there."""

    risk: float
    margins: Mapping[str, float] = field(default_factory=dict)

    def margin(self, evidence: Evidence) -> float | None:
        """In units of scale, at least 0; None where no pool of this evidence has enough scores."""
        for pool in pools_of(class_of(evidence)):
            if pool in self.margins:
                return self.margins[pool]
        return None


@dataclass
class _Pool:
    """Scores and the families they came from, oldest first."""

    scores: list[float] = field(default_factory=list)
    families: list[int] = field(default_factory=list)

    def add(self, score: float, family: int) -> None:
        self.scores.append(score)
        self.families.append(family)
        if len(self.scores) > 2 * MAX_SCORES:
            del self.scores[:MAX_SCORES], self.families[:MAX_SCORES]

    def margin(self, risk: float) -> float | None:
        return conformal_margin(np.array(self.scores), np.array(self.families), risk)


def conformal_margin(scores: Floats, families: Ints, risk: float, errors: float = STANDARD_ERRORS) -> float | None:
    """The smallest score that a next one exceeds with probability at most `risk`; None with too few scores.

    Split-conformal: with k of n scores above it, (k + 1) / (n + 1) <= risk. `errors` standard errors of the share
    above, over families as clusters, are kept free as well.
    """
    number = len(scores)
    most = min(int(risk * (number + 1) + 1e-9), number)
    if most < 1:
        return None
    top = np.argpartition(scores, number - most)[number - most :]
    top = top[np.argsort(-scores[top], kind="stable")]
    sizes = Counter(families.tolist())
    squares = math.fsum(size * size for size in sizes.values())
    above: Counter[int] = Counter()
    above_squares = above_sizes = 0.0
    best = None
    for rank, place in enumerate(top.tolist()):
        share = (rank + 1) / (number + 1)
        variance = max(above_squares - 2 * share * above_sizes + share * share * squares, 0.0)
        if share + errors * math.sqrt(variance) / number <= risk:
            best = float(scores[place])
        family = int(families[place])
        above_squares += 2 * above[family] + 1
        above[family] += 1
        above_sizes += sizes[family]
    return best


class Calibrator:
    """Absorbs outcomes in the order in which they are known; gives the calibration of the moment."""

    def __init__(self, config: AdviceSection) -> None:
        self._config = config
        self._pools: dict[str, _Pool] = {}
        self._families: dict[tuple[str, str, int], int] = {}
        self._arrays: set[tuple[str, str, int]] = set()
        self._risks = dict.fromkeys((FAMILY, SIMILAR), config.risk)

    def absorb(self, case: Case, bound_mib: float | None) -> None:
        """The outcome of a case whose evidence supports a score, and what bound it was given.

        An array counts once (its first task, so that a thousand tasks are not a thousand proofs). A need that was cut
        off is scored at the capacity. That is exact for every tier up to the one it ran on: whether such a tier held it
        is known. Evidence that was cut off itself never leads to a bound, and gives no score.
        """
        job, evidence, run = case.submission, case.evidence, case.run
        if run is None or not run.is_known or not evidence.supports_bound(self._config.min_runs):
            return
        identity = (job.user, job.name_key, job.submit_s)
        if job.is_array and identity in self._arrays:
            return
        self._arrays.add(identity)
        centre, scale = evidence.centre_and_scale(self._config.min_relative_spread)
        score = (math.log(run.need_mib) - centre) / scale
        family = self._families.setdefault((job.user, job.name_key, job.gpu_count), len(self._families))
        for name in _pools_fed_by(class_of(evidence)):
            pool = self._pools.setdefault(name, _Pool())
            pool.add(score, family)
        if bound_mib is not None:
            self._follow(evidence.scope, run.need_mib > bound_mib)

    def _follow(self, scope: str, is_error: bool) -> None:
        risk = self._config.risk
        followed = self._risks[scope] + STEP * risk * (risk - is_error)
        self._risks[scope] = min(max(followed, 0.0), MOST_RISK * risk)

    def recover(self, days: float) -> None:
        """Let time pass: scopes below the accepted risk regain it."""
        risk = self._config.risk
        for scope, tracked in self._risks.items():
            if tracked < risk:
                self._risks[scope] = min(tracked + risk * days / RECOVERY_DAYS, risk)

    def calibration(self) -> Calibration:
        margins = {}
        for name, pool in self._pools.items():
            scope = name.split("/")[0]
            risk = min(self._risks.values()) if scope == ANY else self._risks[scope]
            margin = pool.margin(risk)
            if margin is not None:
                margins[name] = max(margin, 0.0)
        return Calibration(self._config.risk, margins)
