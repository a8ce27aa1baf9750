"""A simulation in rounds: at each round's start a policy says which GPUs every job has until the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from advisor.decisions.placement import WAITS, Floats, Ints
from simulator.placement.problem import PlacementProblem


@dataclass(frozen=True)
class RoundView:
    """What a policy sees at a round's start. Rows are the jobs that were submitted and have not ended.

    jobs: (rows,) their numbers. gpus, rates: as in the problem. left: (rows,) work left, as far as the policy may know.
    placed: (rows,) type of the round before, or WAITS. waited_s: (rows,) of jobs that never ran, 0 for others.
    since_s: (rows,) since submission. done: (rows,) work done. round_s: of a round.
    """

    now_s: float
    jobs: Ints
    gpus: Ints
    rates: Floats
    left: Floats
    placed: Ints
    waited_s: Floats
    since_s: Floats
    done: Floats
    capacity: Ints
    round_s: float


@dataclass(frozen=True)
class RoundAllocation:
    """gpus: (rows, types) GPUs of each job. rate: (rows,) units/s with them; 0 where it waits.

    lasts_s: for how long rounds repeat this without asking the policy, until a job arrives or ends.
    """

    gpus: Ints
    rate: Floats
    lasts_s: float = 0.0


class RoundPolicy(Protocol):
    """Places the jobs of a round. Called in the order of time, but not while its last allocation lasts."""

    def place(self, view: RoundView) -> RoundAllocation:
        """The GPUs of each job."""


@dataclass(frozen=True)
class PlacementRecord:
    """start_s, end_s: (jobs,) first start and end. moves: (jobs,) times that a job that had run got other GPUs.

    decision_s: (decisions,) seconds that each one took.
    """

    start_s: Floats
    end_s: Floats
    moves: Ints
    decision_s: Floats


def on_one_type(view: RoundView, types: Ints) -> RoundAllocation:
    """Whole gangs on one type each. types: (rows,) type or WAITS."""
    gpus = np.zeros(view.rates.shape, dtype=np.int64)
    rate = np.zeros(len(types))
    runs = np.flatnonzero(types != WAITS)
    gpus[runs, types[runs]] = view.gpus[runs]
    rate[runs] = view.rates[runs, types[runs]]
    return RoundAllocation(gpus, rate)


def lasts_if_full(view: RoundView, found: RoundAllocation) -> RoundAllocation:
    """For policies whose running jobs stay: nothing changes while each waiting gang is larger than all free GPUs."""
    free = int(view.capacity.sum() - found.gpus.sum())
    return replace(found, lasts_s=np.inf if (view.gpus[found.rate <= 0] > free).all() else 0.0)


def lasts_if_fastest(view: RoundView, found: RoundAllocation) -> RoundAllocation:
    """For policies that look for speed: nothing changes while each job has its fastest type, the first of equals."""
    fastest = (found.rate > 0) & (found.gpus.argmax(axis=1) == view.rates.argmax(axis=1))
    return replace(found, lasts_s=np.inf if fastest.all() else 0.0)


def simulate_rounds(
    problem: PlacementProblem,
    policy: RoundPolicy,
    round_s: float = 360.0,
    move_s: float = 10.0,
    known_work: Floats | None = None,
    clock: Callable[[], float] | None = None,
) -> PlacementRecord:
    """Run all jobs.

    A job that ran before and gets other GPUs (or any, after it waited) loses move_s first. A job that ends in a round
    keeps its GPUs until the next one; rounding errors do not make it run on. known_work: (jobs,) what the policy
    believes of the work, instead of the truth; a job that outruns it has a tenth of it left. Raises ValueError where a
    policy uses more GPUs than there are.
    """
    jobs, now = len(problem), float(problem.submit_s.min()) if len(problem) else 0.0
    done, believed = np.zeros(jobs), problem.work if known_work is None else known_work
    start, end, last = np.full(jobs, np.nan), np.full(jobs, np.nan), np.full(jobs, WAITS, dtype=np.int64)
    had = np.zeros((jobs, len(problem.types)), dtype=np.int64)
    moves, seconds = np.zeros(jobs, dtype=np.int64), []
    stuck, decided, until, found = 0, np.zeros(0, dtype=np.int64), -np.inf, RoundAllocation(had[:0], done[:0])
    while np.isnan(end).any():
        active = np.flatnonzero(np.isnan(end) & (problem.submit_s <= now))
        if not len(active):
            ahead = float(problem.submit_s[np.isnan(end)].min())
            now += max(np.ceil((ahead - now) / round_s), 1.0) * round_s
            continue
        if now >= until or not np.array_equal(active, decided):
            view = _view(problem, active, now, done, believed, last, start, round_s)
            begun = clock() if clock else 0.0
            found = policy.place(view)
            seconds.append((clock() if clock else 0.0) - begun)
            _check(problem, found)
            decided, until = active, now + found.lasts_s
        runs = found.rate > 0
        own = active[runs]
        ran = ~np.isnan(start[own])
        moved = ran & (found.gpus[runs] != had[own]).any(axis=1)
        moves[own] += moved
        lost = np.where(moved, move_s, 0.0)
        needed = (problem.work[own] - done[own]) / found.rate[runs] + lost
        start[own[~ran]] = now
        ends = needed <= round_s * (1 + 1e-9)
        end[own[ends]] = now + np.minimum(needed[ends], round_s)
        done[own] += found.rate[runs] * np.maximum(round_s - lost, 0.0)
        had[active] = found.gpus
        last[active] = np.where(runs, found.gpus.argmax(axis=1), WAITS)
        now += round_s
        stuck = 0 if runs.any() or (problem.submit_s > now).any() else stuck + 1
        if stuck > 1000:
            raise ValueError(f"{np.isnan(end).sum()} jobs wait and the policy starts none")
    return PlacementRecord(start, end, moves, np.array(seconds))


def _view(
    problem: PlacementProblem,
    active: Ints,
    now: float,
    done: Floats,
    believed: Floats,
    last: Ints,
    start: Floats,
    round_s: float,
) -> RoundView:
    since = now - problem.submit_s[active]
    left = np.maximum(believed[active] - done[active], 0.1 * believed[active])
    if believed is problem.work:
        left = problem.work[active] - done[active]
    return RoundView(
        now_s=now,
        jobs=active,
        gpus=problem.gpus[active],
        rates=problem.rates[active],
        left=left,
        placed=last[active],
        waited_s=np.where(np.isnan(start[active]), since, 0.0),
        since_s=since,
        done=done[active],
        capacity=problem.capacity,
        round_s=round_s,
    )


def _check(problem: PlacementProblem, found: RoundAllocation) -> None:
    used = found.gpus.sum(axis=0)
    if (used > problem.capacity).any() or (found.gpus < 0).any():
        raise ValueError(f"the policy uses {used} GPUs of {problem.capacity}")
