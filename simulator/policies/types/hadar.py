"""Hadar's primal-dual scheduling, for comparison (Sultana et al., section III; corrected reading).

The text lost its formulas; they are rebuilt from the scheme that it cites. A job's utility is its best run time over
its completion time. (The paper's iterations per second compare models by the unit of their work.) A GPU of a type costs
more, the more of the type is in use. A job runs where its payoff, utility minus cost, is greatest, if it is positive.
("Least cost", as printed, selects no job.) The paper's program over subsets of jobs is exact and exponential: it serves
small rounds, and a greedy choice by payoff the others.

HadarE (section V) forks copies: a job runs on several nodes at once, with at most one copy on each. The copies divide
the steps that are left by their speed, and their parameters are averaged afterwards. The simulation counts the steps of
all copies as progress, as the paper does. In training this does not hold: averaged copies learned no more than the
fastest node alone (docs/unequal-gpus.md). The lower bounds assume that a job is in one place at a time; HadarE can beat
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from advisor.types.placement import Floats, Ints
from simulator.policies.types.rounds import RoundAllocation, RoundView, lasts_if_full

Use = tuple[int, ...]
"""GPUs of each type."""


@dataclass(frozen=True)
class HadarPrices:
    """Prices of a GPU. lowest: on a type without jobs. highest: on a full type. capacity: (types,) GPUs."""

    lowest: float
    highest: float
    capacity: Use

    def of(self, used: Use) -> tuple[float, ...]:
        """Return each type's price, lowest (highest / lowest)^(used / capacity) (equation 5); infinite without GPUs."""
        return tuple(
            self.lowest * (self.highest / self.lowest) ** (part / whole) if whole else float("inf")
            for part, whole in zip(used, self.capacity, strict=True)
        )


@dataclass(frozen=True)
class HadarRound:
    """A round's view with its prices. had: (rows, types) GPUs of each job in the round before.

    move_s: what a job loses that ran before and gets other GPUs.
    """

    view: RoundView
    prices: HadarPrices
    had: Ints
    move_s: float = 10.0

    @property
    def capacity(self) -> Use:
        return self.prices.capacity

    def utility(self, row: int, rate: float, lost_s: float = 0.0) -> float:
        """Best run time over completion time, if the job runs at this rate from now on."""
        view = self.view
        best_s = (view.done[row] + view.left[row]) / view.rates[row].max()
        return float(best_s / max(view.since_s[row] + lost_s + view.left[row] / rate, 1e-9))

    def rate(self, row: int, use: Use) -> float:
        """Return the rate of a gang on these GPUs: that of its slowest type."""
        return float(min(self.view.rates[row, kind] for kind, count in enumerate(use) if count))

    def payoff(self, row: int, use: Use, used: Use) -> float:
        """Utility minus the cost at the prices of what is in use; -inf where the gang has no speed."""
        rate = self.rate(row, use)
        if rate <= 0:
            return float("-inf")
        moves = self.view.done[row] > 0 and use != tuple(self.had[row].tolist())
        cost = sum(price * count for price, count in zip(self.prices.of(used), use, strict=True) if count)
        return self.utility(row, rate, self.move_s if moves else 0.0) - cost

    def find_allocation(self, row: int, used: Use) -> tuple[float, Use] | None:
        """The allocation of the greatest payoff, if that is positive: on one type, or spread, fastest first.

        Of equal payoffs, one type is better than several, and an earlier type than a later one.
        """
        free = tuple(whole - part for whole, part in zip(self.capacity, used, strict=True))
        options = [(self.payoff(row, use, used), use) for use in self._options(row, free)]
        best = max(options, key=lambda option: round(option[0], 12), default=None)
        return best if best and best[0] > 0 else None

    def _options(self, row: int, free: Use) -> list[Use]:
        gpus, kinds = int(self.view.gpus[row]), range(len(free))
        found = [tuple(gpus if each == kind else 0 for each in kinds) for kind in kinds if free[kind] >= gpus]
        spread, missing = [0] * len(free), gpus
        for kind in np.argsort(-self.view.rates[row], kind="stable"):
            spread[kind] = min(free[kind], missing)
            missing -= spread[kind]
        return found if missing or tuple(spread) in found else [*found, tuple(spread)]


