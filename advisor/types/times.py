"""Run time of a job family or submission on each GPU type, with an interval and its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
import pandas as pd

from advisor.duration.blend import COVERAGE
from advisor.duration.features import submission_of
from advisor.types.decide import TypeRunTime
from advisor.types.learning import (
    OF_CLASS,
    SITE,
    UNKNOWN_HARDWARE,
    Effect,
    Level,
    SpeedTable,
    contrasts,
    learn_speeds,
    levels_of,
    of_one_user,
    posterior,
    specified,
)
from advisor.types.runs import FamilyKey, FamilyRuns, families_of, learn_types, load_speed_runs, runs_of
from almanac.config import Config
from almanac.records import JobRequest, MemoryBound
from almanac.units import DAY_S
from telemetry.site import Site

Source = Literal["own runs", "own rates", "other families", "specifications"]
OWN_RUNS: Final = "own runs"
OWN_RATES: Final = "own rates"
OTHER_FAMILIES: Final = "other families"
SPECIFICATIONS: Final = "specifications"
OTHER_COUNT = 0.2
"""Standard deviation of ln speed ratio between GPU counts of one name (own choice; Gavel's table: 0.1 to 0.5)."""
OTHER_NAMES = 30
"""Families of a user that count for another one."""
FREEDOM = 20
"""Degrees of freedom of Student's t: standard deviations are estimates, too (own choice)."""
_LONGEST_S = 10 * 365 * 86_400
"""No time is stated above this, and none below 1 s."""


@dataclass(frozen=True)
class TypeTime(TypeRunTime):
    """The run time of a family. deviation, spread: standard deviations of ln usual time, and of ln time between runs.

    A single run varies more than the usual time: see `next_run`. longest_s: about one run in ten exceeds it.
    """

    deviation: float = field(default=0.0, compare=False)
    spread: float = field(default=0.0, compare=False)

    def next_run(self, coverage: float = 0.8) -> tuple[float, float]:
        """Return (low, high) in s that hold one run with this probability."""
        return _around(math.log(self.run_s), _quantile(coverage) * math.hypot(self.deviation, self.spread))


def _around(middle: float, wide: float) -> tuple[float, float]:
    return _clipped(middle - wide), _clipped(middle + wide)


@dataclass(frozen=True)
class MemoryFit:
    """Memory that one GPU must hold. bound_mib: the family's memory bound, None if unknown; headroom_mib: for no job.

    is_checked: False to trust that the family fits everywhere.
    """

    bound_mib: float | None = None
    headroom_mib: float = 0.0
    is_checked: bool = True

    def types(self, table: SpeedTable, names: Sequence[str], ran: Iterable[str]) -> list[str]:
        """The names whose GPUs hold the family. Of unknown capacity: none, unless the family completed runs there.

        Without a bound, GPUs at least as large as the smallest on which the family completed runs hold it.
        """
        if not self.is_checked:
            return list(names)
        done = set(ran)
        capacities = {name: table.types.capacity_mib(name) for name in names}
        known = [mib for name, mib in capacities.items() if mib is not None and name in done]
        least = self.bound_mib + self.headroom_mib if self.bound_mib is not None else min(known, default=math.inf)
        return [
            name
            for name, mib in capacities.items()
            if (mib >= least if mib is not None else self.bound_mib is None and name in done)
            or (self.bound_mib is None and name in done)
        ]


def family_times(
    key: FamilyKey,
    families: Mapping[FamilyKey, FamilyRuns],
    table: SpeedTable,
    fit: MemoryFit | None = None,
    coverage: float = 0.8,
) -> tuple[TypeTime, ...]:
    """The times of a family on every type that holds it, fastest first; () if none of its runs completed.

    families: of the user, or of everybody. The user's other families count more than those of others, and those of the
    same name with other GPU counts the most.
    """
    runs = families.get(key)
    times = runs.log_times() if runs else {}
    if runs is None or not times:
        return ()
    names = [*table.names, *sorted(runs.types - set(table.names))]
    effect = _of_user(key, families, table, names, _effect(table, names, runs.roofline))
    levels = levels_of(runs, table.spread, table.rate_bias)
    found = posterior(
        names,
        specified(runs, names, table.types) + effect.mean,
        effect.covariance + table.of_family**2 * np.eye(len(names)),
        [*levels, *_of_other_counts(key, families, table)],
    )
    if found is None:
        return ()
    width = _quantile(coverage)
    told = []
    for name in (fit or MemoryFit()).types(table, names, times):
        place = names.index(name)
        middle, deviation = (float(each[place]) for each in found)
        source = _source(name, levels, table)
        if source is None:
            continue
        run_s, (low_s, high_s), spread = _clipped(middle), _around(middle, width * deviation), levels[0].spread
        longest_s = max(high_s, _around(math.log(run_s), _quantile(0.8) * math.hypot(deviation, spread))[1])
        own_runs = len(times.get(name, ()))
        told.append(TypeTime(name, run_s, low_s, high_s, longest_s, own_runs, source, deviation, spread))
    return tuple(sorted(told, key=lambda each: (each.run_s, each.gpu_type)))


def _effect(table: SpeedTable, names: Sequence[str], roofline: str) -> Effect:
    """The effect of the class, with types that the table lacks: only their hardware is known."""
    known = table.effects.get(roofline) or table.effects.get("")
    held = len(table.names) if known else 0
    mean, covariance = np.zeros(len(names)), np.zeros((len(names), len(names)))
    if known:
        mean[:held], covariance[:held, :held] = known.mean, known.covariance
    for place in range(held, len(names)):
        has_peaks = table.types.hardware(names[place]) is not None
        covariance[place, place] = (SITE if has_peaks else UNKNOWN_HARDWARE) ** 2 + OF_CLASS**2
    return Effect(mean, covariance)


def _of_user(
    key: FamilyKey, families: Mapping[FamilyKey, FamilyRuns], table: SpeedTable, names: Sequence[str], effect: Effect
) -> Effect:
    """The effect for the family's user, from their newest families of other names with runs on at least two types."""
    others = [
        runs
        for other, runs in sorted(families.items())
        if other.user == key.user and other.name_key != key.name_key and len(runs.types) > 1
    ]
    others = sorted(others, key=lambda runs: runs.newest_s)[-OTHER_NAMES:]
    roofline = families[key].roofline
    variances = [table.of_family**2 + (0.0 if runs.roofline == roofline else 2 * OF_CLASS**2) for runs in others]
    seen = [contrasts(runs, names, table.types, table.spread, table.rate_bias) for runs in others]
    return of_one_user(effect, table.of_user, seen, np.array(variances))


def _of_other_counts(key: FamilyKey, families: Mapping[FamilyKey, FamilyRuns], table: SpeedTable) -> list[Level]:
    """Levels of the same user's runs under the same name with other GPU counts, on at least two types."""
    return [
        level
        for other, runs in sorted(families.items())
        if other[:2] == key[:2] and other != key and len(runs.types) > 1
        for level in levels_of(runs, table.spread, table.rate_bias, OTHER_COUNT)
        if len(level.values) > 1
    ]


def _source(name: str, levels: Sequence[Level], table: SpeedTable) -> Source | None:
    """The best evidence for a type; None if there is none at all: hardware unknown, and nobody ran there."""
    times, rates = levels
    if name in times.values:
        return OWN_RUNS
    if name in rates.values and set(rates.values) & set(times.values):
        return OWN_RATES
    if table.families.get(name):
        return OTHER_FAMILIES
    return SPECIFICATIONS if table.types.hardware(name) else None


def _clipped(log_s: float) -> float:
    return math.exp(min(max(log_s, 0.0), math.log(_LONGEST_S)))


def _quantile(coverage: float) -> float:
    """Half the width of a central interval of Student's t, by its expansion (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + coverage / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / FREEDOM + second / FREEDOM**2


def learn_site_speeds(jobs: pd.DataFrame, config: Config, now_s: int) -> SpeedTable:
    """Learn speeds from jobs submitted in the last 120 days that ended before now_s. Pure.

    jobs: `load_speed_runs` of all users.
    """
    known = known_runs(jobs, config, now_s)
    types = learn_types(known, config.tiers)
    return learn_speeds(families_of(runs_of(known, types)), types)


def known_runs(jobs: pd.DataFrame, config: Config, now_s: int) -> pd.DataFrame:
    """The rows that count at now_s, oldest end first."""
    ends = jobs["end_s"].to_numpy(dtype="float64", na_value=np.nan)
    is_known = (ends < now_s) & (jobs["submit_s"].to_numpy(dtype="int64") >= now_s - config.advice.history_days * DAY_S)
    return jobs[is_known].sort_values(["end_s", "job_id", "submit_s"], kind="stable")


def user_families(jobs: pd.DataFrame, table: SpeedTable, config: Config, now_s: int) -> dict[FamilyKey, FamilyRuns]:
    """The families of these jobs, by the site's names of types. jobs: `load_speed_runs` of the users. Pure."""
    return families_of(runs_of(known_runs(jobs, config, now_s), table.types))


def request_times(
    request: JobRequest,
    families: dict[FamilyKey, FamilyRuns],
    table: SpeedTable,
    bound: MemoryBound | None,
    config: Config,
) -> tuple[TypeTime, ...]:
    """The run time of a submission on each GPU type that holds it; () without completed runs like it. Pure.

    families: `user_families` of the user. bound: of the submission's advice. A bound that was not stated in MiB, but
    leads to a tier, counts with the memory that the tier must have.
    """
    job = submission_of(request, config.tiers)
    need_mib = None
    if bound is not None:
        need_mib = bound.bound_mib if bound.bound_mib is not None else bound.tier_mib
    fit = MemoryFit(need_mib, float(config.advice.headroom_mib))
    key = FamilyKey(job.user, job.name_key, job.gpu_count)
    return family_times(key, families, table, fit, COVERAGE)


def stored_times(site: Site, request: JobRequest, table: SpeedTable, bound: MemoryBound | None) -> tuple[TypeTime, ...]:
    """Return `request_times` from the user's jobs in the store. Raises StoreError."""
    if len(table.names) < 2:
        return ()
    runs = load_speed_runs(site.store, user=request.user)
    return request_times(request, user_families(runs, table, site.config, site.now_s()), table, bound, site.config)
