"""Scores of policies: distributions over jobs, by group, over time, between users, and against the first policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.outcomes.jobs import JobOutcomes
from simulator.outcomes.timeline import Timeline
from simulator.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SHORT_S, LONG_S = 900, 21_600
LENGTHS = ("under 15 min", "15 min to 6 h", "over 6 h")
GROUPINGS = ("length", "gpu_count", "user", "partition", "tier")
DRAWS = 1000
_DAY_S = 86_400


@dataclass(frozen=True)
class Distribution:
    """NaN where no job is known."""

    mean: float
    median: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class GroupScores:
    """jobs: those scored. ended: those with known outcomes. queued: those that waited more than 0 s."""

    jobs: int
    ended: int
    canceled: int
    queued: int
    jct_s: Distribution
    delay_s: Distribution
    slowdown: Distribution
    bounded_slowdown: Distribution


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Against the first policy, over jobs that ended under both.

    jct_ratio: of the mean JCTs. The differences are this policy's value less the first one's, in seconds.
    worse_users: share of users whose mean JCT is longer.
    """

    jobs: int
    jct_ratio: float
    jct_difference_s: Interval
    delay_difference_s: Interval
    worse_users: float


@dataclass(frozen=True)
class PolicyRun:
    """What one simulation leaves for scoring. unfinished: reason to number of all jobs, scored or not."""

    policy: str
    jobs: JobOutcomes
    timeline: Timeline
    preemptions: int
    makespan_s: int
    unfinished: Mapping[str, int]


@dataclass(frozen=True)
class PolicyScores:
    """by: grouping (GROUPINGS) to group to scores; jobs without a value belong to no group of that grouping.

    jain: Jain's index of the users' mean bounded slowdowns, 1 if all users wait alike.
    """

    policy: str
    all_jobs: GroupScores
    by: Mapping[str, Mapping[str, GroupScores]]
    utilization: float
    fragmentation: float
    waiting_jobs: float
    preemptions: int
    makespan_s: int
    unfinished: Mapping[str, int]
    jain: float
    against_first: Comparison


def score_runs(workload: Workload, runs: Sequence[PolicyRun], first: int = 0, seed: int = 1) -> list[PolicyScores]:
    """Score the jobs from number `first` on. seed: of the bootstrap, the same for each policy."""
    scored = np.arange(first, len(workload))
    groups = {name: _groups(workload, name, scored) for name in GROUPINGS}
    return [
        PolicyScores(
            policy=run.policy,
            all_jobs=score_group(run.jobs, scored),
            by={
                name: {key: score_group(run.jobs, rows) for key, rows in each.items()} for name, each in groups.items()
            },
            utilization=run.timeline.utilization,
            fragmentation=run.timeline.fragmentation,
            waiting_jobs=float(run.timeline.waiting_jobs.mean()),
            preemptions=run.preemptions,
            makespan_s=run.makespan_s,
            unfinished=run.unfinished,
            jain=jain_index([_mean(run.jobs.bounded_slowdown[rows]) for rows in groups["user"].values()]),
            against_first=compare(workload, runs[0].jobs, run.jobs, scored, seed),
        )
        for run in runs
    ]


def mean_of_draws(scores: Sequence[PolicyScores], policy: str) -> PolicyScores:
    """One score for several random draws of a policy: the mean of each figure."""
    mean: PolicyScores = _mean_figures(scores)
    return dataclasses.replace(mean, policy=policy)


def _mean_figures(values: Sequence[Any]) -> Any:
    one = values[0]
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [each.name for each in dataclasses.fields(one)]
        return type(one)(**{name: _mean_figures([getattr(value, name) for value in values]) for name in names})
    if isinstance(one, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean_figures([value[key] for value in values if key in value]) for key in keys}
    if isinstance(one, str):
        return one
    mean = float(np.mean(values))
    return round(mean) if isinstance(one, int) else mean


def length_of(run_s: Ints) -> Ints:
    """Place in LENGTHS of each run time."""
    return np.where(run_s < SHORT_S, 0, np.where(run_s <= LONG_S, 1, 2))


def _groups(workload: Workload, name: str, scored: Ints) -> dict[str, Ints]:
    """Numbers of the jobs of each group, in the order of length, number, or name."""
    if name == "length":
        codes, values = length_of(workload.array("run_s")[scored]), list(LENGTHS)
    else:
        codes, found = pd.factorize(workload.array(name)[scored], sort=True)
        values = [str(value) for value in found.tolist()]
    ends = np.cumsum(np.bincount(codes, minlength=len(values)))
    parts = np.split(scored[np.argsort(codes, kind="stable")], ends[:-1])
    return {value: rows for value, rows in zip(values, parts, strict=True) if value}


def score_group(jobs: JobOutcomes, rows: Ints) -> GroupScores:
    """rows: numbers of its jobs."""
    known = rows[jobs.is_known[rows]]
    return GroupScores(
        jobs=len(rows),
        ended=len(known),
        canceled=int(jobs.is_canceled[rows].sum()),
        queued=int((jobs.delay_s[known] > 0).sum()),
        jct_s=distribution(jobs.jct_s[known]),
        delay_s=distribution(jobs.delay_s[known]),
        slowdown=distribution(jobs.slowdown[known]),
        bounded_slowdown=distribution(jobs.bounded_slowdown[known]),
    )


def distribution(values: Floats) -> Distribution:
    if not len(values):
        return Distribution(*[math.nan] * 5)
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return Distribution(float(values.mean()), p50, p95, p99, float(values.max()))


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2), in [1/n, 1] (Jain et al., 1984); NaN without a known value."""
    known = np.array([value for value in values if not math.isnan(value)])
    return float(known.sum() ** 2 / (len(known) * (known**2).sum())) if len(known) else math.nan


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def compare(workload: Workload, first: JobOutcomes, other: JobOutcomes, scored: Ints, seed: int) -> Comparison:
    """Both policies ran the same jobs: each job is a pair. The bootstrap draws users, with all of their jobs.

    Jobs of unknown users are drawn by the day of their submission.
    """
    both = scored[(first.is_known & other.is_known)[scored]]
    jct_s, delay_s = ((after - before)[both] for after, before in (
        (other.jct_s, first.jct_s), (other.delay_s, first.delay_s)
    ))  # fmt: skip
    codes, users = pd.factorize(workload.array("user")[both])
    is_known = (users != "")[codes]
    days = workload.array("submit_s")[both] // _DAY_S
    blocks, _ = pd.factorize(np.where(is_known, codes, -1 - days))
    longer_s = np.bincount(codes[is_known], jct_s[is_known], len(users))[users != ""]
    return Comparison(
        jobs=len(both),
        jct_ratio=_mean(other.jct_s[both]) / _mean(first.jct_s[both]),
        jct_difference_s=bootstrap_mean(jct_s, blocks, seed),
        delay_difference_s=bootstrap_mean(delay_s, blocks, seed),
        worse_users=_mean((longer_s > 0).astype("float64")),
    )


def bootstrap_mean(values: Floats, blocks: Ints, seed: int) -> Interval:
    """The mean, with a percentile interval of DRAWS draws of whole blocks; NaN ends with fewer than two blocks."""
    count = int(blocks.max(initial=-1)) + 1
    if count < 2:
        return Interval(_mean(values), math.nan, math.nan)
    sums, sizes = np.bincount(blocks, values, count), np.bincount(blocks, minlength=count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    low, high = np.percentile((draws @ sums) / (draws @ sizes), (2.5, 97.5)).tolist()
    return Interval(_mean(values), low, high)