def prices_of(view: RoundView, round_s: float, eta: float = 1.0) -> HadarPrices:
    """Highest and lowest price from the jobs of a round (equations 6 and 7).

    Highest: the greatest utility per GPU. Lowest: the least utility per GPU and round if the job ends last of all, over
    4 eta. The last end is that of all remaining work on the slowest types, on all GPUs.
    """
    best = view.rates.max(axis=1)
    with np.errstate(divide="ignore"):
        slowest = np.where(view.rates > 0, view.rates, np.inf).min(axis=1)
    best_s, slow_s = (view.done + view.left) / best, view.left / slowest
    highest = float((best_s / np.maximum(view.since_s + view.left / best, 1e-9) / view.gpus).max())
    horizon_s = float((view.gpus * slow_s).sum() / max(int(view.capacity.sum()), 1) + slow_s.max())
    rounds = float(np.ceil(slow_s / round_s).max())
    least = float((best_s / (view.since_s + horizon_s) / (rounds * view.gpus)).min()) / (4 * eta)
    return HadarPrices(min(least, highest), highest, tuple(view.capacity.tolist()))


def choose_exactly(game: HadarRound, rows: list[int], used: Use) -> dict[int, Use]:
    """Row to GPUs: the subset of the rows, in their order, with the greatest sum of payoffs.

    Each row skips the round or takes find_allocation; prices rise with what the rows before it took.
    """

    @cache
    def best(place: int, now: Use) -> tuple[float, tuple[tuple[int, Use], ...]]:
        if place == len(rows):
            return 0.0, ()
        skipped, option = best(place + 1, now), game.find_allocation(rows[place], now)
        if option is None:
            return skipped
        after = best(place + 1, _sum(now, option[1]))
        taken = (option[0] + after[0], ((rows[place], option[1]), *after[1]))
        return taken if taken[0] > skipped[0] else skipped

    return dict(best(0, used)[1])


def choose_greedily(game: HadarRound, rows: list[int], used: Use) -> dict[int, Use]:
    """Row to GPUs: the row of the greatest payoff, then again at the new prices, until none is positive."""
    chosen: dict[int, Use] = {}
    waiting = np.array(rows, dtype=np.int64)
    gpus, utilities = game.view.gpus[waiting], _utilities(game, waiting)
    while len(waiting) and sum(used) < sum(game.capacity):
        free = np.array(game.capacity) - np.array(used)
        cost = gpus[:, None] * np.array(game.prices.of(used))[None, :]
        best = np.where(gpus[:, None] <= free[None, :], utilities - cost, -np.inf).max(axis=1)
        # Only gangs that fit on no type are tried spread over several.
        for place in np.flatnonzero(np.isneginf(best) & (gpus <= free.sum())):
            spread = game.find_allocation(int(waiting[place]), used)
            best[place] = spread[0] if spread else -np.inf
        if not (best > 0).any():
            break
        row = int(waiting[best == best.max()].min())
        option = game.find_allocation(row, used)
        assert option is not None
        chosen[row] = option[1]
        used = _sum(used, option[1])
        others = waiting != row
        waiting, gpus, utilities = waiting[others], gpus[others], utilities[others]
    return chosen


def _utilities(game: HadarRound, rows: Ints) -> Floats:
    """(rows, types) utilities of gangs on one type; -inf where there is no speed."""
    view = game.view
    rates, gpus = view.rates[rows], view.gpus[rows]
    moves = (view.done[rows] > 0)[:, None] & (game.had[rows] != gpus[:, None])
    best_s = (view.done + view.left)[rows] / rates.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        jct_s = view.since_s[rows][:, None] + np.where(moves, game.move_s, 0.0) + view.left[rows][:, None] / rates
        found: Floats = best_s[:, None] / np.maximum(jct_s, 1e-9)
    return np.where(rates > 0, found, -np.inf)


def _sum(used: Use, more: Use) -> Use:
    return tuple(a + b for a, b in zip(used, more, strict=True))


class Hadar:
    """The policy.

    keeps_running: running jobs keep their GPUs, and prices count them; else all jobs compete each round. exact_rows:
    rounds with at most as many competing jobs are solved exactly.
    """

    def __init__(
        self, keeps_running: bool = True, exact_rows: int = 8, round_s: float = 360.0, move_s: float = 10.0
    ) -> None:
        self.keeps_running, self.exact_rows, self.round_s, self.move_s = keeps_running, exact_rows, round_s, move_s
        self._had: dict[int, Use] = {}

    def place(self, view: RoundView) -> RoundAllocation:
        """Earlier submissions first, where the order counts."""
        nothing = (0,) * len(view.capacity)
        had = np.array([self._had.get(job, nothing) for job in view.jobs.tolist()], dtype=np.int64)
        game = HadarRound(view, prices_of(view, self.round_s), had, self.move_s)
        allocation = had.copy() if self.keeps_running else np.zeros_like(had)
        rows = [int(row) for row in np.argsort(-view.since_s, kind="stable") if not allocation[row].any()]
        choose = choose_exactly if len(rows) <= self.exact_rows else choose_greedily
        for row, use in choose(game, rows, tuple(allocation.sum(axis=0).tolist())).items():
            allocation[row] = use
        uses = [tuple(use) for use in allocation.tolist()]
        self._had = dict(zip(view.jobs.tolist(), uses, strict=True))
        slowest = np.where(allocation > 0, view.rates, np.inf).min(axis=1)
        found = RoundAllocation(allocation, np.where(allocation.any(axis=1), slowest, 0.0))
        return lasts_if_full(view, found) if self.keeps_running else found


