"""Simulation in rounds: at each round's start a policy assigns GPUs to every job until the next one.

With almanac's own policy, the simplest ones that it is compared with, and Gavel's, rebuilt: linear programs give each
job shares of time on each GPU type, and rounds follow them. Source: Gavel (OSDI 2020), sections 4.1 and 5, and the
rounds of its public scheduler: a job's priority on a type is its share over the part of the type's time that it
received since the last solution; types are filled one after the other. Solvers differ in which of many best solutions
they return, so that figures differ by some percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from advisor.events import EventLoop
from advisor.types.placement import WAITS, Floats, Ints, PlacementRules, PlacementView, decide_placement
from simulator.outcomes import JobOutcomes, PolicyRun
from simulator.traces.gavel import PlacementProblem


@dataclass(frozen=True)
class RoundView:
    """View of a policy at a round's start. Rows are the jobs that were submitted and have not ended.

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
    """GPUs and rates of the jobs in a round. gpus: (rows, types). rate: (rows,) units/s; 0 for jobs that wait.

    lasts_s: for how long rounds repeat this without asking the policy, until a job arrives or ends.
    """

    gpus: Ints
    rate: Floats
    lasts_s: float = 0.0


class RoundPolicy(Protocol):
    """Places the jobs of a round. Called in the order of time, but not while its last allocation lasts."""

    def place(self, view: RoundView) -> RoundAllocation:
        """The GPUs of each job."""


def on_one_type(view: RoundView, types: Ints) -> RoundAllocation:
    """Whole gangs on one type each. types: (rows,) type or WAITS."""
    gpus = np.zeros(view.rates.shape, dtype=np.int64)
    rate = np.zeros(len(types))
    runs = np.flatnonzero(types != WAITS)
    gpus[runs, types[runs]] = view.gpus[runs]
    rate[runs] = view.rates[runs, types[runs]]
    return RoundAllocation(gpus, rate)


def lasts_if_full(view: RoundView, found: RoundAllocation) -> RoundAllocation:
    """Let an allocation last while each waiting gang is larger than all free GPUs.

    For policies whose running jobs stay.
    """
    free = int(view.capacity.sum() - found.gpus.sum())
    return replace(found, lasts_s=np.inf if (view.gpus[found.rate <= 0] > free).all() else 0.0)


def lasts_if_fastest(view: RoundView, found: RoundAllocation) -> RoundAllocation:
    """Let an allocation last while each job has its fastest type, the first of equals.

    For policies that look for speed.
    """
    fastest = (found.rate > 0) & (found.gpus.argmax(axis=1) == view.rates.argmax(axis=1))
    return replace(found, lasts_s=np.inf if fastest.all() else 0.0)


def simulate_rounds(
    problem: PlacementProblem,
    policy: RoundPolicy,
    round_s: float = 360.0,
    move_s: float = 10.0,
    known_work: Floats | None = None,
    clock: Callable[[], float] | None = None,
) -> Rounds:
    """Run all jobs.

    A job that ran before and gets other GPUs (or any, after it waited) loses move_s first. A job that ends in a round
    keeps its GPUs until the next one; rounding errors do not make it run on. known_work: (jobs,) what the policy
    believes of the work, instead of the truth; a job that outruns it has a tenth of it left. Raises ValueError where a
    policy uses more GPUs than there are.
    """
    rounds = Rounds(problem, policy, round_s, move_s, known_work, clock or (lambda: 0.0))
    rounds.run()
    return rounds


