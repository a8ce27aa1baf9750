"""Does a bound of the run time keep its risk of cutting a job, and what would it buy with EASY? (docs/what-pays.md)

Run: python benchmarks/time_limits.py. The bound of a submission is a factor over the longest of its family's runs that
had ended. Each day calibrates the factor on jobs that had ended, by class (split-conformal, bursts weighted).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from figures import Figure, main
from rank_choice import Simulated, nodes_for, record_of, run

from advisor.duration.features import has_ended
from almanac.units import DAY_S
from simulator.policies.base import Fifo
from simulator.workload import Workload, make_workload

Floats = npt.NDArray[np.float64]
LEAST_RUNS, NEWEST, MOST_OPEN, LEAST_FACTOR, LEAST_SCORES = 8, 50, 5, 1.5, 100
WORTH, LATE, BURST_S = 0.75, 0.4, 1800
RISKS, FOLLOW, GOALS, DRAWS = (0.01, 0.05), 1 / 3, (0.71, 0.9), 4


@dataclass(frozen=True)
class Jobs:
    """Job by job, by submission. longest_s: of the family's ended runs; kind: class, -1 without enough runs."""

    submit_s: Floats
    run_s: Floats
    end_s: Floats
    limit_s: Floats
    gpus: Floats
    user: npt.NDArray[np.int64]
    burst: npt.NDArray[np.int64]
    longest_s: Floats
    kind: npt.NDArray[np.int64]


def jobs_of(name: str) -> Jobs:
    history = record_of(name)
    history = history[has_ended(history)].sort_values("submit_s", kind="stable", ignore_index=True)
    columns = ("submit_s", "elapsed_s", "end_s", "time_limit_s", "gpu_count")
    submit_s, run_s, end_s, limit_s, gpus = (history[each].to_numpy("float64", na_value=np.nan) for each in columns)
    run_s, user = np.maximum(run_s, 1.0), pd.factorize(history["user"])[0]
    families = history.groupby(["user", "name_key", "gpu_count"], dropna=False).ngroup().tolist()
    longest_s, kind = np.full(len(run_s), np.nan), np.full(len(run_s), -1)
    ended, waiting, running = defaultdict[int, list[float]](list), list[tuple[float, int]](), defaultdict[int, int](int)
    for row, family in enumerate(families):
        while waiting and waiting[0][0] < submit_s[row]:
            _, past = heapq.heappop(waiting)
            ended[families[past]].append(run_s[past])
            running[families[past]] -= 1
        known = ended[family][-NEWEST:]
        if len(known) >= LEAST_RUNS and running[family] < MOST_OPEN:
            longest_s[row], spread = max(known), float(np.std(np.log(known)))
            kind[row] = 3 * int(np.digitize(spread, [0.2, 0.6])) + int(np.digitize(len(known), [16, 40]))
        heapq.heappush(waiting, (end_s[row], row))
        running[family] += 1
    order = np.lexsort((submit_s, user))
    is_first = (np.diff(user[order], prepend=-1) != 0) | (np.diff(submit_s[order], prepend=0) > BURST_S)
    burst = np.empty(len(user), dtype="int64")
    burst[order] = np.cumsum(is_first)
    return Jobs(submit_s, run_s, end_s, np.where(limit_s > 0, limit_s, math.inf), gpus, user, burst, longest_s, kind)


def bounds(jobs: Jobs, risk: float) -> Floats:
    """Seconds; NaN where the evidence supports none, or where the limit is not much longer."""
    factor, day = jobs.run_s / jobs.longest_s, jobs.submit_s // DAY_S
    found = np.full(len(day), math.nan)
    for today, kind in {*zip(day[jobs.kind >= 0].tolist(), jobs.kind[jobs.kind >= 0].tolist(), strict=True)}:
        past = np.flatnonzero((jobs.kind == kind) & (jobs.end_s < today * DAY_S))
        if len(past) < LEAST_SCORES:
            continue
        _, place, count = np.unique(jobs.burst[past], return_inverse=True, return_counts=True)
        weights, order = 1 / np.sqrt(count[place]), np.argsort(factor[past])
        reached = np.cumsum(weights[order]) / (weights.sum() + weights.max())
        last = int(np.searchsorted(reached, 1 - risk))
        if weights.sum() ** 2 / (weights**2).sum() >= 1 / risk and last < len(order):
            rows = (day == today) & (jobs.kind == kind)
            found[rows] = jobs.longest_s[rows] * max(LEAST_FACTOR, factor[past][order[last]])
    return np.where(found <= WORTH * jobs.limit_s, np.ceil(found), math.nan)