def step_shares(steps: int, rates: Floats) -> Ints:
    """Return (copies,) whole steps, summing to `steps`: in proportion to the rates, by largest remainder."""
    total = float(rates.sum())
    if not total > 0 or not (rates >= 0).all():
        raise ValueError("at least one copy needs a positive rate, and none a negative one")
    exact = steps * (rates / total)
    shares: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: steps - int(shares.sum())]] += 1
    return shares


@dataclass(frozen=True)
class ForkedNode:
    """A node that takes one copy of a job. kind: column of its GPU type."""

    kind: int
    gpus: int


def nodes_of(capacity: Ints, gpus_per_node: int) -> list[ForkedNode]:
    """Full nodes of each type, and one smaller node for the rest."""
    found = []
    for kind, gpus in enumerate(capacity.tolist()):
        found += [ForkedNode(kind, gpus_per_node)] * (gpus // gpus_per_node)
        found += [ForkedNode(kind, gpus % gpus_per_node)] if gpus % gpus_per_node else []
    return found


@dataclass(frozen=True)
class HadarForked:
    """The policy. A copy of a gang larger than a node takes the whole node, at the proportional part of its speed."""

    gpus_per_node: int = 4
    round_s: float = 360.0

    def place(self, view: RoundView) -> RoundAllocation:
        """Copies in the order of what they add to the payoff, until every node is full or has a copy of every job."""
        nodes = nodes_of(view.capacity, self.gpus_per_node)
        copies = place_copies(view, nodes, prices_of(view, self.round_s))
        kinds = np.array([node.kind for node in nodes])
        used = np.zeros(view.rates.shape, dtype=np.int64)
        np.add.at(used.T, kinds, copies.T)
        speeds = view.rates[:, kinds] * copies / view.gpus[:, None]
        return RoundAllocation(used, np.array([_rate(*each) for each in zip(view.left.tolist(), speeds, strict=True)]))


def _rate(left: float, speeds: Floats) -> float:
    """Steps/s until the last copy has done its share."""
    running = speeds[speeds > 0]
    if not len(running):
        return 0.0
    shares = step_shares(int(np.ceil(left)), running)
    return float(shares.sum() / (shares / running).max())


def place_copies(view: RoundView, nodes: list[ForkedNode], prices: HadarPrices) -> Ints:
    """(rows, nodes) GPUs of each copy; at most one copy of a job on a node."""
    kinds, free = np.array([node.kind for node in nodes]), np.array([node.gpus for node in nodes])
    needed = np.minimum(view.gpus[:, None], free[None, :])
    speed = view.rates[:, kinds] * needed / view.gpus[:, None]
    best_s = (view.done + view.left) / view.rates.max(axis=1)
    copies: Ints = np.zeros(needed.shape, dtype=np.int64)
    total = np.zeros(len(view.gpus))
    while True:
        fits = (needed <= free[None, :]) & (copies == 0) & (speed > 0)
        if not fits.any():
            return copies
        used = np.bincount(kinds, weights=copies.sum(axis=0), minlength=len(view.capacity)).astype(int)
        price = np.array(prices.of(tuple(used.tolist())))[kinds]
        gain = _utility(view, best_s, total[:, None] + speed) - _utility(view, best_s, total[:, None])
        row, node = divmod(int(np.where(fits, gain - needed * price[None, :], -np.inf).argmax()), len(nodes))
        copies[row, node] = needed[row, node]
        free[node] -= needed[row, node]
        total[row] += speed[row, node]


def _utility(view: RoundView, best_s: Floats, rate: Floats) -> Floats:
    """(rows, ...) best run time over completion time; 0 at a rate of 0."""
    with np.errstate(divide="ignore"):
        found: Floats = best_s[:, None] / np.maximum(view.since_s[:, None] + view.left[:, None] / rate, 1e-9)
    return found
