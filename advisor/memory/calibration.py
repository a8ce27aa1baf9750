"""Learn how far above the highest need a bound must lie, class by class, from the site's own past.

Each past run is scored with the evidence that it had when it was submitted: (log need - centre) / scale. The margin of
a class of evidence is the split-conformal quantile of its scores (Vovk, Gammerman and Shafer 2005; Lei et al. 2018,
Distribution-free predictive inference, section 2): the guarantee is for the class, never for one family. The
scores of one family resemble each other, so that a bound keeps the standard error of the share above, over families
as clusters, free, and is stated only where its scores are worth those of enough families of equal size.

Jobs that are submitted together share their fate, and no outcome of theirs is known in time. So evidence is calibrated
apart by how many submissions of the family are open. A tier is advised sooner: while a number of open submissions has
few scores, by those of all evidence, and by the highest of the few.

The tier that is advised has a margin of its own. What counts there is whether that tier was exceeded (conformal risk
control, Angelopoulos et al. 2022), so needs are rounded down to the largest tier that is too small for them: a bound
above a tier's edge by little costs that tier much, and the job nothing. Where runs differ so much that no bound can be
stated, every one of them may still fit a tier: so a tier needs no bound.

The world drifts, and the bounds that are spoken are no random sample of all. So the risk that the quantile is taken
at follows the errors of the bounds that were given (adaptive conformal inference, Gibbs and Candes 2021,
eq. 2): after each outcome, risk_t += step * (risk - 1[the need was above the bound]), one track per scope and number of
open submissions. The errors of one user between two trainings count as one: nobody silences a site.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.backtest import Rate, rate_of
from advisor.memory.evidence import FAMILY, OPEN_EDGES, SIMILAR, Evidence
from advisor.memory.peak_store import Case
from almanac.config import AdviceSection, Tier
from almanac.records import MemoryBound
from almanac.units import DAY_S, counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RUN_EDGES = (8, 13, 25, 50, 100)
SPREAD_EDGES = (0.06, 0.12, 0.3)
TREND_EDGES = (1.5, 4.0)
"""Evidence is calibrated apart by its number of runs, how much they differ, and how surely they grow (a t value)."""
ANY = "names"
BOUND_ERRORS = 1.0
"""Standard errors that a bound keeps free. A tier needs none: few needs come near one's edge."""
BOUND_FAMILIES = 20
"""Families of equal size that a bound's scores must be worth (Kish's effective sample size)."""
ALL, FEW = "all", "few"
FEW_SCORES, FEW_FAMILIES = 20, 5
"""Least scores and families of a number of open submissions before a tier is advised by all evidence."""
STEP = 0.1
"""Step of adaptive conformal inference, as a share of the risk."""
MOST_RISK = 1.5
"""The tracked risk is at most so many times the accepted one: credit of quiet times is not spent on a bad day."""
RECOVERY_DAYS = 90
"""A scope that fell silent regains the accepted risk in so many days."""
MAX_SCORES = 20_000
MEASURED_DAYS = 90
"""The accepted risk is compared with what happened to the jobs submitted in so many days before the last one."""

Class = tuple[str, int, int, int, int]
"""Scope, open submissions, trend, spread and number of runs, as places in their edges."""


def class_of(evidence: Evidence) -> Class:
    return (
        evidence.scope,
        bisect_right(OPEN_EDGES, evidence.open_jobs),
        bisect_right(TREND_EDGES, evidence.trend),
        bisect_left(SPREAD_EDGES, evidence.spread),
        bisect_right(RUN_EDGES, evidence.runs),
    )


def class_name(evidence: Evidence) -> str:
    """The class in words, such as "family, steady, spread to 6%, 25-49 runs, 5-19 open"."""
    _, waiting, trend, spread, runs = class_of(evidence)
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
    least = (0, *OPEN_EDGES)[waiting]
    still = f"{least}-{OPEN_EDGES[waiting] - 1} open" if waiting < len(OPEN_EDGES) else f"{least} open or more"
    return f"{evidence.scope}, {('steady', 'perhaps growing', 'growing')[trend]}, {wide}, {many}, {still}"