def interval(is_cut: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64]) -> tuple[float, float]:
    """95% interval of the share, from draws of groups."""
    of = np.unique(groups, return_inverse=True)[1]
    cut, jobs = np.bincount(of, is_cut), np.bincount(of)
    drawn = np.random.default_rng(1).integers(0, len(jobs), (2000, len(jobs)))
    low, high = np.percentile(cut[drawn].sum(axis=1) / jobs[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def risk_figures(name: str, jobs: Jobs, risk: float) -> Iterator[Figure]:
    late = jobs.submit_s >= jobs.submit_s[0] + LATE * np.ptp(jobs.submit_s)
    bound_s = bounds(jobs, risk)
    said = late & np.isfinite(bound_s)
    is_cut, weeks = (jobs.run_s > bound_s)[said], ((jobs.submit_s - jobs.submit_s[0]) // (7 * DAY_S)).astype("int64")
    yield Figure(f"{name}, risk {risk:.0%}: share of jobs advised", float(said.sum() / late.sum()))
    yield Figure("  users advised", len(np.unique(jobs.user[said])))
    yield Figure("  share cut", float(is_cut.mean()))
    for of, groups in (("weeks", weeks[said]), ("users", jobs.user[said])):
        low, high = interval(is_cut, groups)
        yield Figure(f"  interval over {of}", f"{low:.2%} to {high:.2%}")


def workload_of(jobs: Jobs, limit_s: Floats, run_s: Floats) -> Workload:
    columns = {"submit_s": jobs.submit_s, "run_s": np.ceil(run_s), "gpu_count": jobs.gpus}
    return make_workload(pd.DataFrame({**columns, "time_limit_s": np.ceil(limit_s)}))


def gain_figures(name: str, jobs: Jobs) -> Iterator[Figure]:
    """A job that is cut runs again in full: its stay has both runs."""
    late = jobs.submit_s >= jobs.submit_s[0] + LATE * np.ptp(jobs.submit_s)
    asked_s, bound_s = np.maximum(jobs.limit_s, jobs.run_s), bounds(jobs, RISKS[-1])
    before = workload_of(jobs, asked_s, jobs.run_s)
    for goal in GOALS:
        nodes = nodes_for(before, goal)
        base, rows = run(before, nodes, Fifo()), []
        for draw in range(DRAWS):
            chosen = np.random.default_rng(draw).random(int(jobs.user.max()) + 1) < FOLLOW
            follow = chosen[jobs.user] & np.isfinite(bound_s)
            again_s = np.where(follow & (jobs.run_s > bound_s), bound_s, 0.0)
            limit_s = np.where(follow & (again_s == 0), bound_s, asked_s + again_s)
            after: Simulated = run(workload_of(jobs, limit_s, jobs.run_s + again_s), nodes, Fifo())
            parts = (late, late & follow, late & ~follow)
            rows.append([after.jct_s[part].mean() / base.jct_s[part].mean() for part in parts])
        ratios = np.array(rows)
        yield Figure(f"{name}, waiting {goal:.0%}, a third follows: mean time, of FIFO with EASY", ratios[:, 0].mean())
        yield Figure("  least and most of the draws", f"{ratios[:, 0].min():.3f} to {ratios[:, 0].max():.3f}")
        yield Figure("  jobs that followed", float(np.nanmean(ratios[:, 1])))
        yield Figure("  all others", float(ratios[:, 2].mean()))


def measure() -> Iterator[Figure]:
    for name in ("mason", "helios"):
        jobs = jobs_of(name)
        for risk in RISKS:
            yield from risk_figures(name, jobs, risk)
        if np.isfinite(jobs.limit_s).any():
            yield from gain_figures(name, jobs)


if __name__ == "__main__":
    main(measure)
