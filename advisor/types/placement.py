"""Choose the GPU type that each job should run on now: priced SRPT (docs/placement.md). Pure.

A linear program finds the least time in which the cluster could finish all the work if jobs could be split between GPU
types. Its dual values price a GPU-second of each type. A job's remaining cost is its remaining work on the type that is
cheapest for it. Each decision then maximizes the sum of what jobs get done per second, in units of cost and divided by
a power of their remaining cost: short jobs first, each on a type that is worth the price.

Only ratios matter: other units of a job's work, or of time, lead to the same decision, as does another order of jobs.
Of jobs that are alike in everything, the one that comes first is placed first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.types.decide import WAITS as WAITS
from advisor.types.decide import ShortQueue, best_choice

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_LEAST_PRICE = 1e-3
"""Of the mean price. Without it, GPUs of a type that is not scarce are free, and a job's cost on them is 0."""
_DIGITS = 9
"""Of the numbers that are compared: rounding errors of other units must not decide between equal jobs."""
SOLVER_S = 0.9
"""Longest time of each of the two solvers in a live decision, so that it ends within 2 s."""


@dataclass(frozen=True)
class PlacementRules:
    """Parameters of the decision. benchmarks/placement_core.py measures what each is worth.

    exponent: of the remaining cost; 0 is throughput alone, 1 is shortest remaining time first. Use about 0.2 for known
    run times, 0.5 for predictions that can be far off. few_exponent: the least exponent while the gangs need less than
    `crowded` times all GPUs: with a short queue, order matters more than throughput.
    stay: value of a job's own type, against moves for nothing.
    urgent: jobs whose remaining time exceeds 1 / urgent of the least makespan go first, on at most urgent_share of all
    GPUs: more would delay the short jobs for them. It is the time on their best type, or on their cheapest if they
    cannot be moved later.
    least_efficiency: types on which a job does less per price than this share of its best are not used (for jobs that
    are never moved; nor do these start where they would outlast all other work, if another type is left).
    ageing: the value of a job that never ran is multiplied by (1 + its wait / the least makespan) to this power; 0 is
    no ageing. The backlog is the measure, so that a site has nothing to tune.
    move_all: running jobs may be moved, if their owner allows it.
    short_queue: where at most so many jobs have a choice, and the time of the next decision is known, all choices are
    tried instead (decide.py): prices are of no use there. makespan_weight: of the makespan against the mean
    completion time, then.
    solver_s: longest time of each of the two solvers. A live decision takes SOLVER_S. A simulation has more: its result
    must not depend on how busy the machine is.
    """

    exponent: float = 0.2
    few_exponent: float = 0.6
    crowded: float = 2.0
    stay: float = 1.02
    urgent: float = 1.15
    urgent_share: float = 0.15
    least_efficiency: float = 0.0
    ageing: float = 0.0
    move_all: bool = True
    short_queue: int = 6
    makespan_weight: float = 0.3
    solver_s: float = 30.0


NEVER_MOVE = PlacementRules(least_efficiency=0.7, move_all=False)


@dataclass(frozen=True)
class PlacementView:
    """The state known at a decision. Rows are jobs, columns are GPU types.

    gpus: (jobs,) of each gang; a gang runs on one type. left: (jobs,) work left in any unit of the job's own.
    rates: (jobs, types) of the whole gang, units/s; 0 if it cannot run there. placed: (jobs,) type that it runs on, or
    WAITS. waited_s: (jobs,) since submission, of jobs that never ran; 0 for others. may_move: (jobs,) whether the owner
    allows a running job to be moved. capacity: (types,) GPUs in service. round_s: until the next decision,
    None if it is not known.
    """

    gpus: Ints
    left: Floats
    rates: Floats
    placed: Ints
    capacity: Ints
    waited_s: Floats | None = None
    may_move: Bools | None = None
    round_s: float | None = None


@dataclass(frozen=True)
class PlacementDecision:
    """(jobs,) type of each job now, or WAITS; (types,) price of a GPU-second, summing to 1 over all GPUs."""

    types: Ints
    prices: Floats = field(repr=False)