def pools_of(kind: Class) -> tuple[str, ...]:
    """Return the classes in which a margin is looked up: the class itself, then wider ones.

    None of these holds better evidence, but the last, which has a margin for tiers alone.
    """
    scope, waiting, trend, spread, runs = kind
    return (
        f"{scope}/{waiting}/{trend}/{spread}/{runs}",
        f"{scope}/{waiting}/{trend}/*/{runs}",
        f"{scope}/{waiting}/{trend}/*/..{runs}",
        f"{ANY}/{waiting}/{trend}+/*/..{runs}",
        f"{FEW}/{waiting}/{trend}+",
    )


def _pools_fed_by(kind: Class) -> Iterator[str]:
    scope, waiting, trend, spread, runs = kind
    yield f"{scope}/{waiting}/{trend}/{spread}/{runs}"
    yield f"{scope}/{waiting}/{trend}/*/{runs}"
    for most in range(runs, len(RUN_EDGES) + 1):
        yield f"{scope}/{waiting}/{trend}/*/..{most}"
        for least in range(trend + 1):
            yield f"{ANY}/{waiting}/{least}+/*/..{most}"
    for least in range(trend + 1):
        yield f"{ALL}/{least}+"


class Margins(NamedTuple):
    """Distances above the center, in units of scale, at least 0: of the bound, and of what the advised tier must hold.

    None if there are too few scores for it.
    """

    bound: float | None
    tier: float | None


@dataclass(frozen=True)
class Calibration:
    """Margins per pool, at the accepted risk they were taken for; a pool with too few scores for both is not there.

    shared: by number of jobs on one GPU, the bound's margins at the risk divided by it.
    measured: of the jobs of MEASURED_DAYS that were advised a tier, those that needed more than it holds.
    """

    risk: float
    margins: Mapping[str, Margins] = field(default_factory=dict)
    shared: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    measured: Rate | None = None

    def told_risk(self, accepted: float) -> str:
        """Say the accepted risk that is set, and the one measured."""
        said = f"set {_percent(accepted)}"
        if self.risk != accepted:
            return f"{said}, trained at {_percent(self.risk)}"
        if self.measured is None:
            return f"{said}, not measured: no advised job of the last {MEASURED_DAYS} days has a known need"
        share, low, high = map(_percent, (self.measured.share, self.measured.low, self.measured.high))
        jobs = counted(self.measured.jobs, "advised job")
        return f"{said}, measured {share} over the last {MEASURED_DAYS} days [{low}, {high}], {jobs}"

    def of(self, evidence: Evidence) -> Margins | None:
        """Each margin from the first pool that has enough scores for it; None without one for the tier."""
        return self._of(class_of(evidence))

    def _of(self, kind: Class) -> Margins | None:
        found = [self.margins[pool] for pool in pools_of(kind) if pool in self.margins]
        bound = next((each.bound for each in found if each.bound is not None), None)
        tier = next((each.tier for each in found if each.tier is not None), None)
        return None if tier is None else Margins(bound, tier)

    def shared_margin(self, evidence: Evidence, jobs: int) -> float | None:
        """The bound's margin at the risk divided by `jobs`; None if every pool has too few scores for that.

        Bounds that each are exceeded with at most risk / n are exceeded by any of n jobs with at most the risk, however
        much the jobs depend on each other.
        """
        margins = self.shared.get(jobs, {})
        return next((margins[pool] for pool in pools_of(class_of(evidence)) if pool in margins), None)

    def most_open(self, evidence: Evidence) -> int | None:
        """Return the number of open submissions below which such evidence has margins; None if there is none."""
        scope, waiting, trend, spread, runs = class_of(evidence)
        fewer = range(waiting - 1, -1, -1)
        return next((OPEN_EDGES[place] for place in fewer if self._of((scope, place, trend, spread, runs))), None)

    def lacks_growing(self, evidence: Evidence) -> bool:
        """Return True if the same evidence would have margins without growing needs."""
        scope, waiting, trend, spread, runs = class_of(evidence)
        return trend > 0 and self._of((scope, waiting, 0, spread, runs)) is not None


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


