"""Choose the order of the queue by replaying the site's newest jobs with backfill (`almanac train`).

The jobs run on equal nodes, as many as make first in, first out with this backfill wait as long as the jobs really
waited, and on fewer: the load of the next weeks is not known, and at low load all orders are alike. Each order has the
place that its site factor and Slurm's age factor give it. An order counts if its longest wait stays within MOST_LONGER.
The best one must be clearly better than no order, and one with predictions surely better than those without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import pandas as pd

from advisor.duration.rank import NO_RANK, RankBy, RankChoice, RankOutcome, RankRule, ReplayedJobs
from advisor.priority import site_factor
from almanac.errors import RequestError
from almanac.submit_config import Priority
from simulator.cluster import uniform
from simulator.engine import simulate
from simulator.policies.base import Fifo, GivenOrder, Policy
from simulator.workload import Workload, make_workload

Floats = npt.NDArray[np.float64]
ORDERS: tuple[tuple[RankBy, float], ...] = (
    ("gpus", 1.0), ("limit", 1.0), ("mean", 0.5), ("mean", 1.0), ("quantile", 0.5),
)  # fmt: skip
TRIVIAL = ("gpus", "limit")
"""Rules that need no prediction."""
STRETCHES = (0.5, 1.0, 2.0, 4.0)
MOST_LONGER = 2.0
"""Longest wait of an order, as a multiple of that of first in, first out."""
CLEARLY, SURELY = 0.02, 0.1
"""Shares of the mean time to the end that an order must save, and that a prediction must save over the best order
without one: on later weeks of Mason, predictions that led by 3% and 7% in the replay were 6% behind."""
LEAST_WAIT = 0.02
"""Share of the mean time to the end that must be waiting: else an order has nothing to gain."""
MIN_JOBS, NODE_GPUS = 200, 8
SIZES = (0.8, 0.9, 1.0)
"""Multiples of the number of nodes."""
LONGER = 0.05
"""A user whose mean time to the end grows by more than this share is worse off."""


def choose_rank(jobs: ReplayedJobs, priority: Priority, has_backfill: bool = True) -> RankChoice | None:
    """The order of the queue for these jobs; None if they are too few to judge."""
    is_in = np.isfinite([jobs.submit_s, jobs.run_s, jobs.mean_s, jobs.gpu_count]).all(axis=0) & (jobs.gpu_count >= 1)
    jobs = jobs.select(is_in)
    if len(jobs.submit_s) < MIN_JOBS:
        return None
    jobs = jobs.select(np.argsort(jobs.submit_s, kind="stable"))
    try:
        replay = _Replay(jobs, priority, has_backfill)
        nodes = replay.sizes()
    except RequestError:
        return None
    if not nodes:
        return RankChoice(NO_RANK, 0, len(jobs.submit_s))
    orders = [each for each in ORDERS if each[0] != "limit" or np.isfinite(jobs.limit_s).mean() >= 0.5]
    outcomes = tuple(replay.best(by, exponent, nodes) for by, exponent in orders)
    return RankChoice(best_rule(outcomes), 0, len(jobs.submit_s), nodes, outcomes)


def best_rule(outcomes: Iterable[tuple[RankRule, RankOutcome]]) -> RankRule:
    """The order of the shortest mean time to the end: no order if none pays, and a prediction only if it clearly does.

    Of the orders that hold the longest wait.
    """
    held = {rule: each.jct for rule, each in outcomes if each.longest <= MOST_LONGER}
    if min(held.values(), default=1.0) > 1 - CLEARLY:
        return NO_RANK
    best, simple = min(held, key=held.__getitem__), [rule for rule in held if rule.by in TRIVIAL and held[rule] <= 1]
    first = min(simple, key=held.__getitem__, default=NO_RANK)
    return best if held[best] <= (1 - SURELY) * held.get(first, 1.0) or first == NO_RANK else first


class _Replay:
    """Replays of the same jobs. Raises RequestError if none can run."""

    def __init__(self, jobs: ReplayedJobs, priority: Priority, has_backfill: bool) -> None:
        limit_s = np.where(jobs.limit_s >= jobs.run_s, jobs.limit_s, 0)
        columns = {"submit_s": jobs.submit_s, "run_s": np.ceil(jobs.run_s), "gpu_count": np.floor(jobs.gpu_count)}
        number = np.arange(len(jobs.submit_s))
        self._workload = make_workload(pd.DataFrame({**columns, "time_limit_s": limit_s, "job_id": number.astype(str)}))
        kept = self._workload.array("job_id").astype("int64")
        self._jobs, self._priority = jobs.select(kept), priority
        self._backfill, self._user = has_backfill, pd.factorize(self._jobs.user)[0]
        self._fifo = cache(lambda nodes: self._run(nodes, Fifo()))

    def _run(self, nodes: int, policy: Policy) -> tuple[Floats, Floats]:
        """(time to the end, wait) of each job, seconds."""
        if self._backfill:
            policy.backfill = "easy"
        record = simulate(self._workload, uniform(nodes, NODE_GPUS), policy)
        submit_s = self._workload.array("submit_s")
        return (record.end_s - submit_s).astype("float64"), (record.start_s - submit_s).astype("float64")

    def sizes(self) -> tuple[int, ...]:
        """Numbers of nodes on which the jobs wait about as long as they did; none if they hardly waited."""
        wait_s = np.nan_to_num(np.maximum(self._jobs.wait_s, 0))
        goal = float(wait_s.mean() / (wait_s + self._jobs.run_s).mean())
        least = math.ceil(float(self._jobs.gpu_count.max()) / NODE_GPUS)
        low, high = least, least + math.ceil(_peak_gpus(self._workload) / NODE_GPUS)
        if goal < LEAST_WAIT:
            return ()
        while low < high:  # the first size that waits for less than the goal
            middle = (low + high) // 2
            jct_s, waited_s = self._fifo(middle)
            low, high = (low, middle) if waited_s.mean() <= goal * jct_s.mean() else (middle + 1, high)
        return tuple(sorted({max(least, round(size * low)) for size in SIZES}))

    def best(self, by: RankBy, exponent: float, nodes: tuple[int, ...]) -> tuple[RankRule, RankOutcome]:
        """The rule with the stretch of the shortest mean, among those that hold the longest wait, if one does."""
        found = {rule: self.outcome(rule, nodes) for rule in (RankRule(by, exponent, each) for each in STRETCHES)}
        held = {rule: each for rule, each in found.items() if each.longest <= MOST_LONGER} or found
        rule = min(held, key=lambda each: (held[each].jct, each.stretch))
        return rule, held[rule]

    def outcome(self, rule: RankRule, nodes: tuple[int, ...]) -> RankOutcome:
        ranked_s = rule.ranked(np.floor(self._jobs.gpu_count), np.maximum(self._jobs.time_s(rule.by), 1.0))
        keys = np.array(aged_keys(self._workload.array("submit_s"), ranked_s, self._priority))
        runs = [(self._fifo(each), self._run(each, GivenOrder(keys))) for each in nodes]
        before_s, after_s = (np.mean([run[which][0] for run in runs], axis=0) for which in (0, 1))
        longest = max(after[1].max() / max(before[1].max(), 1.0) for before, after in runs)
        jobs = np.bincount(self._user)
        old_s, new_s = (np.bincount(self._user, each) / jobs for each in (before_s, after_s))
        is_worse = new_s > (1 + LONGER) * old_s
        loss_s = float(np.median((new_s - old_s)[is_worse])) if is_worse.any() else None
        jct = math.exp(np.mean([math.log(after[0].mean() / before[0].mean()) for before, after in runs]))
        return RankOutcome(jct, float(longest), float(is_worse.mean()), loss_s)


def _peak_gpus(workload: Workload) -> int:
    """The most GPUs that run at once if no job waits."""
    submit_s, gpus = workload.array("submit_s"), workload.array("gpu_count")
    times, changes = np.concatenate([submit_s, submit_s + workload.array("run_s")]), np.concatenate([gpus, -gpus])
    return int(np.cumsum(changes[np.lexsort((changes, times))]).max())


def aged_key(submit_s: float, factor: float, priority: Priority) -> float:
    """The place in the queue of a site factor and Slurm's age factor: the greatest sum is the smallest key."""
    return submit_s / (priority.tau_hours * 3600) - factor / priority.points_per_e


def aged_keys(submit_s: npt.NDArray[np.int64], gpu_time_s: Floats, priority: Priority) -> list[float]:
    """The places of the jobs with these GPU-times in the queue, if the site factor came from them."""
    pairs = zip(submit_s.tolist(), gpu_time_s.tolist(), strict=True)
    return [aged_key(each_s, site_factor(ranked_s, priority), priority) for each_s, ranked_s in pairs]