@dataclass(frozen=True)
class _Jobs:
    """Jobs that can run, in an order that does not depend on the caller's. left_s: on the fastest type.

    speeds: relative to the fastest type. keeps: jobs that are not moved once they run.
    """

    rows: Ints
    gpus: Ints
    left_s: Floats
    speeds: Floats
    placed: Ints
    waited_s: Floats
    keeps: Bools

    @property
    def stays(self) -> Bools:
        """Jobs that keep the GPUs that they have."""
        found: Bools = self.keeps & (self.placed != WAITS)
        return found


def decide_placement(view: PlacementView, rules: PlacementRules | None = None) -> PlacementDecision:
    """Place the jobs. Jobs of zero rate on every type, and gangs larger than every type, wait.

    A running job keeps its type if it may not be moved, even where that type has fewer GPUs now than its jobs hold.
    Raises ValueError for shapes that disagree, and for negative or not finite numbers.
    """
    rules = rules or PlacementRules()
    check(view)
    types = np.full(len(view.gpus), WAITS, dtype=np.int64)
    jobs = _sorted_jobs(view, rules)
    if not len(jobs.rows):
        return PlacementDecision(types, np.zeros(len(view.capacity)))
    stays, waits = jobs.stays, ~jobs.stays
    kept = _busy(jobs, jobs.gpus * jobs.left_s / np.maximum(_own_speeds(jobs), 1e-12), len(view.capacity))
    work = jobs.gpus[waits], jobs.left_s[waits], jobs.speeds[waits]
    makespan_s, prices = price(*work, view.capacity, kept, rules.solver_s)
    if view.round_s and 0 < np.count_nonzero(waits) <= rules.short_queue:
        choice = _try_all(jobs, view.capacity, view.round_s, makespan_s, rules)
        if choice is not None:
            types[jobs.rows] = choice
            return PlacementDecision(types, prices)
    used = _busy(jobs, jobs.gpus.astype(float), len(view.capacity)).astype(np.int64)
    found = _part(jobs, waits)
    values, urgent = _values(found, prices, makespan_s, view.capacity, int(jobs.gpus.sum()), rules)
    types[jobs.rows[stays]] = jobs.placed[stays]
    free = np.maximum(view.capacity - used, 0)
    for some in (urgent, ~urgent):
        chosen = assign(values[some], found.gpus[some], free, solver_s=rules.solver_s)
        types[found.rows[some]] = chosen
        free = free - _gpus_on(chosen, found.gpus[some], len(free))
    return PlacementDecision(types, prices)


def _try_all(
    jobs: _Jobs, capacity: Ints, round_s: float, makespan_s: float, rules: PlacementRules
) -> tuple[int, ...] | None:
    """The types of the jobs, by best_choice. Times are in units of the longest job, so that no unit matters."""
    scale = float(jobs.left_s.max())
    with np.errstate(divide="ignore"):
        run_s = np.where(jobs.speeds > 0, _rounded(jobs.left_s / scale)[:, None] / jobs.speeds, np.inf)
    return best_choice(
        ShortQueue(
            run_s=run_s.tolist(),
            gpus=jobs.gpus.tolist(),
            capacity=np.minimum(capacity, jobs.gpus.sum()).tolist(),
            placed=jobs.placed.tolist(),
            keeps=jobs.keeps.tolist(),
            weights=_rounded((1 + jobs.waited_s / makespan_s) ** rules.ageing).tolist(),
            round_s=max(float(np.round(round_s / scale, _DIGITS)), 10.0**-_DIGITS),
            stay=rules.stay,
            makespan_weight=rules.makespan_weight,
        )
    )


def _gpus_on(types: Ints, gpus: Ints, number: int) -> Ints:
    """(number,) GPUs that jobs hold on each type."""
    placed = types != WAITS
    return np.bincount(types[placed], weights=gpus[placed], minlength=number).astype(np.int64)