@dataclass
class _MarginPool:
    """Scores of needs and of tiers, and the families they came from, oldest first."""

    needs: array[float] = field(default_factory=lambda: array("d"))
    edges: array[float] = field(default_factory=lambda: array("d"))
    families: array[int] = field(default_factory=lambda: array("q"))

    def add(self, need: float, edge: float, family: int) -> None:
        self.needs.append(need)
        self.edges.append(edge)
        self.families.append(family)
        if len(self.needs) > 2 * MAX_SCORES:
            del self.needs[:MAX_SCORES], self.edges[:MAX_SCORES], self.families[:MAX_SCORES]

    def margins(self, bound_risk: float, tier_risk: float) -> Margins | None:
        families = np.frombuffer(self.families, dtype=np.int64)
        bound = self.bound_margin(bound_risk)
        tier = conformal_margin(np.frombuffer(self.edges), families, tier_risk)
        if bound is None and tier is None:
            return None
        return Margins(bound, None if tier is None else max(tier, 0.0))

    def bound_margin(self, risk: float) -> float | None:
        families = np.frombuffer(self.families, dtype=np.int64)
        margin = conformal_margin(np.frombuffer(self.needs), families, risk, BOUND_ERRORS)
        return None if margin is None else max(margin, 0.0)

    def highest_edge(self) -> float | None:
        """None with too few scores to go by."""
        if len(self.edges) < FEW_SCORES or len(set(self.families)) < FEW_FAMILIES:
            return None
        return max(self.edges)


def conformal_margin(scores: Floats, families: Ints, risk: float, errors: float = 0.0) -> float | None:
    """The smallest score that a next one exceeds with probability at most `risk`; None with too few scores.

    Split-conformal: with k of n scores above it, (k + 1) / (n + 1) <= risk. `errors` standard errors of the share
    above, over families as clusters, are kept free as well; there must be BOUND_FAMILIES then.
    """
    number = len(scores)
    most = min(int(risk * (number + 1) + 1e-9), number)
    if most < 1:
        return None
    if not errors:
        return float(np.partition(scores, number - most)[number - most])
    top = np.argpartition(scores, number - most)[number - most :]
    top = top[np.argsort(-scores[top], kind="stable")]
    sizes = np.bincount(families)
    squares = float(sizes @ sizes)
    if number * number < BOUND_FAMILIES * squares:
        return None
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
        above_sizes += float(sizes[family])
    return best


class _Tracks:
    """The risks that quantiles are taken at, one per scope and number of open submissions."""

    def __init__(self, risk: float) -> None:
        self._risk = risk
        self._risks = {(scope, waiting): risk for scope in (FAMILY, SIMILAR) for waiting in range(len(OPEN_EDGES) + 1)}
        self._steps: defaultdict[tuple[tuple[str, int], str], float] = defaultdict(float)

    def observe(self, kind: Class, user: str, is_error: bool) -> None:
        self._steps[kind[:2], user] += self._risk - is_error

    def follow(self, days: float) -> None:
        """Take the steps that were observed, and let time pass: tracks below the accepted risk regain it."""
        risk = self._risk
        for (track, _), step in self._steps.items():
            followed = self._risks[track] + STEP * risk * max(step, risk - 1)
            self._risks[track] = min(max(followed, 0.0), MOST_RISK * risk)
        self._steps.clear()
        for track, tracked in self._risks.items():
            if tracked < risk:
                self._risks[track] = min(tracked + risk * days / RECOVERY_DAYS, risk)

    def of(self, pool: str) -> float:
        scope, waiting, *_ = pool.split("/")
        scopes = (scope,) if scope in (FAMILY, SIMILAR) else (FAMILY, SIMILAR)
        return min(self._risks[each, int(waiting)] for each in scopes)