class Rounds(EventLoop):
    """One event at the start of each round.

    start_s, end_s: (jobs,) first start and end. moves: (jobs,) times that a job that had run got other GPUs.
    decision_s: seconds that each decision took.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        policy: RoundPolicy,
        round_s: float,
        move_s: float,
        known_work: Floats | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self.problem, self.policy, self.round_s, self.move_s, self.clock = problem, policy, round_s, move_s, clock
        jobs = len(problem)
        self.done, self.known_work = np.zeros(jobs), known_work
        self.start_s, self.end_s = np.full(jobs, np.nan), np.full(jobs, np.nan)
        self._ran_s, self._busy_gpu_s = np.zeros(jobs), 0.0
        self.last, self.had = np.full(jobs, WAITS, dtype=np.int64), np.zeros((jobs, len(problem.types)), dtype=np.int64)
        self.moves, self.decision_s = np.zeros(jobs, dtype=np.int64), list[float]()
        self.stuck, self.decided, self.until = 0, np.zeros(0, dtype=np.int64), -np.inf
        self.found = RoundAllocation(self.had[:0], self.done[:0])
        if jobs:
            self.at(float(problem.submit_s.min()), self.round)

    def outcome(self, policy: str) -> PolicyRun:
        """The result. Its details: decision_s, the median."""
        problem, nobody = self.problem, np.zeros(len(self.problem), dtype=bool)
        return PolicyRun(
            policy,
            JobOutcomes(problem.submit_s, self.start_s, self.end_s, problem.best_s, self._ran_s, nobody),
            int(problem.capacity.sum()),
            self._busy_gpu_s,
            int(self.moves.sum()),
            details={"decision_s": float(np.median(self.decision_s))},
        )

    def round(self) -> None:
        problem, now = self.problem, self.now_s
        active = np.flatnonzero(np.isnan(self.end_s) & (problem.submit_s <= now))
        rounds = 1.0
        if len(active):
            self._decide(active)
            self._run_round(active)
        else:
            ahead = float(problem.submit_s[np.isnan(self.end_s)].min())
            rounds = max(np.ceil((ahead - now) / self.round_s), 1.0)
        if np.isnan(self.end_s).any():
            self.at(now + rounds * self.round_s, self.round)

    def _decide(self, active: Ints) -> None:
        """Ask the policy, but not while its last allocation lasts."""
        if self.now_s < self.until and np.array_equal(active, self.decided):
            return
        view, begun = self._view(active), self.clock()
        self.found = self.policy.place(view)
        self.decision_s.append(self.clock() - begun)
        _check(self.problem, self.found)
        self.decided, self.until = active, self.now_s + self.found.lasts_s

    def _run_round(self, active: Ints) -> None:
        found, problem, now = self.found, self.problem, self.now_s
        runs = found.rate > 0
        own = active[runs]
        ran = ~np.isnan(self.start_s[own])
        moved = ran & (found.gpus[runs] != self.had[own]).any(axis=1)
        self.moves[own] += moved
        lost = np.where(moved, self.move_s, 0.0)
        needed = (problem.work[own] - self.done[own]) / found.rate[runs] + lost
        self.start_s[own[~ran]] = now
        ends = needed <= self.round_s * (1 + 1e-9)
        ran_s = np.minimum(needed, self.round_s)
        self.end_s[own[ends]] = now + ran_s[ends]
        self._ran_s[own] += ran_s
        self._busy_gpu_s += float(found.gpus[runs].sum(axis=1) @ ran_s)
        self.done[own] += found.rate[runs] * np.maximum(self.round_s - lost, 0.0)
        self.had[active] = found.gpus
        self.last[active] = np.where(runs, found.gpus.argmax(axis=1), WAITS)
        self.stuck = 0 if runs.any() or (problem.submit_s > now + self.round_s).any() else self.stuck + 1
        if self.stuck > 1000:
            raise ValueError(f"{np.isnan(self.end_s).sum()} jobs wait and the policy starts none")

    def _view(self, active: Ints) -> RoundView:
        problem = self.problem
        since = self.now_s - problem.submit_s[active]
        left = problem.work[active] - self.done[active]
        if self.known_work is not None:
            believed = self.known_work[active]
            left = np.maximum(believed - self.done[active], 0.1 * believed)
        return RoundView(
            now_s=self.now_s,
            jobs=active,
            gpus=problem.gpus[active],
            rates=problem.rates[active],
            left=left,
            placed=self.last[active],
            waited_s=np.where(np.isnan(self.start_s[active]), since, 0.0),
            since_s=since,
            done=self.done[active],
            capacity=problem.capacity,
            round_s=self.round_s,
        )


def _check(problem: PlacementProblem, found: RoundAllocation) -> None:
    used = found.gpus.sum(axis=0)
    if (used > problem.capacity).any() or (found.gpus < 0).any():
        raise ValueError(f"the policy uses {used} GPUs of {problem.capacity}")


_STEADY = 0.02
"""Of the median time left of the jobs. Without an arrival or an end, the next decision comes after so long; in the
next round of 360 s where half of the jobs end within 5 h."""


@dataclass(frozen=True)
class PricedSrpt:
    """almanac's own decision, as live. Jobs that have days left are not decided on in each round."""

    rules: PlacementRules = field(default_factory=PlacementRules)

    def place(self, view: RoundView) -> RoundAllocation:
        """Place the jobs of a round by decide_placement."""
        seen = PlacementView(
            view.gpus, view.left, view.rates, view.placed, view.capacity, view.waited_s, round_s=view.round_s
        )
        found = on_one_type(view, decide_placement(seen, self.rules).types)
        if not self.rules.move_all:
            return lasts_if_full(view, found)
        with np.errstate(divide="ignore"):
            steady_s = _STEADY * float(np.median(view.left / view.rates.max(axis=1)))
        found = lasts_if_fastest(view, found)
        return replace(found, lasts_s=max(found.lasts_s, steady_s))


class TypedFifo:
    """First in, first out: the first job that fits on no type blocks the rest. It takes its fastest free type."""

    def place(self, view: RoundView) -> RoundAllocation:
        """Running jobs stay."""
        types = view.placed.copy()
        runs, waiting = types != WAITS, np.flatnonzero(types == WAITS)
        used = np.bincount(types[runs], weights=view.gpus[runs], minlength=len(view.capacity)).astype(np.int64)
        free = view.capacity - used
        for row in waiting[np.argsort(-view.since_s[waiting], kind="stable")]:
            kinds = [kind for kind in np.argsort(-view.rates[row], kind="stable") if view.rates[row, kind] > 0]
            fitting = [kind for kind in kinds if view.gpus[row] <= free[kind]]
            if not fitting:
                break
            types[row] = fitting[0]
            free[fitting[0]] -= view.gpus[row]
        return replace(on_one_type(view, types), lasts_s=np.inf)