def check(view: PlacementView) -> None:
    """Raise ValueError if a view's arrays have other lengths than its jobs and types, or values out of range."""
    jobs, types = len(view.gpus), len(view.capacity)
    if view.rates.shape != (jobs, types) or len(view.left) != jobs or len(view.placed) != jobs:
        raise ValueError(f"{jobs} jobs and {types} types, but rates of shape {view.rates.shape}")
    waited_s = np.zeros(jobs) if view.waited_s is None else view.waited_s
    if len(waited_s) != jobs or (view.may_move is not None and len(view.may_move) != jobs):
        raise ValueError(f"{jobs} jobs, but waited_s or may_move of another length")
    named = {"gpus": view.gpus, "left": view.left, "rates": view.rates, "capacity": view.capacity, "waited_s": waited_s}
    for name, values in named.items():
        if not np.all(np.isfinite(values)) or np.any(np.asarray(values) < 0):
            raise ValueError(f"{name} must be finite and at least 0")
    if jobs and (view.gpus.min() < 1 or view.placed.max() >= types or view.placed.min() < WAITS):
        raise ValueError(f"gangs need at least 1 GPU, and places are {WAITS} to {types - 1}")


def _sorted_jobs(view: PlacementView, rules: PlacementRules) -> _Jobs:
    may_move = np.full(len(view.gpus), rules.move_all) if view.may_move is None else view.may_move & rules.move_all
    stays = (view.placed != WAITS) & ~may_move
    fits = (view.rates > 0) & (view.gpus[:, None] <= view.capacity[None, :])
    rows = np.flatnonzero((fits.any(axis=1) & (view.left > 0)) | stays)
    rates = np.where(fits | stays[:, None], view.rates, 0.0)[rows]
    best = rates.max(axis=1, initial=0.0)
    known = best > 0
    speeds = _rounded(np.divide(rates, best[:, None], out=np.zeros_like(rates), where=known[:, None]))
    left_s = np.divide(view.left[rows], best, out=np.zeros(len(rows)), where=known)
    waited_s = np.zeros(len(rows)) if view.waited_s is None else view.waited_s[rows]
    jobs = _Jobs(rows, view.gpus[rows], left_s, speeds, view.placed[rows], waited_s, ~may_move[rows])
    scale = max(float(left_s.max(initial=0.0)), 1e-300)
    # Jobs that differ only where it changes no choice, as in the rate on a type too small for them, are not alike.
    told = _rounded(view.rates[rows] / view.rates[rows].max(axis=1, initial=1e-300)[:, None])
    least, waited = _rounded(left_s / scale), _rounded(-waited_s / scale)
    keys = (rows, *told.T, jobs.keeps, *speeds.T, jobs.placed, waited, least, jobs.gpus)
    return _part(jobs, np.lexsort(keys))


def _rounded(values: Floats) -> Floats:
    return np.round(values, _DIGITS)


def _part(jobs: _Jobs, rows: Ints | Bools) -> _Jobs:
    return _Jobs(
        jobs.rows[rows], jobs.gpus[rows], jobs.left_s[rows], jobs.speeds[rows], jobs.placed[rows], jobs.waited_s[rows],
        jobs.keeps[rows],
    )  # fmt: skip


def _own_speeds(jobs: _Jobs) -> Floats:
    found: Floats = np.where(jobs.stays, jobs.speeds[np.arange(len(jobs.rows)), jobs.placed], 1.0)
    return found


def _busy(jobs: _Jobs, amounts: Floats, types: int) -> Floats:
    """(types,) sums over the jobs that stay."""
    return np.bincount(jobs.placed[jobs.stays], weights=amounts[jobs.stays], minlength=types).astype(np.float64)