class Calibrator:
    """Absorbs outcomes in the order in which they are known; gives the calibration of the moment."""

    def __init__(self, config: AdviceSection, tiers: Sequence[Tier] = ()) -> None:
        self._config = config
        self._usable_mib = sorted({float(tier.capacity_mib - config.headroom_mib) for tier in tiers})
        self._pools: dict[str, _MarginPool] = {}
        self._families: dict[tuple[str, str, int], int] = {}
        self._arrays: set[tuple[str, str, int]] = set()
        self._bounds, self._tiers = _Tracks(config.risk), _Tracks(config.risk)
        self._judged: dict[Hashable, tuple[int, str, bool]] = {}

    def absorb(self, case: Case, bound: MemoryBound | None) -> None:
        """The outcome of a case whose evidence supports a score, and what bound it was given.

        An array counts once (its first task, so that a thousand tasks are not a thousand proofs). A need that was cut
        off is scored at the capacity. That is exact for every tier up to the one it ran on: whether such a tier held it
        is known. Evidence that was cut off itself never leads to a bound, and gives no score.
        """
        job, evidence, run = case.submission, case.evidence, case.run
        self._judge(case, bound)
        if run is None or not run.is_known or not evidence.supports_tier(self._config.min_runs):
            return
        identity = (job.user, job.name_key, job.submit_s)
        if job.is_array and identity in self._arrays:
            return
        self._arrays.add(identity)
        centre, scale = evidence.centre_and_scale()
        edge_mib = self._too_small_mib(run.need_mib)
        need = (math.log(run.need_mib) - centre) / scale
        edge = (math.log(edge_mib) - centre) / scale if edge_mib > 0 else -math.inf
        key = job.script_key if evidence.is_of_script else job.name_key
        family = self._families.setdefault((job.user, key, job.gpu_count), len(self._families))
        kind = class_of(evidence)
        for name in _pools_fed_by(kind):
            self._pools.setdefault(name, _MarginPool()).add(need, edge, family)
        if bound is None:
            return
        if bound.bound_mib is not None:
            self._bounds.observe(kind, job.user, run.need_mib > bound.bound_mib)
        if not self._usable_mib or bound.tier_mib <= self._usable_mib[-1]:
            self._tiers.observe(kind, job.user, bound.tier_mib <= edge_mib)

    def _judge(self, case: Case, bound: MemoryBound | None) -> None:
        """Keep the outcome of the tier for a bound. A failed run is no proof that it held. An array counts once."""
        job, run = case.submission, case.run
        if run is None or bound is None:
            return
        is_over = bound.tier_mib <= self._too_small_mib(run.need_mib)
        if (run.is_known or is_over) and (not self._usable_mib or bound.tier_mib <= self._usable_mib[-1]):
            key = (job.user, job.name_key, job.submit_s) if job.is_array else len(self._judged)
            self._judged.setdefault(key, (job.submit_s, job.user, is_over))

    def measured(self) -> Rate | None:
        """Return the share of tiers that were exceeded, of the jobs submitted in the last MEASURED_DAYS."""
        judged = pd.DataFrame([*self._judged.values()], columns=["submit_s", "user", "is_over"])
        recent = judged[judged["submit_s"] >= judged["submit_s"].max() - MEASURED_DAYS * DAY_S]
        return rate_of(recent["is_over"], recent["user"]) if len(recent) else None

    def _too_small_mib(self, need_mib: float) -> float:
        """The usable memory of the largest tier that does not hold a need: a tier chosen for less was exceeded.

        0 where the smallest tier holds it. Without tiers the need itself.
        """
        if not self._usable_mib:
            return need_mib
        place = bisect_left(self._usable_mib, need_mib)
        return self._usable_mib[place - 1] * (1 + 1e-9) if place else 0.0

    def shared(self, most_jobs: int) -> dict[int, dict[str, float]]:
        """Margins of bounds for 2 to most_jobs jobs on one GPU, by the risks as they were last followed."""
        found: dict[int, dict[str, float]] = {jobs: {} for jobs in range(2, most_jobs + 1)}
        for name, pool in self._pools.items():
            for jobs, margins in found.items() if not name.startswith(ALL) else ():
                margin = pool.bound_margin(self._bounds.of(name) / jobs)
                if margin is not None:
                    margins[name] = margin
        return found

    def calibration(self, days: float = 0.0) -> Calibration:
        """Return the margins as they stand now.

        days: days since the last call, in which silent scopes regain their risk.
        """
        self._bounds.follow(days)
        self._tiers.follow(days)
        margins = {}
        for name, pool in self._pools.items():
            found = pool.margins(self._bounds.of(name), self._tiers.of(name)) if not name.startswith(ALL) else None
            if found is not None:
                margins[name] = found
        return Calibration(self._config.risk, margins | self._few())

    def _few(self) -> dict[str, Margins]:
        """By number of open submissions: the tier's margin by all evidence, and by the highest score of their own."""
        found = {}
        for waiting, trend in product(range(len(OPEN_EDGES) + 1), range(len(TREND_EDGES) + 1)):
            name, own = f"{FEW}/{waiting}/{trend}+", self._pools.get(f"{ANY}/{waiting}/0+/*/..{len(RUN_EDGES)}")
            highest = own.highest_edge() if own else None
            pool = self._pools.get(f"{ALL}/{trend}+")
            every = pool.margins(0.0, self._tiers.of(name)) if pool and highest is not None else None
            if highest is not None and every is not None and every.tier is not None:
                found[name] = Margins(None, max(every.tier, highest))
        return found
