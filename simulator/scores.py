"""Scores of policies: distributions over jobs, by group, over time, between users, and against the first policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from advisor.backtest import Floats, Interval, Ints, bootstrap_mean
from almanac.units import DAY_S
from simulator.outcomes import JobOutcomes, PolicyRun

SHORT_S, LONG_S = 900, 21_600
LENGTHS = ("under 15 min", "15 min to 6 h", "over 6 h")
GROUPINGS = ("length", "gpu_count", "user", "partition", "tier", "kind")
LEAST_SPEED = 0.6
"""Packing must not slow a job down further."""
GPU_WATTS = (100.0, 437.5)
"""Watts of an idle and of a busy GPU, each with its share of the node: a DGX-1 takes 800 W and 3,500 W for 8 GPUs.

Source: Hu et al., SC'21, 4.3.3, and NVIDIA's data sheet."""


@dataclass(frozen=True)
class Distribution:
    """NaN without a known job."""

    mean: float
    median: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class GroupScores:
    """Scores of a group of jobs. jobs: scored. ended: with known outcomes. queued: those that waited more than 0 s."""

    jobs: int
    ended: int
    canceled: int
    queued: int
    jct_s: Distribution
    delay_s: Distribution
    slowdown: Distribution
    bounded_slowdown: Distribution


@dataclass(frozen=True)
class Comparison:
    """Against the first policy, over jobs that ended under both.

    jct_ratio: of the mean JCTs. The differences are this policy's value less the first one's, in seconds.
    worse_jobs: share of jobs whose JCT is longer. worse_users: share of users whose mean JCT is longer.
    """

    jobs: int
    jct_ratio: float
    jct_difference_s: Interval
    delay_difference_s: Interval
    worse_jobs: float
    worse_users: float


@dataclass(frozen=True)
class PolicyScores:
    """Scores of one policy on a trace.

    by: grouping (GROUPINGS) to group to scores; jobs without a value belong to no group of that grouping. energy_kwh,
    makespan_s: of the whole simulation. deadlines: number of jobs with one. deadlines_met: share of them. slow: share
    of the jobs that ran below LEAST_SPEED of their own speed. jain: Jain's index of the users' mean bounded slowdowns,
    1 if all users wait alike. details: see PolicyRun.
    """

    policy: str
    all_jobs: GroupScores
    by: Mapping[str, Mapping[str, GroupScores]]
    utilization: float
    energy_kwh: float
    makespan_s: float
    interruptions: int
    unfinished: Mapping[str, int]
    deadlines: int
    deadlines_met: float
    slow: float
    jain: float
    against_first: Comparison
    details: Mapping[str, Any]


def score_runs(
    jobs: pd.DataFrame, runs: Sequence[PolicyRun], first: int = 0, seed: int = 1, watts: tuple[float, float] = GPU_WATTS
) -> list[PolicyScores]:
    """Score the jobs from number `first` on, against the first run.

    jobs: submit_s, run_s, gpu_count, and user of each job; also partition, tier, kind, and deadline_s where they are
    known. seed: of the bootstrap, the same for each policy. watts: of an idle and of a busy GPU.
    """
    scored = np.arange(first, len(jobs))
    groups = {name: _groups(jobs, name, scored) for name in GROUPINGS if name == "length" or name in jobs}
    deadline_s = jobs["deadline_s"].to_numpy("float64") if "deadline_s" in jobs else np.full(len(jobs), -1.0)
    due = scored[deadline_s[scored] >= 0]
    return [
        PolicyScores(
            policy=run.policy,
            all_jobs=score_group(run.jobs, scored),
            by={
                name: {key: score_group(run.jobs, rows) for key, rows in each.items()} for name, each in groups.items()
            },
            utilization=run.utilization,
            energy_kwh=run.energy_kwh(*watts),
            makespan_s=run.makespan_s,
            interruptions=run.interruptions,
            unfinished=run.unfinished,
            deadlines=len(due),
            deadlines_met=_mean((run.jobs.end_s[due] <= deadline_s[due]).astype("float64")),
            slow=_mean((run.jobs.speed[scored][run.jobs.is_known[scored]] < LEAST_SPEED - 1e-9).astype("float64")),
            jain=jain_index([_mean(run.jobs.bounded_slowdown[rows]) for rows in groups["user"].values()]),
            against_first=compare(jobs, runs[0].jobs, run.jobs, scored, seed),
            details=run.details,
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


def _groups(jobs: pd.DataFrame, name: str, scored: Ints) -> dict[str, Ints]:
    """Numbers of the jobs of each group, in the order of length, number, or name."""
    if name == "length":
        codes, values = length_of(jobs["run_s"].to_numpy()[scored]), list(LENGTHS)
    else:
        codes, found = pd.factorize(jobs[name].to_numpy()[scored], sort=True)
        values = [str(value) for value in found.tolist()]
    ends = np.cumsum(np.bincount(codes, minlength=len(values)))
    parts = np.split(scored[np.argsort(codes, kind="stable")], ends[:-1])
    return {value: rows for value, rows in zip(values, parts, strict=True) if value}


def score_group(jobs: JobOutcomes, rows: Ints) -> GroupScores:
    """Score the jobs with these row numbers as one group."""
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
    """Return Jain's index, (sum x)^2 / (n sum x^2), in [1/n, 1] (Jain et al., 1984); NaN without a known value."""
    known = np.array([value for value in values if not math.isnan(value)])
    return float(known.sum() ** 2 / (len(known) * (known**2).sum())) if len(known) else math.nan


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def compare(table: pd.DataFrame, first: JobOutcomes, other: JobOutcomes, scored: Ints, seed: int) -> Comparison:
    """Compare two policies on the same jobs: each job is a pair. The bootstrap draws users, with all of their jobs.

    Jobs of unknown users are drawn by the day of their submission.
    """
    both = scored[(first.is_known & other.is_known)[scored]]
    jct_s, delay_s = ((after - before)[both] for after, before in (
        (other.jct_s, first.jct_s), (other.delay_s, first.delay_s)
    ))  # fmt: skip
    codes, users = pd.factorize(table["user"].to_numpy()[both])
    is_known = (users != "")[codes]
    days = (first.submit_s[both] // DAY_S).astype("int64")
    blocks, _ = pd.factorize(np.where(is_known, codes, -1 - days))
    longer_s = np.bincount(codes[is_known], jct_s[is_known], len(users))[users != ""]
    return Comparison(
        jobs=len(both),
        jct_ratio=_mean(other.jct_s[both]) / _mean(first.jct_s[both]),
        jct_difference_s=bootstrap_mean(jct_s, blocks, seed),
        delay_difference_s=bootstrap_mean(delay_s, blocks, seed),
        worse_jobs=_mean((jct_s > 1e-6).astype("float64")),
        worse_users=_mean((longer_s > 0).astype("float64")),
    )