def price(
    gpus: Ints, left: Floats, rates: Floats, capacity: Ints, kept: Floats | None = None, solver_s: float = np.inf
) -> tuple[float, Floats]:
    """The least makespan in seconds of work that can be split between types, and the price of a GPU-second by type.

    min T, with y[j,r] >= 0 seconds of job j on type r: sum over r of rate y = left; sum over r of y <= T, as a job is
    in one place at a time; sum over j of gpus y + kept <= capacity T. Prices are the dual values of the last rows.
    Types that are not scarce keep a small price, so that no job is free. kept: (types,) GPU-seconds of jobs that
    cannot be moved. Equal prices, should the solver fail, or take longer than solver_s.
    """
    held = np.zeros(len(capacity)) if kept is None else kept
    total = max(int(capacity.sum()), 1)
    busy = np.divide(held, capacity, out=np.zeros(len(held)), where=capacity > 0)
    if not len(gpus):
        return float(busy.max(initial=0.0)), np.full(len(capacity), 1 / total)
    best_s = left / rates.max(axis=1)
    scale = max(float(best_s.max()), float(busy.max()))
    found = _solve_makespan(gpus, best_s / scale, rates / rates.max(axis=1)[:, None], capacity, held / scale, solver_s)
    if found is None:
        least = max(float(gpus @ best_s + held.sum()) / total, float(best_s.max()), float(busy.max()))
        return least, np.full(len(capacity), 1 / total)
    makespan, prices = found
    prices = prices + _LEAST_PRICE * max(float(prices @ capacity), _LEAST_PRICE) / total
    return makespan * scale, prices / float(prices @ capacity)


def _solve_makespan(
    gpus: Ints, best_s: Floats, speeds: Floats, capacity: Ints, kept: Floats, solver_s: float
) -> tuple[float, Floats] | None:
    """The value and the dual values of the linear program, in the units of best_s; None without an optimum in time."""
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = speeds.shape
    job, kind = np.nonzero(speeds > 0)
    number, last = np.arange(len(job)), len(job)
    work = sparse.csr_matrix((speeds[job, kind], (job, number)), shape=(jobs, last + 1))
    share = sparse.csr_matrix(
        (
            np.concatenate([gpus[job], -capacity]).astype(float),
            (np.concatenate([kind, np.arange(types)]), np.concatenate([number, np.full(types, last)])),
        ),
        shape=(types, last + 1),
    )
    once = sparse.csr_matrix(
        (np.concatenate([np.ones(last), -np.ones(jobs)]),
         (np.concatenate([job, np.arange(jobs)]), np.concatenate([number, np.full(jobs, last)]))),
        shape=(jobs, last + 1),
    )  # fmt: skip
    solved: Any = linprog(
        np.eye(1, last + 1, last)[0], A_ub=sparse.vstack([share, once]), b_ub=np.concatenate([-kept, np.zeros(jobs)]),
        A_eq=work, b_eq=best_s, method="highs", options={"time_limit": solver_s},
    )  # fmt: skip
    if solved.status != 0:
        return None
    return float(solved.x[last]), np.maximum(-np.asarray(solved.ineqlin.marginals[:types]), 0.0)


def _values(
    jobs: _Jobs, prices: Floats, makespan_s: float, capacity: Ints, needed: int, rules: PlacementRules
) -> tuple[Floats, Bools]:
    """(jobs, types) worth of a second of a job on a type, 0 if it may not run there; (jobs,) True for the first ones.

    needed: GPUs of all gangs.
    """
    total = int(capacity.sum())
    with np.errstate(divide="ignore"):
        cost = np.where(jobs.speeds > 0, jobs.gpus[:, None] * prices[None, :] / jobs.speeds, np.inf)
    cheapest = cost.min(axis=1)
    exponent = rules.exponent if needed > rules.crowded * total else max(rules.exponent, rules.few_exponent)
    worth = cheapest / (cheapest * jobs.left_s / makespan_s) ** exponent
    worth = worth * (1 + jobs.waited_s / makespan_s) ** rules.ageing
    values: Floats = worth[:, None] * np.where(cheapest[:, None] / cost >= rules.least_efficiency, jobs.speeds, 0.0)
    longest_s = jobs.left_s
    if not rules.move_all:
        values = _not_outlasting(values, jobs, makespan_s)
        longest_s = jobs.left_s / jobs.speeds[np.arange(len(cost)), cost.argmin(axis=1)]
    runs = np.flatnonzero(jobs.placed != WAITS)
    values[runs, jobs.placed[runs]] *= rules.stay
    urgent = np.zeros(len(jobs.rows), dtype=np.bool_)
    urgent[_urgent(jobs.gpus, longest_s * rules.urgent / makespan_s, rules.urgent_share * total)] = True
    return values, urgent