class GreedyPairs:
    """Pairs of job and type, the least remaining GPU-time first, until nothing fits; jobs are moved freely."""

    def place(self, view: RoundView) -> RoundAllocation:
        """Every round from scratch."""
        with np.errstate(divide="ignore"):
            cost = np.where(view.rates > 0, (view.gpus * view.left)[:, None] / view.rates, np.inf)
        types, free = np.full(len(view.gpus), WAITS, dtype=np.int64), view.capacity.copy()
        for pair in np.argsort(cost, axis=None, kind="stable"):
            row, kind = divmod(int(pair), cost.shape[1])
            if np.isfinite(cost[row, kind]) and types[row] == WAITS and view.gpus[row] <= free[kind]:
                types[row] = kind
                free[kind] -= view.gpus[row]
        return lasts_if_fastest(view, on_one_type(view, types))


Gains = Callable[[RoundView], Floats]
"""(rows, types) what a policy makes fair: a job's gain of all its time on a type."""


def plain_gains(view: RoundView) -> Floats:
    """Time alone, whatever the type: max-min fairness that knows nothing of speeds (Gavel's max_min_fairness)."""
    gains: Floats = np.where(view.rates > 0, view.gpus[:, None], 0).astype(float)
    return gains


def throughput_gains(view: RoundView) -> Floats:
    """Throughput over that of equal shares of all types (Gavel's max_min_fairness_perf)."""
    equal = view.rates @ (view.capacity / max(int(view.capacity.sum()), 1))
    gains: Floats = view.rates / np.maximum(equal, 1e-12)[:, None] * view.gpus[:, None]
    return gains


def duration_gains(view: RoundView) -> Floats:
    """Part of the remaining work: the least gain is then 1 / makespan (Gavel's min_total_duration_perf)."""
    gains: Floats = view.rates / np.maximum(view.left, 1e-12)[:, None]
    return gains


class SharedRounds:
    """Follows shares of time in rounds, as Gavel's scheduler does. Solves whenever the set of jobs changes."""

    def __init__(self, gains: Gains) -> None:
        self._gains = gains
        self._shares: dict[int, Floats] = {}
        self._had: dict[int, Floats] = {}

    def place(self, view: RoundView) -> RoundAllocation:
        """Every round from scratch."""
        numbers = view.jobs.tolist()
        if self._shares.keys() != set(numbers):
            found = max_min_shares(self._gains(view), view.gpus, view.capacity)
            self._shares = dict(zip(numbers, found, strict=True))
            # Gavel counts half a round for every job after each solution.
            self._had = {job: np.full(len(view.capacity), 0.5) for job in numbers}
        shares = np.array([self._shares[job] for job in numbers])
        had = np.array([self._had[job] for job in numbers])
        types = _fill(view, shares, had)
        for row in np.flatnonzero(types != WAITS):
            self._had[numbers[row]][types[row]] += 1
        return on_one_type(view, types)


def max_min_shares(gains: Floats, gpus: Ints, capacity: Ints) -> Floats:
    """(jobs, types) shares of time that maximize the least sum of share x gain; no job has more than all its time.

    Gangs larger than a type get no share of it.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = gains.shape
    job, kind = np.nonzero((gains > 0) & (gpus[:, None] <= capacity[None, :]))
    shares = np.zeros((jobs, types))
    if not len(job):
        return shares
    known, row = np.unique(job, return_inverse=True)
    number, last = np.arange(len(job)), len(job)
    scale = gains[job, kind].max()
    least = sparse.csr_matrix(
        (
            np.concatenate([-gains[job, kind] / scale, np.ones(len(known))]),
            (np.concatenate([row, np.arange(len(known))]), np.concatenate([number, np.full(len(known), last)])),
        ),
        shape=(len(known), last + 1),
    )
    once = sparse.csr_matrix((np.ones(last), (row, number)), shape=(len(known), last + 1))
    room = sparse.csr_matrix((gpus[job].astype(float), (kind, number)), shape=(types, last + 1))
    found: Any = linprog(
        -np.eye(1, last + 1, last)[0], A_ub=sparse.vstack([least, once, room]),
        b_ub=np.concatenate([np.zeros(len(known)), np.ones(len(known)), capacity]), method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise ValueError(f"the linear program of the shares failed: {found.message}")
    shares[job, kind] = found.x[:last]
    return shares


def _fill(view: RoundView, shares: Floats, had: Floats) -> Ints:
    """Types in the order of their columns; in each the highest priority first, then the larger share."""
    priority = np.where((shares > 1e-9) & (view.rates > 0), shares / (had / had.sum(axis=0)), 0.0)
    types, free = np.full(len(view.gpus), WAITS, dtype=np.int64), view.capacity.copy()
    for kind in range(len(free)):
        for row in np.lexsort((-shares[:, kind], -priority[:, kind])):
            if priority[row, kind] > 0 and types[row] == WAITS and view.gpus[row] <= free[kind]:
                types[row] = kind
                free[kind] -= view.gpus[row]
    return types
