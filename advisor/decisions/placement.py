"""Which GPU type each job should run on now: priced SRPT (design: gpu-types). Pure.

A linear program finds the least time in which the cluster could finish all the work if jobs could be split between GPU
types. Its dual values price a GPU-second of each type. A job's remaining cost is its remaining work on the type that is
cheapest for it. Each decision then maximizes the sum of what jobs get done per second, in units of cost and divided by
a power of their remaining cost: short jobs first, each where it is worth the price.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WAITS = -1
"""Place of a job that gets no GPUs now."""
_URGENT = 1e3
"""Value of a job that goes first, as a multiple of its own. Less than 1 / the solver's tolerance."""


@dataclass(frozen=True)
class PlacementRules:
    """Parameters of the decision.

    exponent: of the remaining cost; 0 is throughput alone, 1 is shortest remaining time first. Use about 0.2 for known
    run times, 0.5 for predictions that can be far off. stay: value of a job's own type, against moves for nothing.
    urgent: jobs whose remaining time on their best type exceeds 1 / urgent of the least makespan go first, on at most
    urgent_share of all GPUs: more would delay the short jobs for them.
    least_efficiency: types on which a job does less per price than this share of its best are not used (for jobs that
    are never moved). first_wait_s: jobs that waited longer than this for their first start go first, in order of their
    wait; None for no limit. move_all: running jobs may be moved, if their owner allows it.
    """

    exponent: float = 0.2
    crowded: float = 2.0
    few_exponent: float = 0.8
    few_urgent: bool = True
    outlast: float = 1.0
    stay: float = 1.02
    urgent: float = 1.15
    urgent_share: float = 0.15
    least_efficiency: float = 0.0
    first_wait_s: float | None = None
    move_all: bool = True


NEVER_MOVE = PlacementRules(least_efficiency=0.7, move_all=False)


@dataclass(frozen=True)
class PlacementView:
    """What is known at a decision. Rows are jobs, columns are GPU types.

    gpus: (jobs,) of each gang; a gang runs on one type. left: (jobs,) work left in any unit of the job's own.
    rates: (jobs, types) of the whole gang, units/s; 0 where it cannot run. placed: (jobs,) type that it runs on, or
    WAITS. waited_s: (jobs,) since submission, of jobs that never ran; 0 for others. may_move: (jobs,) whether the owner
    allows a running job to be moved. capacity: (types,) GPUs in service.
    """

    gpus: Ints
    left: Floats
    rates: Floats
    placed: Ints
    capacity: Ints
    waited_s: Floats | None = None
    may_move: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class PlacementDecision:
    """types: (jobs,) type of each job now, or WAITS. prices: (types,) of a GPU-second, summing to 1 over all GPUs.

    least_makespan_s: of all work, if jobs could be split between types (the linear program's value).
    """

    types: Ints
    prices: Floats = field(repr=False)
    least_makespan_s: float = 0.0


def decide_placement(view: PlacementView, rules: PlacementRules | None = None) -> PlacementDecision:
    """Place the jobs. Jobs of zero rate on every type, and gangs larger than every type, wait.

    Raises ValueError for shapes that disagree, and for negative or not finite numbers.
    """
    rules = rules or PlacementRules()
    check(view)
    types = np.full(len(view.gpus), WAITS, dtype=np.int64)
    can_run = (view.rates > 0) & (view.gpus[:, None] <= view.capacity[None, :]) & (view.left > 0)[:, None]
    known = np.flatnonzero(can_run.any(axis=1))
    if not len(known):
        return PlacementDecision(types, np.zeros(len(view.capacity)))
    rates = np.where(can_run, view.rates, 0.0)[known]
    gpus, left, placed = view.gpus[known], view.left[known], view.placed[known]
    makespan_s, prices = price(gpus, left, rates, view.capacity)
    values = _values(gpus, left, rates, placed, prices, makespan_s, int(view.capacity.sum()), rules)
    if view.waited_s is not None and rules.first_wait_s is not None:
        over = view.waited_s[known] / rules.first_wait_s
        values *= np.where(over > 1, _URGENT * over, 1.0)[:, None]
    stays = (placed != WAITS) & (~_movable(view, known) if rules.move_all else True)
    types[known[stays]] = placed[stays]
    free = view.capacity - np.bincount(placed[stays], weights=gpus[stays], minlength=len(prices)).astype(np.int64)
    types[known[~stays]] = assign(values[~stays], gpus[~stays], np.maximum(free, 0))
    return PlacementDecision(types, prices, makespan_s)


def check(view: PlacementView) -> None:
    """Raises ValueError where a view cannot be decided on."""
    jobs, types = len(view.gpus), len(view.capacity)
    if view.rates.shape != (jobs, types) or len(view.left) != jobs or len(view.placed) != jobs:
        raise ValueError(f"{jobs} jobs and {types} types, but rates of shape {view.rates.shape}")
    for name, values in (("gpus", view.gpus), ("left", view.left), ("rates", view.rates), ("capacity", view.capacity)):
        if not np.all(np.isfinite(values)) or np.any(np.asarray(values) < 0):
            raise ValueError(f"{name} must be finite and at least 0")
    if jobs and (view.gpus.min() < 1 or view.placed.max() >= types or view.placed.min() < WAITS):
        raise ValueError(f"gangs need at least 1 GPU, and places are {WAITS} to {types - 1}")