def _not_outlasting(values: Floats, jobs: _Jobs, makespan_s: float) -> Floats:
    """Leave out the types on which a job would end last of all; all of them: take those on which it ends first."""
    with np.errstate(divide="ignore"):
        ends_s = np.where(jobs.speeds > 0, jobs.left_s[:, None] / jobs.speeds, np.inf)
    in_time = (values > 0) & (ends_s <= makespan_s)
    fastest = ends_s == ends_s.min(axis=1, keepdims=True)
    worth = values.max(axis=1, keepdims=True) * jobs.speeds
    return np.where(in_time, values, np.where(~in_time.any(axis=1, keepdims=True) & fastest, worth, 0.0))


def _urgent(gpus: Ints, lateness: Floats, most_gpus: float) -> Ints:
    """The rows of the jobs that go first: the latest ones, as far as most_gpus reaches."""
    order = np.argsort(-_rounded(lateness), kind="stable")
    order = order[lateness[order] >= 1]
    found: Ints = order[np.cumsum(gpus[order]) <= most_gpus]
    return found


def assign(values: Floats, gpus: Ints, free: Ints, gap: float = 0.005, solver_s: float = SOLVER_S) -> Ints:
    """(jobs,) the types that maximize the sum of values within the free GPUs, each job on one type, or WAITS.

    gap: relative distance from the best at which the solver stops. The greedy choice by value per GPU, should the
    solver find none in solver_s.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    chosen = np.full(len(gpus), WAITS, dtype=np.int64)
    row, kind = _candidates(values, gpus, free)
    if not len(row):
        return chosen
    jobs, job = np.unique(row, return_inverse=True)
    number = np.arange(len(job))
    rows = sparse.vstack([
        sparse.csr_matrix((np.ones(len(job)), (job, number)), shape=(len(jobs), len(job))),
        sparse.csr_matrix((gpus[row].astype(float), (kind, number)), shape=(len(free), len(job))),
    ])  # fmt: skip
    value = values[row, kind]
    found: Any = milp(
        -value / value.max(), constraints=LinearConstraint(rows, -np.inf, np.concatenate([np.ones(len(jobs)), free])),
        integrality=np.ones(len(job)), bounds=Bounds(0, 1), options={"mip_rel_gap": gap, "time_limit": solver_s},
    )  # fmt: skip
    taken = np.flatnonzero(found.x > 0.5) if found.x is not None else _by_density(value, gpus[row], job, kind, free)
    chosen[row[taken]] = kind[taken]
    return chosen


def _candidates(values: Floats, gpus: Ints, free: Ints) -> tuple[Ints, Ints]:
    """The pairs of job and type that a best choice can need.

    At most n = sum over types of free // size gangs of a size run at once. If one runs on a type where n others of its
    size are worth as much, one of those does not run at all, and can take its place.
    """
    wanted = np.zeros(values.shape, dtype=bool)
    for size in np.unique(gpus):
        rows, most = np.flatnonzero(gpus == size), int((free // size).sum())
        for column in np.flatnonzero(free >= size):
            best = rows[np.argsort(-values[rows, column], kind="stable")[:most]]
            wanted[best, column] = values[best, column] > 0
    row, kind = np.nonzero(wanted)
    return row.astype(np.int64), kind.astype(np.int64)


def _by_density(value: Floats, gpus: Ints, job: Ints, kind: Ints, free: Ints) -> Ints:
    """The greedy choice by value per GPU."""
    left, placed, taken = free.copy(), set[int](), []
    for pair in np.argsort(-value / gpus, kind="stable"):
        if job[pair] not in placed and gpus[pair] <= left[kind[pair]]:
            placed.add(int(job[pair]))
            left[kind[pair]] -= gpus[pair]
            taken.append(int(pair))
    return np.array(taken, dtype=np.int64)