def price(gpus: Ints, left: Floats, rates: Floats, capacity: Ints) -> tuple[float, Floats]:
    """The least makespan in seconds of work that can be split between types, and the price of a GPU-second by type.

    min T, with y[j,r] >= 0 seconds of job j on type r: sum over r of rate y = left; sum over r of y <= T, as a job is
    in one place at a time; sum over j of gpus y <= capacity T. Prices are the dual values of the last rows. Types that
    are not scarce keep a small price, so that no job is free.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    jobs, types = rates.shape
    # Time on the best type is the unit of work: then no unit of the caller's matters.
    best = rates.max(axis=1)
    job, kind = np.nonzero(rates > 0)
    number = np.arange(len(job))
    last = len(job)
    work = sparse.csr_matrix((rates[job, kind] / best[job], (job, number)), shape=(jobs, last + 1))
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
    scale = float((left / best).max())
    found: Any = linprog(
        np.eye(1, last + 1, last)[0], A_ub=sparse.vstack([share, once]), b_ub=np.zeros(types + jobs), A_eq=work,
        b_eq=left / best / scale, method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise ValueError(f"the linear program of the least makespan failed: {found.message}")
    prices = np.maximum(-np.asarray(found.ineqlin.marginals[:types]), 0.0)
    prices = prices + 1e-3 * max(float(prices @ capacity), 1.0) / max(int(capacity.sum()), 1)
    return float(found.x[last]) * scale, prices / float(prices @ capacity)


def _values(
    gpus: Ints, left: Floats, rates: Floats, placed: Ints, prices: Floats, makespan_s: float, total: int, rules: PlacementRules
) -> Floats:
    """(jobs, types): what a second of a job on a type is worth; 0 where it may not run."""
    with np.errstate(divide="ignore"):
        cost = np.where(rates > 0, gpus[:, None] * prices[None, :] / rates, np.inf)
    cheapest = cost.min(axis=1)
    is_crowded = gpus.sum() > rules.crowded * total
    exponent = rules.exponent if is_crowded else max(rules.exponent, rules.few_exponent)
    values: Floats = (cheapest / (cheapest * left) ** exponent)[:, None] * rates
    values = np.where(cheapest[:, None] / cost >= rules.least_efficiency, values, 0.0)
    if not rules.move_all:
        # A job that starts where it outlasts everything else cannot be moved later.
        with np.errstate(divide="ignore"):
            outlasts = np.where(rates > 0, left[:, None] / rates, np.inf) > makespan_s * rules.outlast
        kept = np.where(outlasts, 0.0, values)
        values = np.where(kept.any(axis=1)[:, None], kept, values)
    runs = np.flatnonzero(placed != WAITS)
    values[runs, placed[runs]] *= rules.stay
    if not is_crowded and not rules.few_urgent:
        return values
    values[_urgent(gpus, left / rates.max(axis=1) * rules.urgent / makespan_s, rules.urgent_share * total)] *= _URGENT
    return values


def _urgent(gpus: Ints, lateness: Floats, most_gpus: float) -> Ints:
    """The rows of the jobs that go first: the latest ones, as far as most_gpus reaches."""
    order = np.argsort(-lateness, kind="stable")
    order = order[lateness[order] >= 1]
    found: Ints = order[np.cumsum(gpus[order]) <= most_gpus]
    return found


def _movable(view: PlacementView, known: Ints) -> npt.NDArray[np.bool_]:
    return np.ones(len(known), dtype=bool) if view.may_move is None else view.may_move[known]


def assign(values: Floats, gpus: Ints, free: Ints, gap: float = 0.005) -> Ints:
    """(jobs,) the types that maximize the sum of values within the free GPUs, each job on one type, or WAITS.

    gap: relative distance from the best at which the solver stops.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    jobs, types = values.shape
    chosen = np.full(jobs, WAITS, dtype=np.int64)
    job, kind = np.nonzero((values > 0) & (gpus[:, None] <= free[None, :]))
    if not len(job):
        return chosen
    number = np.arange(len(job))
    rows = sparse.vstack([
        sparse.csr_matrix((np.ones(len(job)), (job, number)), shape=(jobs, len(job))),
        sparse.csr_matrix((gpus[job].astype(float), (kind, number)), shape=(types, len(job))),
    ])  # fmt: skip
    value = values[job, kind]
    found: Any = milp(
        -value / value.max(), constraints=LinearConstraint(rows, -np.inf, np.concatenate([np.ones(jobs), free])),
        integrality=np.ones(len(job)), bounds=Bounds(0, 1), options={"mip_rel_gap": gap, "time_limit": 2.0},
    )  # fmt: skip
    taken = np.flatnonzero(found.x > 0.5) if found.x is not None else _by_density(value, gpus[job], job, kind, free)
    chosen[job[taken]] = kind[taken]
    return chosen


def _by_density(value: Floats, gpus: Ints, job: Ints, kind: Ints, free: Ints) -> Ints:
    """The greedy choice by value per GPU, should the solver find none in its time."""
    left, placed, taken = free.copy(), set[int](), []
    for pair in np.argsort(-value / gpus, kind="stable"):
        if job[pair] not in placed and gpus[pair] <= left[kind[pair]]:
            placed.add(int(job[pair]))
            left[kind[pair]] -= gpus[pair]
            taken.append(int(pair))
    return np.array(taken, dtype=np.int64)
